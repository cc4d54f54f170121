"""Graphs of fixed shapes for NPUs, in plain operators of opset 21, and the embeddings for them. See docs/design/onnx-graphs.md.

The host looks embeddings up, computes the masks and stores the K/V rows. Attention reads a buffer of past rows and the new rows, and the
graph outputs the new rows. The host copies only accepted rows into the buffer, so rolling back costs nothing. The host's mask selects the
rows that a query attends to, so a sliding buffer may be a ring. The math is that of onnx/graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import pi, sqrt
from pathlib import Path

import numpy as np

from edge_export.checkpoint.architecture import FULL, SLIDING, TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.safetensors import read_rows
from edge_export.checkpoint.sources import ResolvedSource
from edge_export.onnx.graph_builder import GraphBuilder, PlainGraph, ValueRange
from edge_export.onnx.graphs.attention import FLOAT_ROWS, LAYER_KINDS, CacheNames
from edge_export.onnx.graphs.blocks import Blocks, BlockWeights, Hidden, norms_behind, per_layer_inputs
from edge_export.onnx.graphs.drafter import DrafterWeights, step
from edge_export.onnx.graphs.target import TargetWeights, logits
from edge_export.onnx.parity import measure_ranges
from edge_export.onnx.request import OnnxFiles, OnnxRequest
from edge_export.output import BundlePart
from edge_runtime.bundle.manifest import CacheLayout, RuntimeSettings, StaticGraphs


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Fixed sizes of a graph: the number of rows of a forward, and of the K/V buffers by kind of layer."""

    rows: int
    buffers: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class StaticInputs:
    """Inputs for one kind of layer: `cosine` and `sine` [1, rows, 1, head_dim/2], additive `mask` [1, 1, rows, buffer rows + new rows]."""

    cosine: str
    sine: str
    mask: str


def declare_static(graph: GraphBuilder, model: TextArchitecture, shape: Shape, new_rows: int) -> dict[str, StaticInputs]:
    """Declares the inputs of attention for each kind of layer that the model has."""
    declared = {}
    for kind, word in LAYER_KINDS.items():
        if kind not in model.layer_types:
            continue
        half = model.head_dim_of(model.layer_types.index(kind)) // 2
        rotation_shape = (1, shape.rows, 1, half)
        declared[kind] = StaticInputs(
            cosine=graph.input(f"cosine_{word}", "f32", rotation_shape),
            sine=graph.input(f"sine_{word}", "f32", rotation_shape),
            mask=graph.input(f"mask_{word}", "f32", (1, 1, shape.rows, shape.buffers[kind] + new_rows)),
        )
    return declared


def declare_buffer(graph: GraphBuilder, model: TextArchitecture, shape: Shape, layer: int) -> CacheNames:
    """Declares the K/V buffers of an owning layer of the target; the graph only reads them."""
    size = (1, model.kv_heads_of(layer), shape.buffers[model.layer_types[layer]], model.head_dim_of(layer))
    return CacheNames(key=graph.input(f"key.{layer}", "f32", size), value=graph.input(f"value.{layer}", "f32", size), owner=layer)


