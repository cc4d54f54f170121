"""The model card of a bundle: the hub's metadata, what the files are, how programs open them, what was measured and what was not.

The card in a bundle's folder has what its export measured; a published one also has sections of figures of devices.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from edge_devices.errors import markdown_text, one_line
from edge_export.errors import ExportError
from edge_export.output.atomic_folder import PRESET_NAME
from edge_runtime.bundle.bundle import hub_repository
from edge_runtime.bundle.exported_quality import Quality, exported_quality
from edge_runtime.bundle.manifest import MEDIA_ENCODER, BundleFile, Manifest

_APACHE = "google/gemma-4-"
_UNMEASURED = """## On devices

Not measured: speed, acceptance by kind of text, cost curve, joules per token. `edge-bench run FOLDER` measures them.
"""


def card(manifest: Manifest, figures: Sequence[str] = (), repository: str | None = None) -> str:
    """The model card; `repository` is where it is published, None for the one in the folder."""
    parts = [
        _metadata(manifest),
        f"# {markdown_text(title_of(manifest))}: a pair of target and drafter\n",
        f"{_sentence(manifest)}\n",
        "| file | what | weights | bytes |\n|:--|:--|:--|--:|",
        "\n".join(map(_file_row, manifest.files)) + "\n",
        *_usage(manifest, repository),
        *_quality(manifest),
        *(figures or [_UNMEASURED]),
        f"Written by {markdown_text(manifest.created_by)} at {markdown_text(manifest.created_at)}.\n",
    ]
    return "\n".join(parts)


def _file_row(entry: BundleFile) -> str:
    cells = (entry.path, entry.role, entry.weights, f"{entry.bytes:,}")
    return f"| {' | '.join(map(markdown_text, cells))} |"


def _usage(manifest: Manifest, repository: str | None) -> list[str]:
    formats, title = formats_of(manifest), _word(title_of(manifest))
    extra = "onnx" if "onnx" in formats else "llama"
    folder = "FOLDER" if repository is None else title
    fetch = "" if repository is None else f"    hf download {repository} --local-dir {folder}\n"
    lines = ["## Run it\n", f"    pip install 'edge-mtp[{extra},serve]'\n{fetch}    edge-run chat {folder}\n    edge-run serve {folder}\n"]
    if "gguf" not in formats:
        return lines
    target, drafter, _ = gguf_files(manifest)
    return [
        *lines,
        "Other programs, in this folder:\n",
        f"    llama-server --models-preset {PRESET_NAME}\n"
        f"    llama-server -m {_word(target.path)} --spec-draft-model {_word(drafter.path)} --spec-type draft-mtp\n"
        f"    ollama create {title.lower()}\n",
    ]


def _word(text: str) -> str:
    """A name in a command that people paste into a shell."""
    return shlex.quote(one_line(text))


def _quality(manifest: Manifest) -> list[str]:
    heading = "## What the export measured\n"
    compared = list(_compared(manifest))
    if not compared:
        parity = manifest.parity or {}
        reason = str(parity.get("skipped") or parity.get("onnx", {}).get("skipped", "no reason given"))
        return [heading, f"Nothing: parity and KL with the unquantized checkpoint were not measured ({markdown_text(reason)}).\n"]
    day = markdown_text(manifest.created_at[:10])
    return [
        heading,
        f"Against the unquantized checkpoint in transformers (float32), on texts that nothing was fitted to, {day},"
        " on the machine of the export.\n",
        "| format | mean KL, nats | perplexity | unquantized | same first choice | drafts that agree |\n|:--|--:|--:|--:|--:|--:|",
        "\n".join(_parity_row(*each) for each in compared) + "\n",
        *(f"The {name} target {quality.words}.\n" for name, quality, _ in compared),
    ]


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
        *(f"- {tag}" for tag in (*formats_of(manifest), "speculative-decoding", "multi-token-prediction", "gemma4")),
    ]
    return "\n".join([*lines, "---", ""])


def _sentence(manifest: Manifest) -> str:
    sources = {role: markdown_text(source.origin) for role, source in manifest.sources.items()}
    text = f"Quantized from `{sources['target']}` and its drafter `{sources['drafter']}`, which proposes tokens that the target verifies."
    return f"{text} The text stays the target's own." + (
        f" This pair is {markdown_text(manifest.description)}." if manifest.description else ""
    )


def _compared(manifest: Manifest) -> Iterator[tuple[str, Quality, float | None]]:
    """Each format that was compared, what it keeps, and the share of its drafts that are the reference's."""
    parity: dict[str, Any] = manifest.parity or {}
    for name, figures in (("GGUF", parity), ("ONNX", parity.get("onnx") or {})):
        if (quality := exported_quality(figures)) is not None:
            drafts = figures.get("drafts")
            agreement = drafts.get("quantized_agreement") if isinstance(drafts, dict) else None
            yield name, quality, agreement if isinstance(agreement, int | float) and 0 <= agreement <= 1 else None


def _parity_row(name: str, quality: Quality, drafts: float | None) -> str:
    return (
        f"| {name} | {quality.mean_kl:.3g} | {quality.perplexity:.4g} | {quality.reference_perplexity:.4g} |"
        f" {quality.greedy_agreement:.1%} | {'' if drafts is None else f'{drafts:.1%}'} |"
    )


def title_of(manifest: Manifest) -> str:
    """The target's name: of its file where there is a GGUF, else of its source."""
    target = _gguf(manifest, "target")
    if target is None:
        return manifest.sources["target"].origin.rpartition("/")[2]
    return target.path.removesuffix(".gguf").removesuffix(f"-{(target.quantization or '').upper()}")


def formats_of(manifest: Manifest) -> list[str]:
    """The formats of the target, gguf and onnx."""
    return sorted({entry.format for entry in manifest.files if entry.role == "target"} & {"gguf", "onnx"})


def gguf_files(manifest: Manifest) -> tuple[BundleFile, BundleFile, BundleFile | None]:
    """The GGUF files: target, drafter, and the encoder of images and sound if there is one. Raises ExportError without the first two."""
    target, drafter = _gguf(manifest, "target"), _gguf(manifest, "drafter")
    if target is None or drafter is None:
        raise ExportError("the manifest lists a target of GGUF without its drafter; export the bundle again")
    return target, drafter, _gguf(manifest, MEDIA_ENCODER)


def _gguf(manifest: Manifest, role: str) -> BundleFile | None:
    return next((entry for entry in manifest.files if (entry.role, entry.format) == (role, "gguf")), None)
