"""The static half of an ONNX export: graphs of fixed shapes for NPUs, embeddings for the host. See docs/npu.md."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from edge_export.checkpoint.architecture import FULL, SLIDING, TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.safetensors import read_float_chunks, row_pieces
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.errors import ExportError
from edge_export.onnx.block_quantization import WeightSpec
from edge_export.onnx.export import onnx_facts, onnx_pair, onnx_reference
from edge_export.onnx.graphs.target import TargetFormats
from edge_export.onnx.media.export import write_encoders
from edge_export.onnx.parity import OnnxParityRequest, measure_onnx_parity, measure_ranges, onnx_why_not
from edge_export.onnx.request import OnnxFiles, OnnxRequest, OnnxWeights, check_onnx_sources
from edge_export.onnx.static.blocks import Shape
from edge_export.onnx.static.models import store_drafter, store_target, write_drafter_graph, write_target_graph
from edge_export.onnx.static.weights import ChannelFormat, PlainGraph, PlainWeightFile, Range
from edge_export.onnx.weight_formats import quantization_name
from edge_export.onnx.weights import WeightFormat
from edge_export.output.atomic_folder import BundlePart
from edge_export.quantization.importance import Importance
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH, CacheBuffer, CacheLayout, RuntimeSettings, StaticGraphs

PREFILL_ROWS = 64
# The default draft and the token before it.
VERIFY_ROWS = RuntimeSettings().draft_length + 1
_ROWS = {"target_prefill": PREFILL_ROWS, "target": VERIFY_ROWS, "target_row": 1}
_TABLES = {"embedding": "model.embed_tokens.weight", "per_layer_embedding": "model.embed_tokens_per_layer.weight"}


def write_static(
    target: ResolvedSource,
    drafter: ResolvedSource,
    request: OnnxRequest,
    *,
    layout: CacheLayout,
    importance: Mapping[str, Importance],
    folder: Path,
    progress: Callable[[int], None],
) -> OnnxFiles:
    """Writes graphs, data files and embeddings into `folder`; `progress` gets the bytes written since its last call. Raises ExportError."""
    check_onnx_sources(target, drafter)
    first, model = target.checkpoint, target.checkpoint.architecture
    if model.experts:
        raise ExportError(f"{target.origin} is a mixture of experts, which graphs of fixed shapes cannot route; leave --device out")
    if request.device == "qnn" and "int4" in (request.target, request.drafter, request.embedding):
        raise ExportError("QNN computes wrong products with int4 weights of one scale per channel; take f16 or int8 for --device qnn")
    if request.device == "qnn" and model.per_layer_size and "int8" in (request.target, request.embedding):
        raise ExportError(
            f"QNN's compiler fails on integer weights beside per-layer embeddings, which {target.origin} has; take f16 for --onnx-target"
        )
    named = dataclasses.replace(layout, buffers=_buffers(model, layout))
    sizes = {SLIDING if buffer.kind == "sliding" else FULL: buffer.rows for buffer in named.buffers}
    label, drafter_label = _label("target", request), _label("drafter", request)
    paths = {role: folder / f"{role.replace('_', '-')}-{label}.onnx" for role in _ROWS}
    paths["drafter"] = folder / f"drafter-{drafter_label}.onnx"
    data = {role: folder / f"{role}-{name}.onnx_data" for role, name in (("target", label), ("drafter", drafter_label))}
    formats = TargetFormats(
        layers=_weight_format(request.target, request), embedding=_weight_format(request.embedding or request.target, request)
    )
    with PlainWeightFile(data["target"], progress, importance.get("target")) as weights:
        stored = store_target(first, weights, formats)
    with PlainWeightFile(data["drafter"], progress, importance.get("drafter")) as weights:
        format = _weight_format(request.drafter, request)
        drafting = store_drafter(
            drafter.checkpoint, weights, format, _weight_format("int8", request) if request.drafter == "int4" else format
        )
    parts = [_part(role, path, "onnx", request) for role, path in paths.items()]
    parts += [_part(f"{role}_data", path, "onnx_data", request) for role, path in data.items()]
    parts += _write_tables(first, request, folder, progress)
    encoders, encoder_ops = write_encoders(first, request.media, folder, progress) if request.media is not None else ((), set())
    parts += encoders
    written = OnnxFiles(
        parts=tuple(parts),
        layout=named,
        graphs=dataclasses.replace(onnx_facts(target, encoder_ops), opset=PlainGraph.opset),
        static=StaticGraphs(
            device=request.device or "static",
            prefill_rows=PREFILL_ROWS,
            verify_rows=VERIFY_ROWS,
            embedding_scale=sqrt(model.hidden_size),
            per_layer_scale=sqrt(model.per_layer_size / 2) if model.per_layer_size else None,
        ),
    )

    def write_graphs(ranges: Mapping[str, tuple[Range, Range]], *, watched: bool = False) -> None:
        for role, count in _ROWS.items():
            graph, shape = PlainGraph(role, ranges=ranges, watched=watched), Shape(rows=count, buffers=sizes)
            write_target_graph(stored, shape, graph, paths[role], logits=role != "target_prefill")
        graph = PlainGraph("drafter", ranges=ranges, watched=watched)
        write_drafter_graph(model, layout.drafter_sources, drafting, Shape(rows=1, buffers=sizes), graph, paths["drafter"])

    if request.device == "qnn" and request.importance_roles:
        write_graphs({}, watched=True)
        write_graphs(_ranges(target, written))
    else:
        write_graphs({})
    return written


def _ranges(target: ResolvedSource, watched: OnnxFiles) -> dict[str, tuple[Range, Range]]:
    """Runs graphs that output their ranges; returns the range of each matrix's inputs and of its outputs, by the matrix's name."""
    found = measure_ranges(onnx_pair(target, watched))
    return {name: (Range(least=ends[0], greatest=ends[1]), Range(least=ends[2], greatest=ends[3])) for name, ends in found.items()}


def compare_static(
    target: ResolvedSource, drafter: ResolvedSource, files: OnnxFiles, request: OnnxRequest, *, folder: Path, threads: int
) -> dict[str, Any]:
    """Compares written graphs with the reference on onnxruntime's CPU provider, as `edge_export.onnx.export.compare` does."""
    reference, plain_request = onnx_reference(target, drafter, threads), OnnxRequest(target="f32", drafter="f32", device="static")
    reason = onnx_why_not(reference)
    if reason is not None:
        return {"skipped": reason}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        plain = files
        if (request.target, request.drafter, request.embedding) != ("f32", "f32", None):
            plain = write_static(
                target, drafter, plain_request, layout=files.layout, importance={}, folder=Path(scratch), progress=lambda _: None
            )
        model = target.checkpoint.architecture
        return measure_onnx_parity(
            OnnxParityRequest(
                **vars(reference),
                plain=plain.paths,
                exported=files.paths,
                layout=files.layout,
                plain_layout=files.layout,
                graphs=files.graphs,
                static=files.static,
                hidden_size=model.hidden_size,
                vocab_size=model.vocab_size,
                weights=request.target,
            )
        )


