"""The ONNX part of an export. Imports onnx only when graphs are asked for."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edge_devices.waiting import Progress
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.errors import ExportError
from edge_export.onnx.request import OnnxFiles, OnnxRequest, expected_onnx_bytes, table_bytes
from edge_export.pipeline.request import ExportRequest
from edge_export.quantization.importance import Importance
from edge_runtime.bundle.manifest import CacheLayout

Pair = tuple[ResolvedSource, ResolvedSource]


def check_onnx_space(pair: Pair, request: OnnxRequest, folder: Path) -> None:
    """Raises ExportError if the disk has no room for the ONNX graphs."""
    needed, free = _onnx_bytes(pair, request), shutil.disk_usage(folder).free
    if needed > free:
        raise ExportError(
            f"{folder.parent} has {free} bytes free, the ONNX graphs need about {needed}; free some space or choose another disk"
        )


def _onnx_bytes(pair: Pair, request: OnnxRequest) -> int:
    sizes = zip(pair, (request.target, request.drafter), strict=True)
    tables = 0 if request.device is None else table_bytes(pair[0].checkpoint.architecture, request.embedding or request.target)
    return tables + sum(expected_onnx_bytes(part.checkpoint.parameters, weights) for part, weights in sizes)


def make_onnx(
    pair: Pair, request: OnnxRequest, *, layout: CacheLayout, importance: Mapping[str, Importance], folder: Path, progress: Progress
) -> OnnxFiles:
    """Writes the graphs and their data into `folder`. Raises ExportError."""
    progress.step("Write the ONNX graphs", _onnx_bytes(pair, request))
    with _onnx_installed():
        from edge_export.onnx.export import write_onnx
    return write_onnx(*pair, request, layout=layout, importance=importance, folder=folder, progress=progress.advance)


def onnx_parity(
    pair: Pair, files: OnnxFiles, request: ExportRequest, onnx: OnnxRequest, folder: Path, progress: Progress
) -> dict[str, Any]:
    """Returns the graphs' part of the manifest's `parity`: figures, or why there are none. Raises ParityError."""
    if not request.verify:
        return {"skipped": "it was switched off with --no-verify"}
    progress.step("Compare the ONNX graphs with the reference", None)
    with _onnx_installed():
        from edge_export.onnx.export import compare
    return compare(*pair, files, onnx, folder=folder, threads=request.thread_count)


@contextlib.contextmanager
def _onnx_installed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ExportError(f"onnx is not installed ({error}); pip install 'edge-mtp[export]' to write ONNX graphs") from error
