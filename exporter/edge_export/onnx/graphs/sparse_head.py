"""The sparse head of a drafter's graph: only the tokens of the best centroids are scored (transformers, Gemma4AssistantMaskedEmbedder).

A centroid's output rows are contiguous. As integers they are stored transposed, [hidden_size, tokens of a centroid], which is the right
operand of MatMulInteger unchanged: gathered weights are multiplied with, and never converted to float32 first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.architecture import CENTROIDS
from edge_export.checkpoint.checkpoint import Checkpoint, cluster_rows
from edge_export.gguf.drafter_head import token_order
from edge_export.onnx.block_quantization import round_rows
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.weights import WeightFile, WeightFormat

# Emits a head over a hidden row [1, 1, hidden_size]: scores float32 [n] and the tokens int64 [n] they belong to, None for all tokens.
Head = Callable[[GraphBuilder, str], tuple[str, str | None]]
# Emits the scores of a hidden row over the selected clusters [k], n values in any shape.
_Scores = Callable[[GraphBuilder, str, str], str]
# The stored level that is zero.
_ZERO_LEVEL = 128


def sparse_head(checkpoint: Checkpoint, weights: WeightFile, format: WeightFormat) -> Head:
    """Stores centroids and output rows; block-quantized ones get 8 bits, and the output rows one scale for each row."""
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
    """Products of the row with rounded output rows. The row is split into two rows of 8 bits: its rounded values, and the remainder.

    One row alone would leave few levels to most channels where a few are large. Levels are stored unsigned, 128 above their value: a
    processor without VNNI adds pairs of products of uint8 with int8 in 16 bits, where they are cut off.
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
    """The product of a row rounded to 8 bits with the weights' levels, and the remainder of the row."""
    levels, scale, zero = graph.ops("DynamicQuantizeLinear", [value], 3)
    products = graph.op("Cast", graph.op("MatMulInteger", levels, near, zero, graph.bytes(_ZERO_LEVEL)), to=1)
    return graph.op("Mul", products, scale), graph.op("Sub", value, graph.op("DequantizeLinear", levels, scale, zero))