def _weight_format(weights: OnnxWeights, request: OnnxRequest) -> WeightFormat:
    if weights == "f32" or weights == "f16":
        return WeightFormat(kind=weights)
    if request.device == "qnn":
        return ChannelFormat(kind="blocks")
    return WeightFormat(kind="blocks", spec=WeightSpec(bits=8 if weights == "int8" else 4, block=request.block_size))


def _label(role: str, request: OnnxRequest) -> str:
    weights = request.drafter if role.startswith("drafter") else request.target
    return f"{weights}-channel" if request.device == "qnn" and weights in ("int8", "int4") else quantization_name(role, request)


def _part(role: str, path: Path, kind: str, request: OnnxRequest) -> BundlePart:
    return BundlePart(role=role, path=path, format=kind, quantization=_label(role, request))


def _write_tables(checkpoint: Checkpoint, request: OnnxRequest, folder: Path, progress: Callable[[int], None]) -> list[BundlePart]:
    """Writes the embeddings as NumPy arrays, in which the host looks rows up."""
    word = "f32" if (request.embedding or request.target) == "f32" else "f16"
    kind = np.float32 if word == "f32" else np.float16
    parts: list[BundlePart] = []
    for role, name in _TABLES.items():
        if role == "per_layer_embedding" and not checkpoint.architecture.per_layer_size:
            continue
        tensor, path, at = checkpoint.tensors[name], folder / f"{role.replace('_', '-')}-{word}.npy", 0
        table = np.lib.format.open_memmap(path, "w+", kind, (tensor.shape[0], tensor.shape[1]))
        for piece in row_pieces(read_float_chunks(tensor, "f32"), tensor.shape[1]):
            table[at : at + len(piece)] = piece
            at += len(piece)
            progress(len(piece) * table.strides[0])
        table.flush()
        parts.append(BundlePart(role=role, path=path, format="npy", quantization=word))
    return parts


def _buffers(model: TextArchitecture, layout: CacheLayout) -> tuple[CacheBuffer, ...]:
    """Sliding buffers are rings of the drafter's window, the rows that may be rolled back, and a verify."""
    rows = {SLIDING: model.window + 1 + layout.rewind_slack + MAX_DRAFT_LENGTH + 1, FULL: layout.full.capacity}
    return tuple(
        CacheBuffer(
            layer=layer,
            kind="sliding" if model.is_sliding(layer) else "full",
            key=f"key.{layer}",
            value=f"value.{layer}",
            kv_heads=model.kv_heads_of(layer),
            head_dim=model.head_dim_of(layer),
            dtype="f32",
            rows=rows[model.layer_types[layer]],
        )
        for layer in range(model.owning_layers)
    )
