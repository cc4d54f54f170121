"""What an export would write and need, computed from the checkpoints' headers or configs alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edge_devices.machine.memory import byte_text
from edge_export.checkpoint.sources import ResolvedSource, planned_download, planned_pair
from edge_export.errors import ExportError
from edge_export.pipeline.bundle_files import architecture, cache_layout
from edge_export.pipeline.gguf_step import planned_head_bytes
from edge_export.pipeline.request import DEFAULT_CONTEXT, DRAFTER_QUANTIZATION, TARGET_QUANTIZATION
from edge_export.quantization.llama_quantize import DIRECT, check_quantization
from edge_runtime.bundle.gguf_types import QUANTIZATIONS
from edge_runtime.bundle.manifest import SCHEMA_VERSION, BundleFile, Manifest, RuntimeSettings


@dataclass(frozen=True, kw_only=True)
class PlannedExport:
    """The manifest with about the sizes of the files; the bytes to download, `listed` by the hub or estimated from the configs.

    `disk_bytes` is about the free disk that the export takes: for the bundle, and beside it for unquantized files.
    """

    manifest: Manifest
    download_bytes: int
    listed: bool
    disk_bytes: int

    def lines(self) -> list[str]:
        """Two sentences for people."""
        label = "by the hub's listing" if self.listed else "estimated from the config: the text model in 16 bits, without images and sound"
        fetched = f"{byte_text(self.download_bytes)} ({label})" if self.download_bytes else "nothing, its files are here"
        return [
            f"To download: {fetched}.",
            f"Free disk for the export: about {byte_text(self.disk_bytes)}, the bundle and the unquantized files that it is made from.",
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "download_bytes": self.download_bytes,
            "download_from": "listing" if self.listed else "config",
            "disk_bytes": self.disk_bytes,
        }


def planned_export(
    target: str,
    drafter: str,
    *,
    target_quantization: str | None = None,
    drafter_quantization: str | None = None,
    context: int | None = None,
) -> PlannedExport:
    """Plans an export to GGUF files. Raises ExportError (CheckpointError).

    Weights are not needed: of a hub repository config.json is fetched, and E2B, E4B, 12B, 26B-A4B and 31B are built in.
    """
    first, second = planned_pair(target, drafter)
    for source in (first, second):
        if source.checkpoint.rounding:
            raise ExportError(
                f"{source.origin} rounds its activations, which GGUF files cannot, and a plan is about GGUF files;"
                " plan the -it-qat-q4_0-unquantized checkpoint, or export this one with --format onnx"
            )
    context = context or min(DEFAULT_CONTEXT, first.checkpoint.architecture.context)
    facts = architecture(first.checkpoint, second.checkpoint, context)
    quantization = drafter_quantization or DRAFTER_QUANTIZATION
    files = [_file(first, target_quantization or TARGET_QUANTIZATION), _file(second, quantization)]
    if second.gguf is None and second.checkpoint.assistant.ordered_embeddings:
        files.append(_entry("drafter_head", quantization, planned_head_bytes(second.checkpoint, quantization)))
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        created_by="plan",
        created_at="",
        sources={},
        architecture=facts,
        cache_layout=cache_layout(first.checkpoint, second.checkpoint, context),
        files=tuple(files),
        runtime=RuntimeSettings(context=context),
    )
    downloads = [planned_download(source) for source in (first, second)]
    unquantized = sum(_unquantized_bytes(source, file) for source, file in zip((first, second), files, strict=False))
    return PlannedExport(
        manifest=manifest,
        download_bytes=sum(size for size, _ in downloads),
        listed=all(listed for _, listed in downloads),
        disk_bytes=unquantized + sum(file.bytes for file in files),
    )


def _unquantized_bytes(source: ResolvedSource, file: BundleFile) -> int:
    """The bytes of the file from which llama.cpp quantizes this one; 0 for a GGUF, and for a type that the exporter writes itself."""
    if source.gguf is not None or file.quantization in DIRECT:
        return 0
    return QUANTIZATIONS[source.stored_type].file_bytes(source.checkpoint.parameters, source.checkpoint.architecture.table_weights)


def _file(source: ResolvedSource, quantization: str) -> BundleFile:
    if source.quantization is not None:
        return _entry(source.role, source.quantization, source.path.stat().st_size)
    check_quantization(quantization)
    weights, tables = source.checkpoint.parameters, source.checkpoint.architecture.table_weights
    if tables > weights:
        raise ExportError(f"{source.origin} has {weights} weights, fewer than its tables of {tables}; check its config.json")
    return _entry(source.role, quantization, QUANTIZATIONS[quantization].file_bytes(weights, tables))


def _entry(role: str, quantization: str, size: int) -> BundleFile:
    return BundleFile(path=f"{role}.gguf", role=role, format="gguf", bytes=size, sha256="", quantization=quantization)
