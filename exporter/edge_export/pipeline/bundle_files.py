"""The bundle's files beside the models: tokenizer, chat template, manifest entries, config.yaml, signature."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge_devices.files.limited_read import sha256_of
from edge_devices.waiting import Progress
from edge_export.checkpoint.sources import ResolvedSource, manifest_source, source_files
from edge_export.checkpoint.tokenizer_vocabulary import TOKENIZER_NAME
from edge_export.errors import ExportError
from edge_export.output.atomic_folder import BundlePart
from edge_runtime.bundle import signature
from edge_runtime.bundle.manifest import BundleFile, Manifest, ModelSource
from edge_runtime.config.schema import CacheConfig, DrafterConfig, SpeculativeConfig, VerifierConfig
from edge_runtime.config.settings import defaults, expanded
from edge_runtime.errors import EdgeRuntimeError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_CHAT_TEMPLATE = "chat_template.jinja"
_PIECE_BYTES = 4 << 20


def copy_file(source: Path, destination: Path, progress: Callable[[int], None] = lambda _: None) -> None:
    """Copies a file; `progress` gets the bytes copied since its last call."""
    with source.open("rb") as reader, destination.open("wb") as writer:
        while piece := reader.read(_PIECE_BYTES):
            writer.write(piece)
            progress(len(piece))


def copy_texts(target: ResolvedSource, folder: Path, progress: Progress) -> list[BundlePart]:
    """Puts the tokenizer and the chat template into the bundle. A GGUF holds its tokenizer itself."""
    progress.step("Copy the tokenizer", None)
    parts: list[BundlePart] = []
    template: str | None = None
    if target.gguf is not None:
        text = target.gguf.keys.get("tokenizer.chat_template")
        template = text if isinstance(text, str) else None
    elif target.tokenizer is not None:
        copy_file(target.tokenizer.folder / TOKENIZER_NAME, folder / TOKENIZER_NAME)
        parts.append(BundlePart(role="tokenizer", path=folder / TOKENIZER_NAME, format="json"))
        template = target.tokenizer.chat_template
    if template is not None:
        (folder / _CHAT_TEMPLATE).write_text(template, encoding="utf-8", newline="")
        parts.append(BundlePart(role="chat_template", path=folder / _CHAT_TEMPLATE, format="jinja"))
    return parts


def hash_parts(parts: list[BundlePart], folder: Path, progress: Progress) -> tuple[BundleFile, ...]:
    """Returns the manifest's entries of the written files."""
    progress.step("Hash the bundle", None)
    return tuple(
        BundleFile(
            path=part.path.relative_to(folder).as_posix(),
            role=part.role,
            format=part.format,
            bytes=part.path.stat().st_size,
            sha256=sha256_of(part.path),
            quantization=part.quantization,
        )
        for part in parts
    )


def hash_source(source: ResolvedSource, progress: Progress) -> ModelSource:
    """Returns the manifest's entry of one half's source files."""
    progress.step(f"Hash the {source.role}'s source", sum(path.stat().st_size for path in source_files(source)))
    return manifest_source(source, progress.advance)


def bundle_config(config: SpeculativeConfig, manifest: Manifest) -> SpeculativeConfig:
    """Returns the bundle's config.yaml: `config` over the defaults, with the models, quantizations and context of the manifest."""
    # Of two formats the first counts, as for a reader.
    quantizations = {entry.role: entry.quantization for entry in reversed(manifest.files)}
    exported = SpeculativeConfig(
        drafter=DrafterConfig(model=manifest.sources["drafter"].origin, precision=quantizations["drafter"]),
        verifier=VerifierConfig(model=manifest.sources["target"].origin, precision=quantizations["target"]),
        cache=CacheConfig(max_context_length=manifest.runtime.context),
    )
    complete = exported.over(expanded(config)).over(defaults(manifest.runtime))
    # Every value of the preset is written out, so its name is left out.
    return replace(complete, tuning=replace(complete.tuning, preset=None))


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """Returns the private key in a PEM file without a password. Raises ExportError if it is none, before anything is made."""
    try:
        return signature.read_signing_key(path)
    except EdgeRuntimeError as error:
        raise ExportError(str(error)) from error


def sign_manifest(folder: Path, manifest: bytes, key: Ed25519PrivateKey) -> None:
    """Writes the signature of these bytes beside them."""
    (folder / signature.SIGNATURE_NAME).write_bytes(base64.b64encode(key.sign(manifest)) + b"\n")
