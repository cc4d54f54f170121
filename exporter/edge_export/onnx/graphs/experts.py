"""Mixture of experts (26B-A4B) as ONNX nodes. Math: transformers, Gemma4TextRouter and Gemma4TextExperts.

onnxruntime's MoE and QMoE operators use a SiLU gate and cannot compute Gemma's GELU gate. So every expert is a branch of its own that runs
only if a token is routed to it; its weights are constants of the graph, packed and multiplied like all others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from edge_export.checkpoint.architecture import TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.safetensors import StoredTensor
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.weights import Matrix, Stored, WeightFile, WeightFormat

_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """A layer's router and experts: `scale` is the router's times 1/sqrt(hidden_size); `experts` are pairs of gate-and-up and down."""

    norms: dict[str, Stored]
    scale: Stored
    router: Matrix
    expert_scale: Stored
    experts: list[tuple[Matrix, Matrix]]


def store_experts(weights: WeightFile, checkpoint: Checkpoint, prefix: str, format: WeightFormat) -> ExpertWeights:
    """Writes a layer's router, in float32, and its experts to the data file. `prefix` is the layer's."""
    model = checkpoint.architecture
    both = [f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj"]
    return ExpertWeights(
        norms={name: weights.vector(checkpoint, f"{prefix}{name}.weight") for name in _NORMS},
        scale=weights.vector(checkpoint, f"{prefix}router.scale", model.hidden_size**-0.5),
        router=weights.matrix(checkpoint, [f"{prefix}router.proj.weight"], WeightFormat(kind="f32")),
        expert_scale=weights.vector(checkpoint, f"{prefix}router.per_expert_scale"),
        experts=[
            (
                weights.matrix_in(expert_of(checkpoint.tensors[both[0]], expert), both[0], expert, format),
                weights.matrix_in(expert_of(checkpoint.tensors[both[1]], expert), both[1], expert, format),
            )
            for expert in range(model.experts)
        ],
    )


def expert_of(tensor: StoredTensor, expert: int) -> StoredTensor:
    """One expert's matrix of a tensor [experts, rows, columns]."""
    size = tensor.bytes // tensor.shape[0]
    return dataclasses.replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * size, bytes=size)


def add_experts(
    graph: GraphBuilder,
    model: TextArchitecture,
    weights: ExpertWeights,
    value: str,
    *,
    norm: Callable[[str, str], str],
    gated: Callable[[GraphBuilder, str, Matrix, Matrix], str],
) -> str:
    """The experts' part [1, T, hidden_size] of the feed-forward block, before its norm. `value` is the block's input.

    `norm` is the root-mean-square norm; `gated` the gated feed-forward of given weights, in a given graph.
    """
    flat = graph.op("Reshape", value, graph.integers([-1, model.hidden_size]))
    shares = _shares(graph, model, weights, norm(flat, graph.weight(weights.scale)))
    inputs = norm(flat, graph.weight(weights.norms["pre_feedforward_layernorm_2"]))
    # An expert's scale may be negative.
    largest = graph.op("ReduceMax", graph.op("Abs", shares), graph.integers([0]), keepdims=0)
    chosen = graph.op("Greater", largest, graph.floats(0))
    each = graph.ops("Split", [graph.op("Cast", chosen, to=7)], model.experts, axis=0, num_outputs=model.experts)
    parts = [_expert(graph, expert, each[expert], shares, inputs, weights.experts[expert], gated) for expert in range(model.experts)]
    # Parts come expert by expert, in the order of the nonzero shares when experts are rows.
    places = graph.op("NonZero", graph.op("Transpose", shares, perm=[1, 0]))
    tokens = graph.op("Transpose", graph.op("Slice", places, *map(graph.integers, ([1], [2], [0]))), perm=[1, 0])
    nothing = graph.op("Mul", inputs, graph.floats(0))
    summed = graph.op("ScatterND", nothing, tokens, graph.op("Concat", *parts, axis=0), reduction="add")
    return graph.op("Reshape", summed, graph.integers([1, -1, model.hidden_size]))


def _shares(graph: GraphBuilder, model: TextArchitecture, weights: ExpertWeights, normed: str) -> str:
    """The weight of each expert for each token [T, experts]; zero for all but the best `experts_used`."""
    likely = graph.op("Softmax", graph.linear(normed, weights.router), axis=-1)
    best, experts = graph.ops("TopK", [likely, graph.integers([model.experts_used])], 2, axis=-1)
    together = graph.op("ReduceSum", best, graph.integers([-1]), keepdims=1)
    scaled = graph.op("Mul", graph.op("Div", best, together), graph.op("Gather", graph.weight(weights.expert_scale), experts, axis=0))
    return graph.op("ScatterElements", graph.op("Mul", likely, graph.floats(0)), experts, scaled, axis=1)


def _expert(
    graph: GraphBuilder,
    expert: int,
    chosen: str,
    shares: str,
    inputs: str,
    weights: tuple[Matrix, Matrix],
    gated: Callable[[GraphBuilder, str, Matrix, Matrix], str],
) -> str:
    """The rows of one expert's tokens, times their shares; empty if no token is routed to it."""
    used, unused = graph.subgraph("used"), graph.subgraph("unused")
    column = used.op("Gather", shares, used.integers([expert]), axis=1)
    rows = used.op("Squeeze", used.op("Slice", used.op("NonZero", column), *map(used.integers, ([0], [1], [0]))), used.integers([0]))
    fed = gated(used, used.op("Gather", inputs, rows, axis=0), *weights)
    used.output(used.op("Mul", fed, used.op("Gather", column, rows, axis=0)), "f32", ("n", weights[1].rows))
    unused.output(unused.op("Identity", unused.no_rows(weights[1].rows)), "f32", ("n", weights[1].rows))
    condition = graph.op("Cast", graph.op("Squeeze", chosen, graph.integers([0])), to=9)
    return graph.op("If", condition, then_branch=used, else_branch=unused)
