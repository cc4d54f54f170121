"""The target as two ONNX graphs: the layers, which output hidden rows, and the head, which computes logits of the rows that need them."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from edge_export.checkpoint.architecture import TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.onnx.graph_builder import Graph
from edge_export.onnx.graphs.attention import CacheNames, cache_shape, counted_kinds, declare_attention, declare_caches
from edge_export.onnx.graphs.blocks import Blocks, per_layer_inputs, store_block
from edge_export.onnx.graphs.kv import FLOAT_ROWS, KvFormat
from edge_export.onnx.weights import Matrix, WeightFile, WeightFormat


@dataclass(frozen=True, kw_only=True)
class TargetFormats:
    """How the target's matrices and K/V rows are stored; `embedding` is the format of the token embedding and of the head.

    With `soft_rows` the graph takes rows of images and sound in place of embeddings.
    """

    layers: WeightFormat
    embedding: WeightFormat
    kv: KvFormat = FLOAT_ROWS
    soft_rows: bool = False


def embed(graph: Graph, table: Matrix, ids: str, factor: float) -> str:
    """Rows of an embedding times a factor."""
    return graph.op("Mul", graph.gather(table, ids), graph.floats(factor))


def write_target(
    checkpoint: Checkpoint, weights: WeightFile, path: Path, head_path: Path, formats: TargetFormats
) -> tuple[Matrix, set[str]]:
    """Writes the two graphs of the target; returns its token embedding, which the drafter reads too, and the contrib ops in use."""
    model = checkpoint.architecture
    table = weights.matrix(checkpoint, ["model.embed_tokens.weight"], formats.embedding)
    graph = Graph("target")
    ids = graph.input("input_ids", "i64", (1, "tokens"))
    embedded = embed(graph, table, ids, sqrt(model.hidden_size))
    if formats.soft_rows:
        # Either one row that is not used, or all rows; ids are then 0, whose per-layer embedding stands beside soft rows.
        soft = graph.input("soft_rows", "f32", (1, "soft", model.hidden_size))
        embedded = graph.op("Where", graph.input("is_soft", "bool", (1, 1, 1)), soft, embedded)
    hidden = _layers(graph, checkpoint, weights, formats, embedded, ids)
    graph.output(hidden, "f32", (1, "tokens", model.hidden_size))
    graph.save(path)
    head_weights = table if model.tied else weights.matrix(checkpoint, ["lm_head.weight"], formats.embedding)
    head = _head(model, head_weights)
    head.save(head_path)
    return table, graph.contrib_ops | head.contrib_ops


def _layers(graph: Graph, checkpoint: Checkpoint, weights: WeightFile, formats: TargetFormats, embedded: str, ids: str) -> str:
    model = checkpoint.architecture
    pasts = declare_caches(graph, model, range(model.owning_layers), formats.kv)
    blocks = Blocks(graph, model, declare_attention(graph, model, "tokens", counted_kinds(model, pasts), formats.kv), formats.kv)
    presents = {layer: _present(layer, past) for layer, past in pasts.items()}
    per_layer = _per_layer(graph, blocks, checkpoint, weights, formats, embedded, ids)
    value = embedded
    for layer, kind in enumerate(model.layer_types):
        owner = layer if layer in pasts else model.last_owner(kind)
        own = layer == owner or pasts[owner].on_rows
        value = blocks.block(
            value,
            layer,
            store_block(weights, checkpoint, layer, formats.layers),
            cache=pasts[owner] if own else presents[owner],
            present=presents[owner] if own else None,
            per_layer=per_layer[layer] if per_layer else "",
        )
    for layer, names in presents.items():
        for name in (names.key, names.value):
            graph.output(name, formats.kv.type, cache_shape(model, layer, "tokens" if names.on_rows else None))
    for name, owner in blocks.attends.again.items():
        graph.output(name, formats.kv.type, cache_shape(model, owner, None))
    norm = graph.weight(weights.vector(checkpoint, "model.norm.weight"))
    return graph.op("RMSNormalization", value, norm, name="hidden", axis=-1, epsilon=model.norm_epsilon)


def _present(layer: int, past: CacheNames) -> CacheNames:
    word = "new" if past.on_rows else "present"
    return CacheNames(key=f"{word}_key.{layer}", value=f"{word}_value.{layer}", owner=layer, on_rows=past.on_rows)


def _per_layer(
    graph: Graph, blocks: Blocks, checkpoint: Checkpoint, weights: WeightFile, formats: TargetFormats, embedded: str, ids: str
) -> list[str]:
    model = checkpoint.architecture
    if not model.per_layer_size:
        return []
    table = weights.matrix(checkpoint, ["model.embed_tokens_per_layer.weight"], formats.layers)
    identity = embed(graph, table, ids, sqrt(model.per_layer_size) / sqrt(2))
    projection = weights.matrix(checkpoint, ["model.per_layer_model_projection.weight"], formats.layers)
    norm = weights.vector(checkpoint, "model.per_layer_projection_norm.weight", 1 / sqrt(2))
    return per_layer_inputs(graph, blocks.norm, model, embedded, identity, projection, norm)


def _head(model: TextArchitecture, weights: Matrix) -> Graph:
    graph = Graph("head")
    hidden = graph.input("hidden", "f32", (1, "tokens", model.hidden_size))
    if model.logit_softcap is None:
        logits = graph.linear(hidden, weights)
    elif weights.rounding is not None:
        cap = graph.floats(model.logit_softcap)
        logits = graph.op("Mul", graph.op("Tanh", graph.op("Div", graph.linear(hidden, weights), cap)), cap)
    else:
        # The short hidden row is divided instead of the logits.
        cap = graph.floats(model.logit_softcap)
        logits = graph.op("Mul", graph.op("Tanh", graph.linear(graph.op("Div", hidden, cap), weights)), cap)
    graph.output(graph.op("Identity", logits, name="logits"), "f32", (1, "tokens", model.vocab_size))
    return graph
