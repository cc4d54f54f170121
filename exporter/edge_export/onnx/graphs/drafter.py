"""The drafter as one ONNX graph: a Loop over draft steps, which ends early where confidence is low. Also the sparse head.

A step takes the embedding of the newest token and a hidden row. It runs about four layers, which attend to the target's K/V rows, and the
head; it returns the scores and the next hidden row. All steps use the position of the first one (transformers, Gemma4AssistantForCausalLM
and its candidate generator).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.architecture import CENTROIDS, AssistantArchitecture, TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint, cluster_rows, token_order
from edge_export.onnx.block_quantization import round_rows
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.graphs.attention import CacheNames, KvFormat, counted_kinds, declare_attention, declare_caches
from edge_export.onnx.graphs.blocks import Blocks, BlockWeights, DrafterBlocks, Hidden, are_in_blocks, norms_behind, store_block
from edge_export.onnx.graphs.target import embed
from edge_export.onnx.weights import Matrix, Stored, WeightFile, WeightFormat

# A sparse head scores only the tokens of the best centroids (transformers, Gemma4AssistantMaskedEmbedder). The output rows of a centroid's
# tokens are contiguous. Integer rows are stored transposed, [hidden_size, tokens of a centroid], which is what MatMulInteger takes as its
# right operand. So gathered weights are multiplied directly, without a conversion to float32.

# Emits a head over a hidden row [1, 1, hidden_size]. Returns the scores float32 [n] and their tokens int64 [n], or None if all tokens are
# scored.
Head = Callable[[GraphBuilder, str], tuple[str, str | None]]
# Emits the scores of a hidden row for the tokens of the selected centroids [k]: n values, in any shape.
_Scores = Callable[[GraphBuilder, str, str], str]
# The stored level that represents zero.
_ZERO_LEVEL = 128


def sparse_head(checkpoint: Checkpoint, weights: WeightFile, format: WeightFormat) -> Head:
    """Stores the centroids and output rows of a sparse head. In a block format, output rows get 8 bits and one scale for each row."""
    model = checkpoint.assistant
    order = token_order(checkpoint)
    tokens = weights.array(order.astype("<i4").reshape(model.centroids, -1), "i32")
    count = model.top_centroids * model.vocab_size // model.centroids
    rounded = format.kind == "blocks"
    centroids = weights.matrix(checkpoint, [CENTROIDS], format if rounded else WeightFormat(kind="f32"))
    scores = _rounded_scores(checkpoint, weights, order) if rounded else _float_scores(checkpoint, weights, order, format)

    def head(graph: GraphBuilder, value: str) -> tuple[str, str | None]:
        shares = graph.op("Reshape", graph.linear(value, centroids), graph.integers([model.centroids]))
        _, best = graph.ops("TopK", [shares, graph.integers([model.top_centroids])], 2)
        ids = graph.op("Reshape", graph.op("Gather", graph.weight(tokens), best, axis=0), graph.integers([count]))
        return graph.op("Reshape", scores(graph, value, best), graph.integers([count])), graph.op("Cast", ids, to=7)

    return head


def _float_scores(checkpoint: Checkpoint, weights: WeightFile, order: NDArray[np.int32], format: WeightFormat) -> _Scores:
    model = checkpoint.assistant
    pieces = cluster_rows(checkpoint, order)
    rows = weights.gathered(pieces, model.vocab_size, model.hidden_size, format).regrouped(model.centroids)

    def scores(graph: GraphBuilder, value: str, best: str) -> str:
        count = model.top_centroids * model.vocab_size // model.centroids
        near = graph.op("Reshape", graph.gather(rows, best), graph.integers([count, model.hidden_size]))
        return graph.op("MatMul", near, graph.op("Reshape", value, graph.integers([model.hidden_size, 1])))

    return scores


def _rounded_scores(checkpoint: Checkpoint, weights: WeightFile, order: NDArray[np.int32]) -> _Scores:
    """Multiplies the hidden row by rounded output rows. It is split into two 8-bit rows: its rounded values, and the remainder.

    One 8-bit row alone would leave only a few levels to most channels, because a few channels are large. Levels are stored unsigned, 128
    above their value: with signed ones, a processor without VNNI adds pairs of products of uint8 and int8 in 16 bits, where they saturate.
    """
    model = checkpoint.assistant
    per_centroid, hidden = model.vocab_size // model.centroids, model.hidden_size
    scaling: list[NDArray[np.float32]] = []

    def pieces() -> Iterator[NDArray[Any]]:
        for rows in cluster_rows(checkpoint, order):
            levels, scales = round_rows(rows)
            scaling.append(scales)
            unsigned = (levels.astype(np.int16) + _ZERO_LEVEL).astype(np.uint8)
            yield np.ascontiguousarray(unsigned.reshape(-1, per_centroid, hidden).transpose(0, 2, 1))

    stored = weights.pieces(pieces(), "u8", (model.centroids, hidden, per_centroid))
    factors = weights.array(np.concatenate(scaling).reshape(model.centroids, 1, per_centroid), "f32")

    def scores(graph: GraphBuilder, value: str, best: str) -> str:
        near, of_rows = (graph.op("Gather", graph.weight(part), best, axis=0) for part in (stored, factors))
        coarse, rest = _product(graph, value, near)
        fine, _ = _product(graph, rest, near)
        return graph.op("Mul", graph.op("Add", coarse, fine), of_rows)

    return scores


def _product(graph: GraphBuilder, value: str, near: str) -> tuple[str, str]:
    """Rounds a row to 8 bits. Returns its product with the weights' levels, and the remainder of the row."""
    levels, scale, zero = graph.ops("DynamicQuantizeLinear", [value], 3)
    products = graph.op("Cast", graph.op("MatMulInteger", levels, near, zero, graph.bytes(_ZERO_LEVEL)), to=1)
    return graph.op("Mul", products, scale), graph.op("Sub", value, graph.op("DequantizeLinear", levels, scale, zero))


