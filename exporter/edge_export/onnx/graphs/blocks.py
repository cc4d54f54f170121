"""Gemma 4's decoder block as ONNX nodes, with experts or without. Math: transformers, models/gemma4/modeling_gemma4.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edge_export.checkpoint.architecture import TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.safetensors import StoredTensor
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.graphs.attention import Attention, AttentionInputs, CacheNames, KvFormat, ReadRows
from edge_export.onnx.weights import Matrix, Stored, WeightFile, WeightFormat

# onnxruntime's MoE and QMoE operators use a SiLU gate and cannot compute Gemma's GELU gate. So every expert is a branch of its own that
# runs only if a token is routed to it; its weights are constants of the graph, packed and multiplied like all others.

_EXPERT_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")


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
        norms={name: weights.vector(checkpoint, f"{prefix}{name}.weight") for name in _EXPERT_NORMS},
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


class Hidden(NamedTuple):
    """Hidden rows [1, T, hidden_size] in front of a layer, and the norm that it begins with."""

    rows: str
    normed: str


@dataclass(frozen=True, kw_only=True)
class BlockWeights:
    """A layer's stored weights.

    `projections` are those of Q and, where the layer has K and V of its own, of these, one matrix or two with their rows in that order. K
    and V may be stored apart; in the last layer that has them they are, as its Q is not computed for all rows.
    """

    norms: dict[str, Stored]
    projections: tuple[Matrix, ...]
    output: Matrix
    gate_up: Matrix
    down: Matrix
    layer_scalar: Stored
    per_layer: tuple[Matrix, Matrix] | None
    experts: ExpertWeights | None

    @property
    def matrices(self) -> Iterator[Matrix]:
        """All matrices but the router's, which is never in blocks."""
        yield from (*self.projections, self.output, self.gate_up, self.down, *(self.per_layer or ()))
        for expert in self.experts.experts if self.experts else ():
            yield from expert


def are_in_blocks(matrices: Iterable[Matrix]) -> bool:
    """Whether the kernels multiply with one of these."""
    return any(part.sizes for matrix in matrices for part in (matrix.parts or (matrix,)))


def norms_behind(layers: Sequence[BlockWeights], last: Stored) -> list[Stored]:
    """The weight of the norm behind each layer: that at the beginning of the next one, or the last of all."""
    return [*(layer.norms["input_layernorm"] for layer in layers[1:]), last]