class StaticBlocks(Blocks):
    """Emits the layers of one model with fixed shapes."""

    def __init__(self, graph: GraphBuilder, model: TextArchitecture, shape: Shape, inputs: dict[str, StaticInputs]) -> None:
        super().__init__(graph, model, {}, FLOAT_ROWS)
        self._shape = shape
        self._static_inputs = inputs
        self._new_rows: dict[str, CacheNames] = {}

    def _normed(self, graph: GraphBuilder, value: str, weight: str, epsilon_factor: float = 1.0, *, name: str | None = None) -> str:
        return graph.op("Mul", self._unweighted_norm(value, epsilon_factor), weight, name=name)

    def _unweighted_norm(self, value: str, epsilon_factor: float = 1.0) -> str:
        graph = self._graph
        mean = graph.op("ReduceMean", graph.op("Mul", value, value), graph.integers([-1]), keepdims=1)
        return graph.op("Div", value, graph.op("Sqrt", graph.op("Add", mean, graph.floats(self._model.norm_epsilon * epsilon_factor))))

    def _gelu(self, graph: GraphBuilder, value: str) -> str:
        """GELU by its tanh formula."""
        cubed = graph.op("Mul", graph.op("Mul", value, value), value)
        inner = graph.op("Add", value, graph.op("Mul", cubed, graph.floats(0.044715)))
        tanh = graph.op("Tanh", graph.op("Mul", inner, graph.floats(sqrt(2 / pi))))
        return graph.op("Mul", graph.op("Mul", value, graph.floats(0.5)), graph.op("Add", tanh, graph.floats(1)))

    def _attention(self, rows: tuple[str, str], layer: int, weights: BlockWeights, cache: CacheNames, present: CacheNames | None) -> str:
        graph, model = self._graph, self._model
        query, *own = self._apart(rows, layer, weights)
        if own:
            assert present is not None
            self._keep(own, layer, weights, present)
            self._new_rows[cache.key] = present
        apart = self._by_heads(query, model.heads, model.head_dim_of(layer))
        query = self.norm(apart, graph.weight(weights.norms["self_attn.q_norm"]))
        return self._attended(self._rotated(query, layer), layer, cache, self._new_rows.get(cache.key))

    def keys_and_values(self, normed: str, layer: int, weights: BlockWeights, present: CacheNames) -> None:
        """Outputs the K and V of a layer from its normed input [1, rows, hidden_size]; the rest of the layer is not computed."""
        self._keep(self._apart((normed, normed), layer, weights)[1:], layer, weights, present)

    def _keep(self, own: list[str], layer: int, weights: BlockWeights, present: CacheNames) -> None:
        """Outputs keys and values as new rows. If `own` has a single projection, both are computed from it."""
        graph, kv_heads, head_dim = self._graph, self._model.kv_heads_of(layer), self._model.head_dim_of(layer)
        key = self.norm(self._by_heads(own[0], kv_heads, head_dim), graph.weight(weights.norms["self_attn.k_norm"]))
        value = self._unweighted_norm(self._by_heads(own[-1], kv_heads, head_dim))
        graph.op("Transpose", self._rotated(key, layer), perm=[0, 2, 1, 3], name=present.key)
        graph.op("Transpose", value, perm=[0, 2, 1, 3], name=present.value)

    def _by_heads(self, value: str, heads: int, head_dim: int) -> str:
        return self._graph.op("Reshape", value, self._graph.integers([1, self._shape.rows, heads, head_dim]))

    def _rotated(self, value: str, layer: int) -> str:
        """Rotary embedding of value [1, rows, heads, head_dim]."""
        graph, inputs = self._graph, self._static_inputs[self._model.layer_types[layer]]
        half = self._model.head_dim_of(layer) // 2
        first, second = graph.split(value, [half, half])
        left = graph.op("Sub", graph.op("Mul", first, inputs.cosine), graph.op("Mul", second, inputs.sine))
        right = graph.op("Add", graph.op("Mul", second, inputs.cosine), graph.op("Mul", first, inputs.sine))
        return graph.op("Concat", left, right, axis=-1)

    def _attended(self, query: str, layer: int, cache: CacheNames, new: CacheNames | None) -> str:
        """Attention of query [1, rows, heads, head_dim]. All query heads that share a K/V head are stacked as rows of one product."""
        graph, model, rows = self._graph, self._model, self._shape.rows
        kind, heads, kv_heads, head_dim = model.layer_types[layer], model.heads, model.kv_heads_of(layer), model.head_dim_of(layer)
        group, held = heads // kv_heads, self._shape.buffers[kind]
        sizes = [held, rows] if new else [held]

        def shaped(value: str, *shape: int) -> str:
            return graph.op("Reshape", value, graph.integers(np.array(shape)))

        stacked = shaped(graph.op("Transpose", query, perm=[0, 2, 1, 3]), 1, kv_heads, group * rows, head_dim)
        scores = [
            graph.op("MatMul", stacked, graph.op("Transpose", key, perm=[0, 1, 3, 2])) for key in [cache.key, *([new.key] if new else [])]
        ]
        together = graph.op("Concat", *scores, axis=-1) if new else scores[0]
        masked = graph.op("Add", shaped(together, kv_heads, group, rows, sum(sizes)), self._static_inputs[kind].mask)
        shares = shaped(graph.op("Softmax", masked, axis=-1), 1, kv_heads, group * rows, sum(sizes))
        if new:
            past, own = graph.split(shares, sizes)
            mixed = graph.op("Add", graph.op("MatMul", past, cache.value), graph.op("MatMul", own, new.value))
        else:
            mixed = graph.op("MatMul", shares, cache.value)
        apart = graph.op("Transpose", shaped(mixed, 1, heads, rows, head_dim), perm=[0, 2, 1, 3])
        return shaped(apart, 1, rows, heads * head_dim)


