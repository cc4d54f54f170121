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

# onnxruntime's MoE and QMoE operators have a SiLU gate and cannot compute Gemma's GELU gate. So each expert is a branch of an If, which
# runs only if a token is routed to it. Its weights are stored and multiplied like all other weights.

_EXPERT_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """A layer's router and experts. `scale` is the router's, times 1/sqrt(hidden_size). Each expert is a pair: gate-and-up, and down."""

    norms: dict[str, Stored]
    scale: Stored
    router: Matrix
    expert_scale: Stored
    experts: list[tuple[Matrix, Matrix]]


def store_experts(weights: WeightFile, checkpoint: Checkpoint, prefix: str, format: WeightFormat) -> ExpertWeights:
    """Writes a layer's router, in float32, and its experts to the data file. `prefix` begins the names of the layer's tensors."""
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
    """Returns one expert's matrix in a tensor [experts, rows, columns]."""
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
    """Emits the experts' output [1, T, hidden_size] in the feed-forward block, before its norm. `value` is the block's input.

    `norm` emits the RMS norm. `gated` emits the gated feed-forward of given weights into a given graph.
    """
    flat = graph.op("Reshape", value, graph.integers([-1, model.hidden_size]))
    shares = _shares(graph, model, weights, norm(flat, graph.weight(weights.scale)))
    inputs = norm(flat, graph.weight(weights.norms["pre_feedforward_layernorm_2"]))
    # The absolute value is taken because an expert's scale may be negative.
    largest = graph.op("ReduceMax", graph.op("Abs", shares), graph.integers([0]), keepdims=0)
    chosen = graph.op("Greater", largest, graph.floats(0))
    each = graph.ops("Split", [graph.op("Cast", chosen, to=7)], model.experts, axis=0, num_outputs=model.experts)
    parts = [_expert(graph, expert, each[expert], shares, inputs, weights.experts[expert], gated) for expert in range(model.experts)]
    # `parts` are ordered by expert, then by token. This is the order of the nonzero shares in the transposed table.
    places = graph.op("NonZero", graph.op("Transpose", shares, perm=[1, 0]))
    tokens = graph.op("Transpose", graph.op("Slice", places, *map(graph.integers, ([1], [2], [0]))), perm=[1, 0])
    nothing = graph.op("Mul", inputs, graph.floats(0))
    summed = graph.op("ScatterND", nothing, tokens, graph.op("Concat", *parts, axis=0), reduction="add")
    return graph.op("Reshape", summed, graph.integers([1, -1, model.hidden_size]))


def _shares(graph: GraphBuilder, model: TextArchitecture, weights: ExpertWeights, normed: str) -> str:
    """Returns each expert's share for each token [T, experts]; it is zero for all but the best `experts_used`."""
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
    """Returns one expert's output rows for its tokens, times their shares; empty if no token is routed to it."""
    used, unused = graph.subgraph("used"), graph.subgraph("unused")
    column = used.op("Gather", shares, used.integers([expert]), axis=1)
    rows = used.op("Squeeze", used.op("Slice", used.op("NonZero", column), *map(used.integers, ([0], [1], [0]))), used.integers([0]))
    fed = gated(used, used.op("Gather", inputs, rows, axis=0), *weights)
    used.output(used.op("Mul", fed, used.op("Gather", column, rows, axis=0)), "f32", ("n", weights[1].rows))
    unused.output(unused.op("Identity", unused.no_rows(weights[1].rows)), "f32", ("n", weights[1].rows))
    condition = graph.op("Cast", graph.op("Squeeze", chosen, graph.integers([0])), to=9)
    return graph.op("If", condition, then_branch=used, else_branch=unused)


class Hidden(NamedTuple):
    """Hidden rows [1, T, hidden_size] before a layer, and these rows after the layer's input norm."""

    rows: str
    normed: str


@dataclass(frozen=True, kw_only=True)
class BlockWeights:
    """A layer's stored weights.

    `projections` holds Q and, if the layer has its own K/V, also K and V. They are one matrix, stacked by rows in this order, or two: Q,
    and K with V. They are always two in the last layer with its own K/V, because its Q is not computed for all rows.
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
        """All matrices except the router's, which is never block-quantized."""
        yield from (*self.projections, self.output, self.gate_up, self.down, *(self.per_layer or ()))
        for expert in self.experts.experts if self.experts else ():
            yield from expert


def are_in_blocks(matrices: Iterable[Matrix]) -> bool:
    """Whether at least one of these is block-quantized, so that the kernels multiply with it."""
    return any(part.sizes for matrix in matrices for part in (matrix.parts or (matrix,)))


def norms_behind(layers: Sequence[BlockWeights], last: Stored) -> list[Stored]:
    """Returns the weight of the norm after each layer: the input norm of the next layer, or `last`."""
    return [*(layer.norms["input_layernorm"] for layer in layers[1:]), last]


