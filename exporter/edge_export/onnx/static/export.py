"""Graphs of fixed shapes for NPUs, and embeddings for the host, which looks them up. See docs/design/onnx-graphs.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from pathlib import Path

import numpy as np

from edge_export.checkpoint.architecture import FULL, SLIDING, TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.safetensors import read_rows
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.onnx.graph_builder import PlainGraph, ValueRange
from edge_export.onnx.graphs.drafter import DrafterWeights
from edge_export.onnx.graphs.target import TargetWeights
from edge_export.onnx.parity import measure_ranges
from edge_export.onnx.request import OnnxFiles, OnnxRequest
from edge_export.onnx.static.graphs import Shape, write_drafter_graph, write_target_graph
from edge_export.output.atomic_folder import BundlePart
from edge_runtime.bundle.manifest import CacheLayout, RuntimeSettings, StaticGraphs

PREFILL_ROWS = 64
# The default draft and the token before it.
VERIFY_ROWS = RuntimeSettings().draft_length + 1
# Rows of the target's graphs.
STATIC_ROWS = {"target_prefill": PREFILL_ROWS, "target": VERIFY_ROWS, "target_row": 1}
_TABLES = {"embedding": "model.embed_tokens.weight", "per_layer_embedding": "model.embed_tokens_per_layer.weight"}


def static_facts(model: TextArchitecture, request: OnnxRequest) -> StaticGraphs | None:
    """Returns the manifest's facts of graphs of fixed shapes; None if the request asks for others."""
    if request.device is None:
        return None
    return StaticGraphs(
        device=request.device,
        prefill_rows=PREFILL_ROWS,
        verify_rows=VERIFY_ROWS,
        embedding_scale=sqrt(model.hidden_size),
        per_layer_scale=sqrt(model.per_layer_size / 2) if model.per_layer_size else None,
    )


def write_static(
    target: TargetWeights,
    drafter: DrafterWeights,
    layout: CacheLayout,
    paths: Mapping[str, Path],
    *,
    ranges: Mapping[str, tuple[ValueRange, ValueRange]] | None = None,
    with_ranges: bool = False,
) -> None:
    """Writes the graphs; `ranges` and `with_ranges` as for `PlainGraph`."""
    sizes = {SLIDING if buffer.kind == "sliding" else FULL: buffer.rows for buffer in layout.buffers}
    for role, count in STATIC_ROWS.items():
        graph, shape = PlainGraph(role, ranges=ranges, with_ranges=with_ranges), Shape(rows=count, buffers=sizes)
        write_target_graph(target, shape, graph, paths[role], prefill=role == "target_prefill")
    graph = PlainGraph("drafter", ranges=ranges, with_ranges=with_ranges)
    write_drafter_graph(target.model, layout.drafter_sources, drafter, Shape(rows=1, buffers=sizes), graph, paths["drafter"])


def write_calibrated(target: TargetWeights, drafter: DrafterWeights, source: ResolvedSource, files: OnnxFiles) -> None:
    """Writes the graphs of `files` twice: first they output the ranges of each matrix's input and output, then they round to them."""
    write_static(target, drafter, files.layout, files.paths, with_ranges=True)
    ends = measure_ranges(source, files)
    ranges = {name: (ValueRange(low=end[0], high=end[1]), ValueRange(low=end[2], high=end[3])) for name, end in ends.items()}
    write_static(target, drafter, files.layout, files.paths, ranges=ranges)


def write_tables(checkpoint: Checkpoint, request: OnnxRequest, folder: Path, progress: Callable[[int], None]) -> list[BundlePart]:
    """Writes the embeddings as NumPy arrays, in which the host looks rows up."""
    word = "f32" if (request.embedding or request.target) == "f32" else "f16"
    kind = np.float32 if word == "f32" else np.float16
    parts: list[BundlePart] = []
    for role, name in _TABLES.items():
        if role == "per_layer_embedding" and not checkpoint.architecture.per_layer_size:
            continue
        tensor, path, at = checkpoint.tensors[name], folder / f"{role.replace('_', '-')}-{word}.npy", 0
        table = np.lib.format.open_memmap(path, "w+", kind, (tensor.shape[0], tensor.shape[1]))
        for piece in read_rows(tensor):
            table[at : at + len(piece)] = piece
            at += len(piece)
            progress(len(piece) * table.strides[0])
        table.flush()
        parts.append(BundlePart(role=role, path=path, format="npy", quantization=word))
    return parts
