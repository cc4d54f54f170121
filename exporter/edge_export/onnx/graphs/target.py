"""The target as two ONNX graphs: the layers, which output hidden rows, and the head, which computes logits of selected rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

from edge_export.checkpoint.architecture import TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.graphs.attention import (
    FLOAT_ROWS,
    CacheNames,
    KvFormat,
    ReadRows,
    cache_shape,
    counted_kinds,
    declare_attention,
    declare_caches,
)
from edge_export.onnx.graphs.blocks import Blocks, BlockWeights, Hidden, are_in_blocks, norms_behind, per_layer_inputs, store_block
from edge_export.onnx.weights import Matrix, Stored, WeightFile, WeightFormat


@dataclass(frozen=True, kw_only=True)
class TargetFormats:
    """How the target's matrices and K/V rows are stored; `embedding` is the format of the token embedding and of the head.

    With `soft_rows`, the graph also accepts rows of images and sound in place of token embeddings.
    """

    layers: WeightFormat
    embedding: WeightFormat
    kv: KvFormat = FLOAT_ROWS
    soft_rows: bool = False


def embed(graph: GraphBuilder, table: Matrix, ids: str, factor: float) -> str:
    """Returns rows of an embedding table times `factor`."""
    return graph.op("Mul", graph.gather(table, ids), graph.floats(factor))


@dataclass(frozen=True, kw_only=True)
class TargetWeights:
    """The target's weights. If the host looks embeddings up, `table` is None here and in `per_layer`."""

    model: TextArchitecture
    table: Matrix | None
    layers: list[BlockWeights]
    norm: Stored
    head: Matrix
    per_layer: PerLayerWeights | None

    @property
    def matrices(self) -> Iterator[Matrix]:
        """The matrices by which the layers multiply."""
        for layer in self.layers:
            yield from layer.matrices
        if self.per_layer is not None:
            yield self.per_layer.projection


@dataclass(frozen=True, kw_only=True)
class PerLayerWeights:
    """The per-layer embeddings, the projection from token embeddings to their width, and the projection's norm times 1/sqrt(2)."""

    table: Matrix | None
    projection: Matrix
    norm: Stored


def store_target(checkpoint: Checkpoint, weights: WeightFile, formats: TargetFormats, *, tables: bool) -> TargetWeights:
    """Writes the target's weights. Without `tables`, the embedding tables are left out."""
    model, name = checkpoint.architecture, "model.embed_tokens.weight"
    table = weights.matrix(checkpoint, [name], formats.embedding) if tables else None
    per_layer = None
    if model.per_layer_size:
        per_layer = PerLayerWeights(
            table=weights.matrix(checkpoint, ["model.embed_tokens_per_layer.weight"], formats.layers) if tables else None,
            projection=weights.matrix(checkpoint, ["model.per_layer_model_projection.weight"], formats.layers),
            norm=weights.vector(checkpoint, "model.per_layer_projection_norm.weight", 1 / sqrt(2)),
        )
    return TargetWeights(
        model=model,
        table=table,
        per_layer=per_layer,
        layers=[store_block(weights, checkpoint, layer, formats.layers) for layer in range(model.layers)],
        norm=weights.vector(checkpoint, "model.norm.weight"),
        head=table if table and model.tied else weights.matrix(checkpoint, [name if model.tied else "lm_head.weight"], formats.embedding),
    )


def write_target(target: TargetWeights, path: Path, head_path: Path, formats: TargetFormats) -> set[str]:
    """Writes the two graphs of the target and returns the names of the contrib operators that they use."""
    model = target.model
    graph = GraphBuilder("target", kernels=are_in_blocks(target.matrices))
    ids = graph.input("input_ids", "i64", (1, "tokens"))
    assert target.table is not None
    embedded = embed(graph, target.table, ids, sqrt(model.hidden_size))
    if formats.soft_rows:
        # If `is_soft`, all rows are soft and the ids are 0, as soft rows have the per-layer embedding of token 0. Else `soft_rows` is one
        # unused row.
        soft = graph.input("soft_rows", "f32", (1, "soft", model.hidden_size))
        embedded = graph.op("Where", graph.input("is_soft", "bool", (1, 1, 1)), soft, embedded)
    hidden = _layers(graph, target, formats.kv, embedded, ids)
    graph.output(hidden, "f32", (1, "read", model.hidden_size))
    graph.save(path)
    head = GraphBuilder("head", kernels=are_in_blocks([target.head]))
    rows = head.input("hidden", "f32", (1, "tokens", model.hidden_size))
    head.output(logits(head, target, rows), "f32", (1, "tokens", model.vocab_size))
    head.save(head_path)
    return graph.contrib_ops | head.contrib_ops


