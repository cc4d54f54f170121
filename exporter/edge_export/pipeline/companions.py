"""Files in a bundle's folder for other programs: presets for llama.cpp's server and Ollama; the model card is in `model_card`.

Formats: llama.cpp's docs/preset.md and tools/server/README.md, Ollama's parser/parser.go. They are not part of the manifest: changing them
changes nothing that edge-mtp reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edge_export.output.atomic_folder import CARD_NAME, MODELFILE_NAME, PRESET_NAME
from edge_export.pipeline.model_card import card, formats_of, gguf_files, title_of
from edge_runtime.bundle.manifest import Manifest

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
    if "gguf" in formats_of(manifest):
        texts |= {PRESET_NAME: preset(manifest), MODELFILE_NAME: modelfile(manifest)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def preset(manifest: Manifest) -> str:
    """One section of an INI file for `llama-server --models-preset`, with paths from the folder in which the server is started."""
    target, drafter, encoder = gguf_files(manifest)
    lines = [
        "; llama.cpp: in this folder, llama-server --models-preset models.ini",
        "version = 1",
        "",
        f"[{title_of(manifest)}]",
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
    target, drafter, encoder = gguf_files(manifest)
    lines = [
        f"# Ollama: in this folder, ollama create {title_of(manifest).lower()}",
        f"FROM ./{target.path}",
        *([f"FROM ./{encoder.path}"] if encoder is not None else []),
        f"DRAFT ./{drafter.path}",
        f"PARAMETER draft_num_predict {manifest.runtime.draft_length}",
        f"PARAMETER num_ctx {manifest.runtime.context}",
        *(f"PARAMETER {_SAMPLING[name][1]} {value:g}" for name, value in _sampling(manifest)),
    ]
    return "\n".join(lines) + "\n"


def _sampling(manifest: Manifest) -> Iterator[tuple[str, float]]:
    for name in _SAMPLING:
        if manifest.generation is not None and (value := getattr(manifest.generation, name)) is not None:
            yield name, value
