"""The manifest that an export would write, as far as a plan needs it: from the checkpoints' headers or configs alone."""

from __future__ import annotations

from edge_export.checkpoint.sources import ResolvedSource, planned_pair
from edge_export.errors import ExportError
from edge_export.gguf.drafter_head import head_bytes
from edge_export.pipeline.bundle_files import architecture, cache_layout
from edge_export.pipeline.request import DEFAULT_CONTEXT, DRAFTER_QUANTIZATION, TARGET_QUANTIZATION
from edge_export.quantization.llama_quantize import check_quantization
from edge_runtime.bundle.gguf_types import QUANTIZATIONS
from edge_runtime.bundle.manifest import SCHEMA_VERSION, BundleFile, Manifest, RuntimeSettings


def planned_manifest(
    target: str,
    drafter: str,
    *,
    target_quantization: str | None = None,
    drafter_quantization: str | None = None,
    context: int | None = None,
) -> Manifest:
    """Returns a manifest with the facts, the cache layout and about the sizes of the GGUF files. Raises ExportError (CheckpointError).

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
        row_bytes = QUANTIZATIONS[quantization].file_bytes(facts.drafter_hidden_size, facts.drafter_hidden_size)
        files.append(_entry("drafter_head", quantization, head_bytes(second.checkpoint, row_bytes)))
    return Manifest(
        schema_version=SCHEMA_VERSION,
        created_by="plan",
        created_at="",
        sources={},
        architecture=facts,
        cache_layout=cache_layout(first.checkpoint, second.checkpoint, context),
        files=tuple(files),
        runtime=RuntimeSettings(context=context),
    )


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