def _layers(graph: GraphBuilder, target: TargetWeights, kv: KvFormat, embedded: str, ids: str) -> str:
    model = target.model
    pasts = declare_caches(graph, model, range(model.owning_layers), kv)
    blocks = Blocks(graph, model, declare_attention(graph, model, "tokens", counted_kinds(model, pasts), kv), kv)
    presents = {layer: _present(layer, past) for layer, past in pasts.items()}
    last, read = model.owning_layers - 1, ReadRows(graph)
    per_layer = _per_layer(graph, target, blocks, embedded, ids, read)
    first, following = graph.weight(target.layers[0].norms["input_layernorm"]), norms_behind(target.layers, target.norm)
    hidden = Hidden(embedded, blocks.norm(embedded, first))
    for layer, kind in enumerate(model.layer_types):
        owner = layer if layer in pasts else model.last_owner(kind)
        own = layer == owner or pasts[owner].on_rows
        hidden = blocks.block(
            hidden,
            layer,
            target.layers[layer],
            following[layer],
            cache=pasts[owner] if own else presents[owner],
            present=presents[owner] if own else None,
            per_layer=per_layer[layer] if per_layer else "",
            read=read if layer == last else None,
            name="hidden" if layer == model.layers - 1 else None,
        )
    for layer, names in presents.items():
        for name in (names.key, names.value):
            graph.output(name, kv.type, cache_shape(model, layer, "tokens" if names.on_rows else None))
    for name, owner in blocks.attends.unused_outputs.items():
        graph.output(name, kv.type, cache_shape(model, owner, None))
    return hidden.normed


def _per_layer(graph: GraphBuilder, target: TargetWeights, blocks: Blocks, embedded: str, ids: str, read: ReadRows) -> list[str]:
    """The per-layer embeddings of each layer. From the last layer with its own K/V on, they are only of the rows that are read."""
    model, weights = target.model, target.per_layer
    if weights is None or weights.table is None:
        return []
    looked_up, parts = graph.gather(weights.table, ids), list[str]()
    owning = model.owning_layers - 1
    for of, layers in ((str, range(owning)), (read.of, range(owning, model.layers))):
        if layers:
            columns = [layers.start * model.per_layer_size, layers.stop * model.per_layer_size]
            own = graph.op("Slice", of(looked_up), *(graph.integers([number]) for number in (*columns, 2)))
            identity = graph.op("Mul", own, graph.floats(sqrt(model.per_layer_size) / sqrt(2)))
            projection = weights.projection.between(*columns)
            parts += per_layer_inputs(graph, blocks.head_norm, model, of(embedded), identity, projection, weights.norm)
    return parts


def _present(layer: int, past: CacheNames) -> CacheNames:
    word = "new" if past.on_rows else "present"
    return CacheNames(key=f"{word}_key.{layer}", value=f"{word}_value.{layer}", owner=layer, on_rows=past.on_rows)


def logits(graph: GraphBuilder, target: TargetWeights, hidden: str) -> str:
    """Emits the logits of hidden rows as a value named `logits`."""
    cap, head = target.model.logit_softcap, target.head
    if cap is None:
        return graph.op("Identity", graph.linear(hidden, head), name="logits")
    if head.rounding is not None:
        value = graph.floats(cap)
        return graph.op("Mul", graph.op("Tanh", graph.op("Div", graph.linear(hidden, head), value)), value, name="logits")
    # Dividing the hidden row costs less than dividing the logits, of which there are many more.
    divided, kind = graph.op("Div", hidden, graph.floats(cap)), "MatMulCapRows" if head.sizes else None
    with graph.kernel(kind, [divided], ["logits"], cap=float(cap), **head.sizes) as (body, (rows,), (capped,)):
        body.op("Mul", body.op("Tanh", body.linear(rows, head)), body.floats(cap), name=capped)
    return "logits"