@dataclass(frozen=True, kw_only=True)
class DrafterWeights:
    """The drafter's weights. `head` emits the nodes of its head, whose weights are stored already."""

    model: AssistantArchitecture
    before: Matrix
    after: Matrix
    layers: list[BlockWeights]
    norm: Stored
    head: Head


def store_drafter(checkpoint: Checkpoint, weights: WeightFile, format: WeightFormat, head_format: WeightFormat) -> DrafterWeights:
    """Writes the drafter's weights, without an input embedding, because the drafter uses the target's."""
    model = checkpoint.assistant
    return DrafterWeights(
        model=model,
        before=weights.matrix(checkpoint, ["pre_projection.weight"], format),
        after=weights.matrix(checkpoint, ["post_projection.weight"], format),
        layers=[store_block(weights, checkpoint, layer, format) for layer in range(model.layers)],
        norm=weights.vector(checkpoint, "model.norm.weight"),
        head=(sparse_head if model.ordered_embeddings else _dense_head)(checkpoint, weights, head_format),
    )


def write_drafter(
    target: TextArchitecture, sources: tuple[int, ...], drafter: DrafterWeights, table: Matrix, kv: KvFormat, path: Path
) -> set[str]:
    """Writes the drafter's graph; `sources[i]` is the target layer whose rows layer i reads, `table` the target's token embedding.

    The graph's outputs are `drafts` int64 [n], `probabilities` float32 [n] (1 unless `least_probability` is above 0), `scores` float32 [n,
    candidates] and `candidates` int64 [n, candidates] (both have no columns unless `with_scores`), and `hidden_out`. Returns the names of
    the contrib operators that the graph uses.
    """
    model = drafter.model
    matrices = [drafter.before, drafter.after, *(matrix for layer in drafter.layers for matrix in layer.matrices)]
    graph = GraphBuilder("drafter", kernels=are_in_blocks(matrices))
    caches = declare_caches(graph, target, sorted(set(sources)), kv, drafter=True)
    attention = declare_attention(graph, model, 1, counted_kinds(target, caches), kv)
    token, hidden = graph.input("token", "i64", (1, 1)), graph.input("hidden", "f32", (1, 1, model.target_hidden_size))
    length, minimum = graph.input("draft_length", "i64", ()), graph.input("least_probability", "f32", ())
    graph.input("with_scores", "bool", ())
    body = graph.subgraph("step")
    body.input("step_index", "i64", ())
    body.input("step_condition", "bool", ())
    inner = body.input("step_token", "i64", (1, 1)), body.input("step_hidden", "f32", (1, 1, model.target_hidden_size))
    blocks = DrafterBlocks(body, model, attention, kv)
    embedded = embed(body, table, inner[0], sqrt(model.target_hidden_size))
    following, (scores, candidates) = step(body, blocks, drafter, [caches[layer] for layer in sources], embedded, inner[1])
    _continue(body, model, following, scores, candidates, minimum)
    names = ["token_out", "hidden_out", "drafts", "probabilities", "scores", "candidates"]
    graph.ops("Loop", [length, "", token, hidden], names, body=body)
    graph.output("drafts", "i64", ("drafted",))
    graph.output("probabilities", "f32", ("drafted",))
    graph.output("scores", "f32", ("drafted", "scored"))
    graph.output("candidates", "i64", ("drafted", "listed"))
    graph.output("hidden_out", "f32", (1, 1, model.target_hidden_size))
    graph.save(path)
    return graph.contrib_ops


