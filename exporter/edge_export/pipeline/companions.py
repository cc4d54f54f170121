"""What a bundle's folder holds for other programs and for people: presets for llama.cpp's server and Ollama, and a model card.

Formats: llama.cpp's docs/preset.md and tools/server/README.md, Ollama's parser/parser.go, the hub's metadata of model cards. They are
not part of the manifest: whoever changes them changes nothing that edge-mtp reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_export.output.atomic_folder import CARD_NAME, MODELFILE_NAME, PRESET_NAME
from edge_runtime.bundle.bundle import hub_repository
from edge_runtime.bundle.exported_quality import Quality, exported_quality
from edge_runtime.bundle.manifest import MEDIA_ENCODER, BundleFile, Manifest

_APACHE = "google/gemma-4-"
# Our names of sampling defaults -> llama-server's options, Ollama's parameters.
_SAMPLING = {
    "temperature": ("temp", "temperature"),
    "top_k": ("top-k", "top_k"),
    "top_p": ("top-p", "top_p"),
    "min_p": ("min-p", "min_p"),
    "repetition_penalty": ("repeat-penalty", "repeat_penalty"),
}


def write_companions(folder: Path, manifest: Manifest) -> None:
    """Writes them into a bundle's folder; the presets only where there are GGUF files. Raises OSError."""
    texts = {CARD_NAME: card(manifest)}
    if "gguf" in _formats(manifest):
        texts |= {PRESET_NAME: preset(manifest), MODELFILE_NAME: modelfile(manifest)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def preset(manifest: Manifest) -> str:
    """One section of an INI file for `llama-server --models-preset`, with paths from the folder in which the server is started."""
    target, drafter, encoder = _files(manifest)
    lines = [
        "; llama.cpp: in this folder, llama-server --models-preset models.ini",
        "version = 1",
        "",
        f"[{_title(manifest)}]",
        f"model = {target.path}",
        f"spec-draft-model = {drafter.path}",
        "spec-type = draft-mtp",
        f"spec-draft-n-max = {manifest.runtime.draft_length}",
        f"ctx-size = {manifest.runtime.context}",
        *([f"mmproj = {encoder.path}"] if encoder is not None else []),
        *(f"{_SAMPLING[name][0]} = {value:g}" for name, value in _sampling(manifest)),
    ]
    return "\n".join(lines) + "\n"


def modelfile(manifest: Manifest) -> str:
    """A Modelfile for `ollama create`, whose DRAFT is the drafter; Ollama reads the chat template of the GGUF itself."""
    target, drafter, encoder = _files(manifest)
    lines = [
        f"# Ollama: in this folder, ollama create {_title(manifest).lower()}",
        f"FROM ./{target.path}",
        *([f"FROM ./{encoder.path}"] if encoder is not None else []),
        f"DRAFT ./{drafter.path}",
        f"PARAMETER draft_num_predict {manifest.runtime.draft_length}",
        f"PARAMETER num_ctx {manifest.runtime.context}",
        *(f"PARAMETER {_SAMPLING[name][1]} {value:g}" for name, value in _sampling(manifest)),
    ]
    return "\n".join(lines) + "\n"


def card(manifest: Manifest) -> str:
    """The model card: the hub's metadata, what the files are, how each program opens them, what the export measured."""
    title, formats = _title(manifest), _formats(manifest)
    extra = "onnx" if "onnx" in formats else "llama"
    parts = [
        _metadata(manifest),
        f"# {title}: a pair of target and drafter\n",
        f"{_sentence(manifest)}\n",
        "| file | what | weights | bytes |\n|:--|:--|:--|--:|",
        "\n".join(f"| {entry.path} | {entry.role} | {entry.quantization or ''} | {entry.bytes:,} |" for entry in manifest.files) + "\n",
        "## Run it\n",
        f"    pip install 'edge-mtp[{extra},serve]'\n    edge-run chat FOLDER\n    edge-run serve FOLDER\n",
    ]
    if "gguf" in formats:
        target, drafter, _ = _files(manifest)
        parts += [
            "Other programs, in this folder:\n",
            f"    llama-server --models-preset {PRESET_NAME}\n"
            f"    llama-server -m {target.path} --spec-draft-model {drafter.path} --spec-type draft-mtp\n"
            f"    ollama create {title.lower()}\n",
        ]
    if compared := list(_compared(manifest)):
        parts += [
            "## What the export measured\n",
            "Against the unquantized checkpoint in transformers (float32), on texts that nothing was fitted to.\n",
            "| format | mean KL, nats | perplexity | unquantized | same first choice | drafts that agree |\n|:--|--:|--:|--:|--:|--:|",
            "\n".join(_parity_row(*each) for each in compared) + "\n",
            *(f"The {name} target {quality.words}.\n" for name, quality, _ in compared),
        ]
    parts.append(f"Written by {manifest.created_by} at {manifest.created_at}.\n")
    return "\n".join(parts)


def _metadata(manifest: Manifest) -> str:
    """The block of YAML at the beginning of a card. Names that are no hub names are left out."""
    origins = [manifest.sources[role].origin for role in ("target", "drafter")]
    bases = [name for origin in origins if ":" not in origin and (name := hub_repository(origin)) is not None]
    lines = ["---", "library_name: edge-mtp"]
    if len(bases) == len(origins):
        lines += ["base_model:", *(f"- {name}" for name in bases), "base_model_relation: quantized"]
        lines += ["license: apache-2.0"] if all(name.startswith(_APACHE) for name in bases) else []
    task = "text-generation" if manifest.media is None else "image-text-to-text"
    lines += [
        f"pipeline_tag: {task}",
        "tags:",
        *(f"- {tag}" for tag in (*_formats(manifest), "speculative-decoding", "multi-token-prediction", "gemma4")),
    ]
    return "\n".join([*lines, "---", ""])


def _sentence(manifest: Manifest) -> str:
    sources = {role: source.origin for role, source in manifest.sources.items()}
    text = f"Quantized from `{sources['target']}` and its drafter `{sources['drafter']}`, which proposes tokens that the target verifies."
    return f"{text} The text stays the target's own." + (f" It is {manifest.description}." if manifest.description else "")


def _compared(manifest: Manifest) -> Iterator[tuple[str, Quality, float | None]]:
    """Each format that was compared, what it keeps, and the share of its drafts that are the reference's."""
    parity: dict[str, Any] = manifest.parity or {}
    for name, figures in (("GGUF", parity), ("ONNX", parity.get("onnx") or {})):
        if (quality := exported_quality(figures)) is not None:
            yield name, quality, figures.get("drafts", {}).get("quantized_agreement")


def _parity_row(name: str, quality: Quality, drafts: float | None) -> str:
    return (
        f"| {name} | {quality.mean_kl:.3g} | {quality.perplexity:.4g} | {quality.reference_perplexity:.4g} |"
        f" {quality.greedy_agreement:.1%} | {'' if drafts is None else f'{drafts:.1%}'} |"
    )


def _title(manifest: Manifest) -> str:
    """The target's name: of its file where there is a GGUF, else of its source."""
    target = _gguf(manifest, "target")
    if target is None:
        return manifest.sources["target"].origin.rpartition("/")[2]
    return target.path.removesuffix(".gguf").removesuffix(f"-{(target.quantization or '').upper()}")


def _formats(manifest: Manifest) -> list[str]:
    return sorted({entry.format for entry in manifest.files if entry.role == "target"})


def _sampling(manifest: Manifest) -> Iterator[tuple[str, float]]:
    for name in _SAMPLING:
        if manifest.generation is not None and (value := getattr(manifest.generation, name)) is not None:
            yield name, value


def _files(manifest: Manifest) -> tuple[BundleFile, BundleFile, BundleFile | None]:
    """Target, drafter, and the encoder of images and sound if there is one."""
    target, drafter = _gguf(manifest, "target"), _gguf(manifest, "drafter")
    assert target is not None
    assert drafter is not None
    return target, drafter, _gguf(manifest, MEDIA_ENCODER)


def _gguf(manifest: Manifest, role: str) -> BundleFile | None:
    return next((entry for entry in manifest.files if (entry.role, entry.format) == (role, "gguf")), None)