# The kernels' threads compute the two halves of a gate in pieces of at least this many outputs, which are whole blocks of the next product.
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
        """Emits the RMS norm of rows of the hidden size."""
        normed = self._graph.fresh("normed")
        with self._graph.kernel("NormRows", [value, weight], [normed], **self._norm_facts()) as (graph, (rows, scale), (name,)):
            self._normed(graph, rows, scale, name=name)
        return normed

    def head_norm(self, value: str, weight: str, heads: int, head_dim: int, epsilon_factor: float = 1.0) -> str:
        """Emits the RMS norm of each head of value [1, T, heads x head_dim]."""
        normed = self._graph.fresh("normed")
        facts = self._norm_facts(epsilon_factor) | {"width": heads * head_dim}
        with self._graph.kernel("NormRows", [value, weight], [normed], **facts) as (graph, (rows, scale), (name,)):
            apart = graph.op("Reshape", rows, graph.integers([0, 0, heads, head_dim]))
            parts = self._normed(graph, apart, scale, epsilon_factor)
            graph.op("Reshape", parts, graph.integers([0, 0, heads * head_dim]), name=name)
        return normed

    def added(self, value: str, branch: str, weight: str) -> str:
        """Returns value plus the norm of a branch; both have rows of the hidden size."""
        total = self._graph.fresh("sum")
        with self._graph.kernel("ResidualRows", [value, branch, weight, "", ""], [total], **self._norm_facts()) as body:
            rows, other, scale, *_ = body.inputs
            body.graph.op("Add", rows, self._normed(body.graph, other, scale), name=body.outputs[0])
        return total

    def _added_and_normed(
        self, value: str, branch: str, weight: str, following: str, *, factor: str = "", name: str | None = None
    ) -> Hidden:
        """Returns the sum of `added`, times `factor` if given, and the norm of this with the weight `following`, which is named `name`."""
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
        """Emits the stock nodes of an RMS norm over the last axis."""
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
        """Emits one decoder layer, which attends to `cache`, and the norm after it with the weight `following`, whose output is `name`.

        A layer with its own K/V adds new rows. `present` names these rows, or the buffers that contain them; with attention on rows it is
        also given to layers that share these rows. With `read`, only K and V are computed for all rows, and everything else for the rows
        that are read.
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
        """Emits a layer's attention. Queries are from the first of `rows`; keys and values, if the layer has its own, from the second."""
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
        """Returns the queries, and the normed keys and values if the layer has its own."""
        graph, model = self._graph, self._model
        kv_heads, head_dim = model.kv_heads_of(layer), model.head_dim_of(layer)
        query, *own = self._apart(rows, layer, weights)
        if not own:
            return query, None
        key = self.head_norm(own[0], graph.weight(weights.norms["self_attn.k_norm"]), kv_heads, head_dim)
        return query, (key, self.head_norm(own[-1], graph.floats([1.0] * head_dim), kv_heads, head_dim))

    def _apart(self, rows: tuple[str, str], layer: int, weights: BlockWeights) -> list[str]:
        """Returns the projections: of the first of `rows` to Q, and of the second to K and V if the layer has them."""
        model, parts = self._model, list[str]()
        of_query, of_key = (heads * model.head_dim_of(layer) for heads in (model.heads, model.kv_heads_of(layer)))
        for matrix in weights.projections:
            sizes = [of_key] * ((matrix.rows - (0 if parts else of_query)) // of_key)
            if not parts:
                sizes = [of_query, *sizes]
            parts += self._products(self._graph, rows[bool(parts)], matrix, sizes)
        return parts

    def window_of(self, layer: int) -> int:
        """The number of keys that a query of this layer attends to, including its own; -1 for all."""
        return self._model.window if self._model.is_sliding(layer) else -1

    def _with_experts(self, value: str, fed: str, weights: ExpertWeights) -> str:
        graph, model = self._graph, self._model
        mixed = add_experts(graph, model, weights, value, norm=self.norm, gated=self._gated)
        dense = self.norm(fed, graph.weight(weights.norms["post_feedforward_layernorm_1"]))
        return self.added(dense, mixed, graph.weight(weights.norms["post_feedforward_layernorm_2"]))

    def _gated(self, graph: GraphBuilder, value: str, gate_up: Matrix, down: Matrix) -> str:
        """Emits the gated feed-forward into `graph`, which may be the subgraph of an expert."""
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
        """Returns the products with parts of a matrix; `sizes` are the parts' numbers of rows."""
        if matrix.parts:
            return [graph.linear(value, part) for part in matrix.parts]
        product = graph.linear(value, matrix)
        return graph.split(product, sizes) if len(sizes) > 1 else [product]


class DrafterBlocks(Blocks):
    """Emits a drafter's layers. All of them read the target's rows; a sliding layer reads up to `window` + 1.

    The query's position is the one after the newest row, and transformers allows distances up to `window` (masking_utils.py,
    sliding_window_bidirectional_overlay).
    """

    def window_of(self, layer: int) -> int:
        """The number of the target's rows that a query of this layer attends to; -1 for all."""
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
    """Returns the per-layer embeddings [1, T, per_layer_size] of the layers of `projection`.

    They are the sum of `identity`, looked up by token, and the normed projection of `embedded`.

    `weight` is the projection norm's, times 1/sqrt(2); `identity` is scaled by the same factor. The projection's scale 1/sqrt(hidden_size)
    is folded into the norm's epsilon: a norm does not change if its input and the square root of its epsilon are scaled by the same factor.
    """
    size = model.per_layer_size
    layers = projection.rows // size
    normed = head_norm(graph.linear(embedded, projection), graph.weight(weight), layers, size, float(model.hidden_size))
    return graph.split(graph.op("Add", normed, identity), [size] * layers)