def step(
    graph: GraphBuilder, blocks: Blocks, drafter: DrafterWeights, caches: Sequence[CacheNames], embedded: str, hidden: str
) -> tuple[str, tuple[str, str | None]]:
    """Emits a draft step. Returns the next hidden row, and the scores with their candidate tokens."""
    value = graph.linear(graph.op("Concat", embedded, hidden, axis=-1), drafter.before)
    rows = Hidden(value, blocks.norm(value, graph.weight(drafter.layers[0].norms["input_layernorm"])))
    following = norms_behind(drafter.layers, drafter.norm)
    for layer, (cache, weights) in enumerate(zip(caches, drafter.layers, strict=True)):
        rows = blocks.block(rows, layer, weights, following[layer], cache=cache)
    return graph.linear(rows.normed, drafter.after), drafter.head(graph, rows.normed)


def _continue(graph: GraphBuilder, model: AssistantArchitecture, following: str, scores: str, candidates: str | None, minimum: str) -> None:
    """Declares the outputs of the loop's body: the condition to continue, the state of the next step, and the collected values."""
    best = graph.op("ArgMax", scores, axis=0, keepdims=1)
    drafted = graph.op("Gather", candidates, best, axis=0) if candidates else best
    probability = _probability(graph, scores, minimum)
    going_on = graph.op("GreaterOrEqual", probability, minimum)
    graph.output(going_on, "bool", ())
    graph.output(graph.op("Reshape", drafted, graph.integers([1, 1])), "i64", (1, 1))
    graph.output(following, "f32", (1, 1, model.target_hidden_size))
    graph.output(graph.op("Squeeze", drafted, graph.integers([0])), "i64", ())
    graph.output(probability, "f32", ())
    graph.output(_if_scored(graph, scores, "f32"), "f32", ("scored",))
    graph.output(_if_scored(graph, candidates, "i64"), "i64", ("listed",))


def _probability(graph: GraphBuilder, scores: str, minimum: str) -> str:
    """The probability of the likeliest token, among the scored ones, if a minimum above 0 is given; else 1."""
    asked = graph.op("Greater", minimum, graph.floats(0))
    share, certain = graph.subgraph("share"), graph.subgraph("certain")
    top = share.op("ReduceMax", scores, keepdims=1)
    weights = share.op("ReduceSum", share.op("Exp", share.op("Sub", scores, top)), keepdims=0)
    share.output(share.op("Reciprocal", weights), "f32", ())
    certain.output(certain.op("Identity", graph.floats(1)), "f32", ())
    return graph.op("If", asked, then_branch=share, else_branch=certain)


def _if_scored(graph: GraphBuilder, values: str | None, kind: str) -> str:
    """Returns `values` [n] if `with_scores` is true, else an empty array."""
    none = graph.floats([]) if kind == "f32" else graph.integers([])
    if values is None:
        return graph.op("Identity", none)
    filled, empty = graph.subgraph("wanted"), graph.subgraph("unwanted")
    filled.output(filled.op("Identity", values), kind, ("n",))
    empty.output(empty.op("Identity", none), kind, ("n",))
    return graph.op("If", "with_scores", then_branch=filled, else_branch=empty)


def _dense_head(checkpoint: Checkpoint, weights: WeightFile, format: WeightFormat) -> Head:
    """Stores a head for which all tokens are candidates."""
    table = weights.matrix(checkpoint, ["model.embed_tokens.weight"], format)

    def head(graph: GraphBuilder, value: str) -> tuple[str, str | None]:
        return graph.op("Reshape", graph.linear(value, table), graph.integers([table.rows])), None

    return head
