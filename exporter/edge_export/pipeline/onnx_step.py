"""The ONNX part of an export, in steps that are shown. Imports onnx only when graphs are asked for."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edge_export.checkpoint.sources import ResolvedSource
from edge_export.errors import ExportError
from edge_export.onnx.request import Made, OnnxRequest, expected_onnx_bytes, table_bytes
from edge_export.quantization.importance import Importance
from edge_runtime.bundle.manifest import CacheLayout

if TYPE_CHECKING:
    from edge_export.pipeline.request import Progress


def _onnx(name: Literal["export", "static.export"]) -> Any:
    """The module that writes ONNX graphs; it and onnx are imported by those who ask for them."""
    try:
        return import_module(f"edge_export.onnx.{name}")
    except ImportError as error:
        raise ExportError(f"onnx is not installed ({error}); pip install 'edge-mtp[export]' to write ONNX graphs") from error


def make_onnx(
    pair: tuple[ResolvedSource, ResolvedSource],
    layout: CacheLayout,
    request: OnnxRequest,
    importance: dict[str, Importance],
    folder: Path,
    progress: Progress,
) -> Made:
    """Writes the graphs and their data into `folder`. Raises ExportError."""
    progress.step("Write the ONNX graphs", _onnx_bytes(pair, request))
    if request.device is not None:
        made = _onnx("static.export").write_static(*pair, layout, request, importance, folder, progress.advance)
        return Made(parts=made.parts, layout=made.layout, graphs=made.graphs, static=made.static)
    parts, graphs, named = _onnx("export").write_onnx(*pair, layout, request, importance, folder, progress.advance)
    return Made(parts=parts, layout=named, graphs=graphs)


def _onnx_bytes(pair: tuple[ResolvedSource, ResolvedSource], request: OnnxRequest) -> int:
    sizes = zip(pair, (request.target, request.drafter), strict=True)
    tables = 0 if request.device is None else table_bytes(pair[0].checkpoint.architecture, request.embedding or request.target)
    return tables + sum(expected_onnx_bytes(part.checkpoint.parameters, weights) for part, weights in sizes)


def check_onnx_space(pair: tuple[ResolvedSource, ResolvedSource], request: OnnxRequest, folder: Path) -> None:
    """Raises ExportError if the disk has no room for the ONNX graphs."""
    needed, free = _onnx_bytes(pair, request), shutil.disk_usage(folder).free
    if needed > free:
        raise ExportError(
            f"{folder.parent} has {free} bytes free, the ONNX graphs need about {needed}; free some space or choose another disk"
        )


def onnx_parity(
    request: OnnxRequest | None,
    verify: bool,
    pair: tuple[ResolvedSource, ResolvedSource],
    made: Made,
    folder: Path,
    threads: int,
    progress: Progress,
) -> dict[str, Any]:
    """What the manifest's `parity` says of the graphs: figures, or why there are none; nothing if no graphs were asked for."""
    if request is None:
        return {}
    if not verify:
        return {"onnx": {"skipped": "it was switched off with --no-verify"}}
    progress.step("Compare the ONNX graphs with the reference", None)
    if request.device is not None:
        return {"onnx": _onnx("static.export").compare_static(*pair, made, request, folder, threads)}
    return {"onnx": _onnx("export").compare(*pair, made.parts, made.layout, request, folder, threads)}