# The fewest outputs of each half of a gate that a thread of the kernels computes together: whole blocks of the product behind it.
_MIN_WIDTH = 64
_NORMS = (
    "input_layernorm",
    "self_attn.q_norm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def store_block(weights: WeightFile, checkpoint: Checkpoint, layer: int, format: WeightFormat) -> BlockWeights:
    """Writes a layer's weights to the data file."""
    model, prefix = checkpoint.architecture, f"model.layers.{layer}."
    owns = layer < model.owning_layers
    norms = [*_NORMS, *(["self_attn.k_norm"] if owns else []), *(["post_per_layer_input_norm"] if model.per_layer_size else [])]
    own = (["k_proj"] if model.k_eq_v and not model.is_sliding(layer) else ["k_proj", "v_proj"]) if owns else []
    sensitive = format.sensitive or format
    apart = format.values is not None or layer == model.owning_layers - 1
    groups = [["q_proj"], own] if apart else [["q_proj", *own]]
    formats = (format, format.values or format)

    def matrix(*names: str, format: WeightFormat = format) -> Matrix:
        return weights.matrix(checkpoint, [f"{prefix}{name}.weight" for name in names], format)

    return BlockWeights(
        norms={name: weights.vector(checkpoint, f"{prefix}{name}.weight") for name in norms},
        projections=tuple(
            matrix(*(f"self_attn.{name}" for name in group), format=kind) for group, kind in zip(groups, formats, strict=False) if group
        ),
        output=matrix("self_attn.o_proj"),
        gate_up=matrix("mlp.gate_proj", "mlp.up_proj"),
        down=matrix("mlp.down_proj", format=sensitive),
        layer_scalar=weights.vector(checkpoint, f"{prefix}layer_scalar"),
        per_layer=(matrix("per_layer_input_gate"), matrix("per_layer_projection", format=sensitive)) if model.per_layer_size else None,
        experts=store_experts(weights, checkpoint, prefix, format) if model.experts else None,
    )


class Blocks:
    """Emits the layers of one model into a graph."""

    def __init__(self, graph: GraphBuilder, model: TextArchitecture, attention: dict[str, AttentionInputs], kv: KvFormat) -> None:
        self._graph = graph
        self._model = model
        self.attends = Attention(graph, model, attention, kv)

    def norm(self, value: str, weight: str) -> str:
        """Root-mean-square norm of rows of the hidden size."""
        normed = self._graph.fresh("normed")
        with self._graph.kernel("NormRows", [value, weight], [normed], **self._norm_facts()) as (graph, (rows, scale), (name,)):
            self._normed(graph, rows, scale, name=name)
        return normed

    def head_norm(self, value: str, weight: str, heads: int, head_dim: int, epsilon_factor: float = 1.0) -> str:
        """The norm of each head of value [1, T, heads x head_dim]."""
        normed = self._graph.fresh("normed")
        facts = self._norm_facts(epsilon_factor) | {"width": heads * head_dim}
        with self._graph.kernel("NormRows", [value, weight], [normed], **facts) as (graph, (rows, scale), (name,)):
            apart = graph.op("Reshape", rows, graph.integers([0, 0, heads, head_dim]))
            parts = self._normed(graph, apart, scale, epsilon_factor)
            graph.op("Reshape", parts, graph.integers([0, 0, heads * head_dim]), name=name)
        return normed

    def added(self, value: str, branch: str, weight: str) -> str:
        """value plus the norm of a branch, as rows of the hidden size."""
        total = self._graph.fresh("sum")
        with self._graph.kernel("ResidualRows", [value, branch, weight, "", ""], [total], **self._norm_facts()) as body:
            rows, other, scale, *_ = body.inputs
            body.graph.op("Add", rows, self._normed(body.graph, other, scale), name=body.outputs[0])
        return total

    def _added_and_normed(
        self, value: str, branch: str, weight: str, following: str, *, factor: str = "", name: str | None = None
    ) -> Hidden:
        """As `added`, times a factor; and the norm of that with the weight `following`, called `name`."""
        hidden = Hidden(self._graph.fresh("sum"), name or self._graph.fresh("normed"))
        with self._graph.kernel("ResidualRows", [value, branch, weight, factor, following], hidden, **self._norm_facts()) as body:
            graph, (rows, other, scale, times, next_scale), (total, normed) = body
            terms = rows, self._normed(graph, other, scale)
            if factor:
                graph.op("Mul", graph.op("Add", *terms), times, name=total)
            else:
                graph.op("Add", *terms, name=total)
            self._normed(graph, total, next_scale, name=normed)
        return hidden

    def _norm_facts(self, epsilon_factor: float = 1.0) -> dict[str, float]:
        return {"epsilon": float(self._model.norm_epsilon * epsilon_factor), "width": self._model.hidden_size}

    def _normed(self, graph: GraphBuilder, value: str, weight: str, epsilon_factor: float = 1.0, *, name: str | None = None) -> str:
        """The stock nodes of a norm over the last axis."""
        return graph.op("RMSNormalization", value, weight, axis=-1, epsilon=self._model.norm_epsilon * epsilon_factor, name=name)

    def block(
        self,
        hidden: Hidden,
        layer: int,
        weights: BlockWeights,
        following: Stored,
        *,
        cache: CacheNames,
        present: CacheNames | None = None,
        per_layer: str = "",
        read: ReadRows | None = None,
        name: str | None = None,
    ) -> Hidden:
        """One decoder layer, which attends to `cache`; the norm behind it has the weight `following` and is called `name`.

        A layer with K/V of its own adds them; they, or the buffers with them, are named `present`. On rows, `present` names a forward's
        own rows also for layers that share them. With `read`, only K and V are of all rows, all else is of the rows that are read.
        """
        graph = self._graph

        def weight(name: str) -> str:
            return graph.weight(weights.norms[name])

        value, queried = hidden
        if read is not None:
            value, queried = read.of(value), read.of(queried)
            self.attends.read = read
        attended = graph.linear(self._attention((queried, hidden.normed), layer, weights, cache, present), weights.output)
        before, behind = weight("post_attention_layernorm"), weight("pre_feedforward_layernorm")
        value, normed = self._added_and_normed(value, attended, before, behind)
        fed, last = self._gated(graph, normed, weights.gate_up, weights.down), weight("post_feedforward_layernorm")
        if weights.experts is not None:
            fed = self._with_experts(value, fed, weights.experts)
        if weights.per_layer is not None:
            into, back = weights.per_layer
            value = self.added(value, fed, last)
            gated = graph.op("Mul", self._gelu(graph, graph.linear(value, into)), per_layer)
            fed, last = graph.linear(gated, back), weight("post_per_layer_input_norm")
        return self._added_and_normed(value, fed, last, graph.weight(following), factor=graph.weight(weights.layer_scalar), name=name)

    def _attention(self, rows: tuple[str, str], layer: int, weights: BlockWeights, cache: CacheNames, present: CacheNames | None) -> str:
        """Attention of the first of `rows`, where a layer has its own K/V to those of the second too."""
        attention, head_dim = self.attends, self._model.head_dim_of(layer)
        query, new = self._projected(rows, layer, weights)
        query = self.head_norm(query, self._graph.weight(weights.norms["self_attn.q_norm"]), self._model.heads, head_dim)
        if not cache.on_rows:
            return attention.on_buffers(query, new, layer, cache, present, self.window_of(layer))
        if new is not None:
            assert present is not None
            attention.keep(new, layer, present)
        return attention.on_rows(query, layer, cache, present)

    def _projected(self, rows: tuple[str, str], layer: int, weights: BlockWeights) -> tuple[str, tuple[str, str] | None]:
        """Queries, and normed keys and values where the layer has its own."""
        graph, model = self._graph, self._model
        kv_heads, head_dim = model.kv_heads_of(layer), model.head_dim_of(layer)
        query, *own = self._apart(rows, layer, weights)
        if not own:
            return query, None
        key = self.head_norm(own[0], graph.weight(weights.norms["self_attn.k_norm"]), kv_heads, head_dim)
        return query, (key, self.head_norm(own[-1], graph.floats([1.0] * head_dim), kv_heads, head_dim))

    def _apart(self, rows: tuple[str, str], layer: int, weights: BlockWeights) -> list[str]:
        """The projections of the first of `rows` to Q, and of the second to K and V, as far as the layer has them."""
        model, parts = self._model, list[str]()
        of_query, of_key = (heads * model.head_dim_of(layer) for heads in (model.heads, model.kv_heads_of(layer)))
        for matrix in weights.projections:
            sizes = [of_key] * ((matrix.rows - (0 if parts else of_query)) // of_key)
            if not parts:
                sizes = [of_query, *sizes]
            parts += self._products(self._graph, rows[bool(parts)], matrix, sizes)
        return parts

    def window_of(self, layer: int) -> int:
        """How many keys a query of this layer attends to, its own included; -1 for all."""
        return self._model.window if self._model.is_sliding(layer) else -1

    def _with_experts(self, value: str, fed: str, weights: ExpertWeights) -> str:
        graph, model = self._graph, self._model
        mixed = add_experts(graph, model, weights, value, norm=self.norm, gated=self._gated)
        dense = self.norm(fed, graph.weight(weights.norms["post_feedforward_layernorm_1"]))
        return self.added(dense, mixed, graph.weight(weights.norms["post_feedforward_layernorm_2"]))

    def _gated(self, graph: GraphBuilder, value: str, gate_up: Matrix, down: Matrix) -> str:
        """The gated feed-forward; its nodes go into `graph`, which may be a branch."""
        width, trained, fed = down.columns, gate_up.parts or gate_up.rounding or down.rounding, graph.fresh("fed")
        fits = gate_up.sizes and down.sizes and not trained and width % max(_MIN_WIDTH, down.sizes["block_size"]) == 0
        sizes = {**gate_up.sizes, **{f"second_{name}": size for name, size in down.sizes.items()}}
        with graph.kernel("FeedForwardRows" if fits else None, [value], [fed], **sizes) as body:
            gate, up = self._products(body.graph, body.inputs[0], gate_up, [width] * 2)
            body.graph.linear(body.graph.op("Mul", self._gelu(body.graph, gate), up), down, name=body.outputs[0])
        return fed

    def _gelu(self, graph: GraphBuilder, value: str) -> str:
        return graph.op("Gelu", value, approximate="tanh")

    def _products(self, graph: GraphBuilder, value: str, matrix: Matrix, sizes: list[int]) -> list[str]:
        """The products with parts of a matrix that have so many rows."""
        if matrix.parts:
            return [graph.linear(value, part) for part in matrix.parts]
        product = graph.linear(value, matrix)
        return graph.split(product, sizes) if len(sizes) > 1 else [product]


class DrafterBlocks(Blocks):
    """A drafter's layers: every one reads the target's rows, up to `window` + 1 of them on sliding layers.

    The query's position is behind the newest row, and transformers allows distances up to `window`
    (masking_utils.py, sliding_window_bidirectional_overlay).
    """

    def window_of(self, layer: int) -> int:
        """How many of the target's rows a query of this layer attends to."""
        return self._model.window + 1 if self._model.is_sliding(layer) else -1


def per_layer_inputs(
    graph: GraphBuilder,
    head_norm: Callable[[str, str, int, int, float], str],
    model: TextArchitecture,
    embedded: str,
    identity: str,
    projection: Matrix,
    weight: Stored,
) -> list[str]:
    """Splits the per-layer embeddings [1, T, per_layer_size] of the layers of `projection` out of `identity` plus `embedded`, projected.

    `weight` is the projection norm's, times 1/sqrt(2); `identity` is scaled alike. The projection's own scale 1/sqrt(hidden_size) is in
    the norm's epsilon: a norm does not change when its input and the square root of its epsilon are scaled together.
    """
    size = model.per_layer_size
    layers = projection.rows // size
    normed = head_norm(graph.linear(embedded, projection), graph.weight(weight), layers, size, float(model.hidden_size))
    return graph.split(graph.op("Add", normed, identity), [size] * layers)