def write_target_graph(target: TargetWeights, shape: Shape, graph: PlainGraph, path: Path, *, prefill: bool) -> None:
    """Writes a graph of `shape.rows` rows; outputs the new K/V rows, `hidden` [1, rows, hidden_size] and `logits`.

    A prefill graph outputs only K/V rows, so it ends inside the last layer that has its own.
    """
    model, rows = target.model, shape.rows
    embedded = graph.input("embedded", "f32", (1, rows, model.hidden_size))
    blocks = StaticBlocks(graph, model, shape, declare_static(graph, model, shape, rows))
    per_layer: list[str] = []
    if target.per_layer is not None:
        identity = graph.input("per_layer", "f32", (1, rows, model.layers * model.per_layer_size))
        per_layer = per_layer_inputs(graph, blocks.head_norm, model, embedded, identity, target.per_layer.projection, target.per_layer.norm)
    buffers = {layer: declare_buffer(graph, model, shape, layer) for layer in range(model.owning_layers)}
    new_rows = {layer: CacheNames(key=f"new_key.{layer}", value=f"new_value.{layer}", owner=layer) for layer in buffers}
    first, following = graph.weight(target.layers[0].norms["input_layernorm"]), norms_behind(target.layers, target.norm)
    hidden = Hidden(embedded, blocks.norm(embedded, first))
    for layer, kind in enumerate(model.layer_types[: model.owning_layers - 1 if prefill else None]):
        owner = layer if layer in buffers else model.last_owner(kind)
        hidden = blocks.block(
            hidden,
            layer,
            target.layers[layer],
            following[layer],
            cache=buffers[owner],
            present=new_rows.get(layer),
            per_layer=per_layer[layer] if per_layer else "",
            name="hidden" if layer == model.layers - 1 else None,
        )
    if prefill:
        last = model.owning_layers - 1
        blocks.keys_and_values(hidden.normed, last, target.layers[last], new_rows[last])
    for layer, names in new_rows.items():
        for name in (names.key, names.value):
            graph.output(name, "f32", (1, model.kv_heads_of(layer), rows, model.head_dim_of(layer)))
    if not prefill:
        graph.output(hidden.normed, "f32", (1, rows, model.hidden_size))
        graph.output(logits(graph, target, hidden.normed), "f32", (1, rows, model.vocab_size))
    graph.save(path)


def write_drafter_graph(
    target: TextArchitecture, sources: tuple[int, ...], drafter: DrafterWeights, shape: Shape, graph: PlainGraph, path: Path
) -> None:
    """Writes one draft step; `sources[i]` is the target layer whose rows layer i reads.

    Inputs: `embedded` and `hidden` [1, 1, target_hidden_size]. Outputs: `scores` float32 [n], with a sparse head also `candidates`
    int64 [n], the tokens of these scores, and `hidden_out`, the next step's `hidden`.
    """
    model = drafter.model
    width = (1, 1, model.target_hidden_size)
    embedded, hidden = graph.input("embedded", "f32", width), graph.input("hidden", "f32", width)
    blocks = StaticBlocks(graph, model, shape, declare_static(graph, model, shape, 0))
    buffers = {layer: declare_buffer(graph, target, shape, layer) for layer in sorted(set(sources))}
    following, (scores, candidates) = step(graph, blocks, drafter, [buffers[layer] for layer in sources], embedded, hidden)
    count = model.top_centroids * model.vocab_size // model.centroids if candidates else model.vocab_size
    graph.output(graph.op("Identity", following, name="hidden_out"), "f32", width)
    graph.output(graph.op("Identity", scores, name="scores"), "f32", (count,))
    if candidates:
        graph.output(graph.op("Identity", candidates, name="candidates"), "i64", (count,))
    graph.save(path)


PREFILL_ROWS = 64
# The default draft length, plus the token before the draft.
VERIFY_ROWS = RuntimeSettings().draft_length + 1
# Rows of the target's graphs, by role.
STATIC_ROWS = {"target_prefill": PREFILL_ROWS, "target": VERIFY_ROWS, "target_row": 1}
_TABLES = {"embedding": "model.embed_tokens.weight", "per_layer_embedding": "model.embed_tokens_per_layer.weight"}


def static_facts(model: TextArchitecture, request: OnnxRequest) -> StaticGraphs | None:
    """Returns the manifest's facts about graphs of fixed shapes; None if the request is for dynamic shapes."""
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
    """Writes the graphs. `ranges` and `with_ranges` are those of `PlainGraph`."""
    sizes = {SLIDING if buffer.kind == "sliding" else FULL: buffer.rows for buffer in layout.buffers}
    for role, count in STATIC_ROWS.items():
        graph, shape = PlainGraph(role, ranges=ranges, with_ranges=with_ranges), Shape(rows=count, buffers=sizes)
        write_target_graph(target, shape, graph, paths[role], prefill=role == "target_prefill")
    graph = PlainGraph("drafter", ranges=ranges, with_ranges=with_ranges)
    write_drafter_graph(target.model, layout.drafter_sources, drafter, Shape(rows=1, buffers=sizes), graph, paths["drafter"])


def write_calibrated(target: TargetWeights, drafter: DrafterWeights, source: ResolvedSource, files: OnnxFiles) -> None:
    """Writes the graphs twice: first with outputs that measure the ranges of activations, then with activations rounded to these."""
    write_static(target, drafter, files.layout, files.paths, with_ranges=True)
    ends = measure_ranges(source, files)
    ranges = {name: (ValueRange(low=end[0], high=end[1]), ValueRange(low=end[2], high=end[3])) for name, end in ends.items()}
    write_static(target, drafter, files.layout, files.paths, ranges=ranges)


def write_tables(checkpoint: Checkpoint, request: OnnxRequest, folder: Path, progress: Callable[[int], None]) -> list[BundlePart]:
    """Writes the embedding tables as NumPy arrays, from which the host reads single rows."""
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
