"""Which exports a checkpoint with rounded activations has."""

from __future__ import annotations

from edge_export.checkpoint.sources import ResolvedSource
from edge_export.errors import ExportError
from edge_export.pipeline.request import ExportRequest


def check_rounding(request: ExportRequest, pair: tuple[ResolvedSource, ResolvedSource]) -> None:
    """Raises ExportError if a format that is asked for cannot round activations by fixed scales, as a checkpoint does."""
    for source in pair:
        if not source.checkpoint.rounding:
            continue
        if request.gguf or (request.onnx is not None and request.onnx.device is not None):
            what = "GGUF files cannot" if request.gguf else "graphs of fixed shapes do not"
            raise ExportError(
                f"{source.origin} rounds its activations too, which {what}, and without that its answers get much worse;"
                " export it with --format onnx, or give the -it-qat-q4_0-unquantized checkpoint"
            )
        if request.importance.given:
            raise ExportError(f"{source.origin} is quantized already; leave --calibrate and the importance matrices out")
