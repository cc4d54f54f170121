"""Target and drafter as graphs of fixed shapes. The host looks embeddings up, computes the masks, and stores the K/V rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from edge_export.checkpoint.architecture import AssistantArchitecture, TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint, cluster_rows
from edge_export.checkpoint.tensor_names import CENTROIDS
from edge_export.gguf.split_drafter import token_order
from edge_export.onnx.graph_builder import Graph
from edge_export.onnx.graphs.attention import CacheNames
from edge_export.onnx.graphs.blocks import BlockWeights, per_layer_inputs, store_block
from edge_export.onnx.graphs.target import TargetFormats
from edge_export.onnx.static.blocks import Shape, StaticBlocks, declare_buffer, declare_static
from edge_export.onnx.static.weights import PlainGraph, PlainWeightFile
from edge_export.onnx.weights import Matrix, Stored, WeightFormat


@dataclass(frozen=True, kw_only=True)
class StaticTarget:
    """The target's weights, stored once for all its graphs."""

    model: TextArchitecture
    layers: list[BlockWeights]
    norm: Stored
    head: Matrix
    per_layer: tuple[Matrix, Stored] | None


def store_target(checkpoint: Checkpoint, weights: PlainWeightFile, formats: TargetFormats) -> StaticTarget:
    """Writes the target's weights except its embeddings, which the host reads."""
    model = checkpoint.architecture
    per_layer = None
    if model.per_layer_size:
        projection = weights.matrix(checkpoint, ["model.per_layer_model_projection.weight"], formats.layers)
        per_layer = projection, weights.vector(checkpoint, "model.per_layer_projection_norm.weight", 1 / sqrt(2))
    return StaticTarget(
        model=model,
        per_layer=per_layer,
        layers=[store_block(weights, checkpoint, layer, formats.layers) for layer in range(model.layers)],
        norm=weights.vector(checkpoint, "model.norm.weight"),
        head=weights.matrix(checkpoint, ["model.embed_tokens.weight" if model.tied else "lm_head.weight"], formats.embedding),
    )


def write_target_graph(target: StaticTarget, shape: Shape, graph: PlainGraph, path: Path, *, logits: bool) -> None:
    """Writes a graph of `shape.rows` rows; outputs `hidden` [1, rows, hidden_size], the new K/V rows, and `logits` if asked for."""
    model, rows = target.model, shape.rows
    embedded = graph.input("embedded", "f32", (1, rows, model.hidden_size))
    blocks = StaticBlocks(graph, model, shape, declare_static(graph, model, shape, rows))
    per_layer: list[str] = []
    if target.per_layer is not None:
        identity = graph.input("per_layer", "f32", (1, rows, model.layers * model.per_layer_size))
        per_layer = per_layer_inputs(graph, blocks.norm, model, embedded, identity, *target.per_layer)
    buffers = {layer: declare_buffer(graph, model, shape, layer) for layer in range(model.owning_layers)}
    new_rows = {layer: CacheNames(key=f"new_key.{layer}", value=f"new_value.{layer}", owner=layer) for layer in buffers}
    value = embedded
    for layer, kind in enumerate(model.layer_types):
        owner = layer if layer in buffers else model.last_owner(kind)
        value = blocks.block(
            value,
            layer,
            target.layers[layer],
            cache=buffers[owner],
            present=new_rows.get(layer),
            per_layer=per_layer[layer] if per_layer else "",
        )
    for layer, names in new_rows.items():
        for name in (names.key, names.value):
            graph.output(name, "f32", (1, model.kv_heads_of(layer), rows, model.head_dim_of(layer)))
    hidden = graph.op("Identity", blocks.norm(value, graph.weight(target.norm)), name="hidden")
    graph.output(hidden, "f32", (1, rows, model.hidden_size))
    if logits:
        graph.output(_logits(graph, model, hidden, target.head), "f32", (1, rows, model.vocab_size))
    graph.save(path)


def _logits(graph: Graph, model: TextArchitecture, hidden: str, head: Matrix) -> str:
    logits = graph.linear(hidden, head)
    if model.logit_softcap is not None:
        cap = graph.floats(model.logit_softcap)
        logits = graph.op("Mul", graph.op("Tanh", graph.op("Div", logits, cap)), cap)
    return graph.op("Identity", logits, name="logits")


@dataclass(frozen=True, kw_only=True)
class StaticDrafter:
    """The drafter's weights; `head` adds the outputs of its head to a graph."""

    model: AssistantArchitecture
    before: Matrix
    after: Matrix
    layers: list[BlockWeights]
    norm: Stored
    head: Callable[[Graph, str], None]


def store_drafter(checkpoint: Checkpoint, weights: PlainWeightFile, format: WeightFormat, head_format: WeightFormat) -> StaticDrafter:
    """Writes the drafter's weights."""
    model = checkpoint.assistant
    return StaticDrafter(
        model=model,
        before=weights.matrix(checkpoint, ["pre_projection.weight"], format),
        after=weights.matrix(checkpoint, ["post_projection.weight"], format),
        layers=[store_block(weights, checkpoint, layer, format) for layer in range(model.layers)],
        norm=weights.vector(checkpoint, "model.norm.weight"),
        head=(_sparse_head if model.ordered_embeddings else _dense_head)(checkpoint, weights, head_format),
    )


def write_drafter_graph(
    target: TextArchitecture, sources: tuple[int, ...], drafter: StaticDrafter, shape: Shape, graph: PlainGraph, path: Path
) -> None:
    """Writes one draft step; `sources[i]` is the target layer whose rows layer i reads.

    Takes `embedded` and `hidden` [1, 1, target_hidden_size]; gives `scores` float32 [n], with a sparse head the `candidates` int64 [n]
    they belong to, and `hidden_out`, the next step's `hidden`.
    """
    model = drafter.model
    width = (1, 1, model.target_hidden_size)
    both = graph.op("Concat", graph.input("embedded", "f32", width), graph.input("hidden", "f32", width), axis=-1)
    blocks = StaticBlocks(graph, model, shape, declare_static(graph, model, shape, 0))
    buffers = {layer: declare_buffer(graph, target, shape, layer) for layer in sorted(set(sources))}
    value = graph.linear(both, drafter.before)
    for layer, source in enumerate(sources):
        value = blocks.block(value, layer, drafter.layers[layer], cache=buffers[source])
    value = blocks.norm(value, graph.weight(drafter.norm))
    graph.output(graph.op("Identity", graph.linear(value, drafter.after), name="hidden_out"), "f32", width)
    drafter.head(graph, value)
    graph.save(path)


def _dense_head(checkpoint: Checkpoint, weights: PlainWeightFile, format: WeightFormat) -> Callable[[Graph, str], None]:
    model = checkpoint.assistant
    table = weights.matrix(checkpoint, ["model.embed_tokens.weight"], format)

    def head(graph: Graph, value: str) -> None:
        flat = graph.op("Reshape", graph.linear(value, table), graph.integers([model.vocab_size]))
        graph.output(graph.op("Identity", flat, name="scores"), "f32", (model.vocab_size,))

    return head


def _sparse_head(checkpoint: Checkpoint, weights: PlainWeightFile, format: WeightFormat) -> Callable[[Graph, str], None]:
    """The tokens of the best centroids are candidates; a centroid's output rows are contiguous, in float16 or float32."""
    model = checkpoint.assistant
    order, each = token_order(checkpoint), model.vocab_size // model.centroids
    count = model.top_centroids * each
    tokens = weights.array(order.astype("<i4").reshape(model.centroids, each), "i32")
    rows = weights.rows_matrix(cluster_rows(checkpoint, order), model.vocab_size, model.hidden_size, format)
    centroids = weights.matrix(checkpoint, [CENTROIDS], WeightFormat(kind="f32"))

    def head(graph: Graph, value: str) -> None:
        shares = graph.op("Reshape", graph.linear(value, centroids), graph.integers([model.centroids]))
        _, best = graph.ops("TopK", [shares, graph.integers([model.top_centroids])], 2, sorted=1)
        grouped = rows.shaped(model.centroids, each * model.hidden_size)
        near = graph.op("Gather", graph.weight(grouped), best, axis=0)
        near = graph.op("Cast", near, to=1) if rows.type == "f16" else near
        matrix = graph.op("Reshape", near, graph.integers([count, model.hidden_size]))
        scores = graph.op("MatMul", matrix, graph.op("Reshape", value, graph.integers([model.hidden_size, 1])))
        graph.op("Reshape", scores, graph.integers([count]), name="scores")
        ids = graph.op("Reshape", graph.op("Gather", graph.weight(tokens), best, axis=0), graph.integers([count]))
        graph.output("scores", "f32", (count,))
        graph.output(graph.op("Cast", ids, to=7, name="candidates"), "i64", (count,))

    return head
