"""Puts the project's own operators in the place of stock ones in a graph, before onnxruntime reads it: old bundles gain too.

- Products: MatMulNBits becomes MatMulRows, of which only name and domain differ. Nodes with zero points, or with blocks that do not fill
  their rows, stay as they are.
- Products of checkpoints that were trained for integers, as `edge_export.onnx.graph_builder` writes them: with the rounding of activations
  and results by scales of their own they become MatMulStatic. Their few float16 matrices are multiplied by MatMulHalves.
- Attention, as `edge_export.onnx.graphs.attention` writes it: GroupQueryAttention on float32 buffers, and the nodes of attention on rows
  together, whose sums for a row then depend on nothing else in its batch.
- The gated feed-forward, as `edge_export.onnx.graphs.blocks` writes it: the product with both halves, their split, GELU, the product of
  the halves and the product with that become one operator, which writes nothing between the two products to memory as floats.
- Products whose results are capped, as the logits are: c * tanh(product), while a part of them is in the nearest cache.
- Norms: RMSNormalization with the Reshapes that part a row into heads, and with the sum, its factor and the norm of that sum behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf

from edge_runtime.bundle.onnx_file import (
    FLOAT,
    FLOAT16,
    Attribute,
    Node,
    OnnxGraph,
    Tensor,
    float_attribute,
    integer_attribute,
    read_graph,
    with_graph,
)
from edge_runtime.bundle.onnx_graph import CONTRIB

DOMAIN = "edge.mtp"
PRODUCT, CAPPED, STOCK_PRODUCT = "MatMulRows", "MatMulCapRows", "MatMulNBits"
STATIC, HALVES = "MatMulStatic", "MatMulHalves"
ATTENTION, WRITER, READER, STOCK_ATTENTION = "AttendRows", "AttendBuffers", "ReadBuffers", "GroupQueryAttention"
FEED_FORWARD, NORM, RESIDUAL = "FeedForwardRows", "NormRows", "ResidualRows"
_BITS, _BLOCKS = {2, 4, 8}, {16, 32, 64, 128}
# MatMulNBits, accuracy_level
_FLOAT_ACTIVATIONS, _INT8_ACTIVATIONS = 1, 4
# The levels of activations that are rounded to int8.
_LEVELS = [-128.0, 127.0]
# What a GroupQueryAttention may say besides its sizes: no soft cap, no sinks, no rotation of neighbours.
_SIZES, _FIXED = {b"num_heads", b"kv_num_heads", b"local_window_size"}, {b"do_rotary": 1, b"scale": 1.0}
_POSITIONS = b"position_ids"
# The end of a Slice that goes to the end.
_END = (1 << 63) - 1
# The fewest outputs of each half of a gate that a thread computes together: whole blocks of the product behind it.
_MIN_WIDTH = 64


def with_row_kernels(model: bytes, *, newest: bool = True) -> tuple[bytes, int]:
    """Returns the model with the operators, the `newest` too, and how many nodes have one. `model` has passed `check_onnx`."""
    graph = read_graph(model)
    nodes = list(_all_nodes(graph))
    products = [node for node in nodes if _is_product(node, _INT8_ACTIVATIONS)]
    if not products and not any(_is_product(node, _FLOAT_ACTIVATIONS) for node in nodes):
        return model, 0
    for node in products:
        node.operator, node.domain = PRODUCT, DOMAIN
    joined = _join(graph, {}, newest=newest)
    return with_graph(model, graph, DOMAIN), len(products) + joined


def _all_nodes(graph: OnnxGraph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for inner in node.graphs.values():
            yield from _all_nodes(inner)


def _is_product(node: Node, accuracy_level: int) -> bool:
    """Whether this is a product that the kernels take: activations of this kind, no zero points (three inputs), whole blocks."""
    if (node.operator, node.domain) != (STOCK_PRODUCT, CONTRIB) or len(node.inputs) != 3:
        return False
    numbers = node.numbers
    block = numbers.get(b"block_size", 0)
    if numbers.get(b"accuracy_level", _INT8_ACTIVATIONS) != accuracy_level:
        return False
    return numbers.get(b"bits") in _BITS and block in _BLOCKS and numbers.get(b"K", 1) % block == 0


def _join(graph: OnnxGraph, outer: Mapping[bytes, Tensor], *, newest: bool) -> int:
    """Puts one operator in the place of several nodes, and drops what nobody reads any more; so in the graphs within.

    `outer` are the constants of the graphs around it. Returns how many operators there are.
    """
    constants = {**outer, **graph.constants}
    within = sum(_join(inner, constants, newest=newest) for node in graph.nodes for inner in node.graphs.values())
    makers = {name: node for node in graph.nodes for name in node.outputs}
    for node in graph.nodes:
        node.sources = [makers.get(name) for name in node.inputs]
    joins = [
        attention_on_rows(node, constants)
        or attention_on_buffers(node)
        or attention_of_last_rows(node, constants)
        or feed_forward(node, constants)
        or static_product(node, constants)
        or product_of_halves(node, constants)
        or (newer(node, constants) if newest else None)
        for node in graph.nodes
    ]
    made = {id(node) for node in joins if node is not None}
    if not made:
        return within
    read = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed([new or old for new, old in zip(joins, graph.nodes, strict=True)]):  # nodes stand in the order in which they run
        if not read.isdisjoint(node.outputs):
            kept.append(node)
            read.update(node.inputs, node.names_within)
    graph.nodes = kept[::-1]
    _join_norms(graph, constants)
    return within + sum(id(node) in made for node in graph.nodes)


def attention_on_buffers(node: Node) -> Node | None:
    """The operator for a GroupQueryAttention on float32 buffers; float16 rows are cast before it, scales of int8 ones are more inputs."""
    casts = any(source is not None and source.operator == "Cast" for source in node.sources[:3])
    fixed = {name: number for name, number in node.numbers.items() if name not in _SIZES}
    if node.operator != STOCK_ATTENTION or len(node.inputs) != 10 or casts or fixed != _FIXED or len(node.outputs) not in (1, 3):
        return None
    sizes = [attribute for attribute in node.attributes if attribute.name in _SIZES]
    return Node(WRITER if len(node.outputs) == 3 else READER, node.inputs, node.outputs, sizes, DOMAIN)


def attention_of_last_rows(end: Node, constants: Mapping[bytes, Tensor]) -> Node | None:
    """The operator for a GroupQueryAttention that takes at least one row, if `end` drops that row from its output where there is none."""
    attention, padding, _, _ = _sources(end, "Slice", 4) or (None,) * 4
    operator = attention and attention_on_buffers(attention)
    if attention is None or operator is None or operator.operator != READER or not _goes_to_the_end(end, constants):
        return None
    queries, positions = (attention.sources[place] for place in (0, 9))
    padded = [_sources(node, "Concat", 2, axis=1) for node in (queries, positions)]
    if None in padded or _sources(padding, "Shape", 1, start=1, end=2) is None:
        return None
    assert queries is not None
    assert positions is not None
    assert padding is not None
    if not _have_as_many_rows(padding.sources[0], queries.sources[0], constants):
        return None
    inputs = [queries.inputs[1], *attention.inputs[1:9], positions.inputs[1]]
    return Node(READER, inputs, end.outputs, operator.attributes, DOMAIN)


def _have_as_many_rows(counted: Node | None, first: Node | None, constants: Mapping[bytes, Tensor]) -> bool:
    """Whether both are the row of padding, or none of it, of one width or two: an export counts that of the first layer only."""
    if counted is None or first is None or counted is first:
        return counted is first
    rows = [constants[node.inputs[0]].shape[:2] for node in (counted, first) if node.operator == "Slice" and node.inputs[0] in constants]
    return rows == [(1, 1), (1, 1)] and counted.inputs[1:] == first.inputs[1:]


def attention_on_rows(end: Node, constants: Mapping[bytes, Tensor]) -> Node | None:
    """The operator for attention on rows, if `end` adds up its two products."""
    cached, new = _sources(end, "Add", 2) or (None, None)
    split, _ = _sources(cached, "MatMul", 2) or (None, None)
    other, _ = _sources(new, "MatMul", 2) or (None, None)
    softmax, sizes = _sources(split, "Split", 2, axis=-1) or (None, None)
    (joined,) = _sources(softmax, "Softmax", 1, axis=-1) or (None,)
    scores, masked = _sources(joined, "Concat", 2, axis=-1) or (None, None)
    own, mask = _sources(masked, "Add", 2) or (None, None)
    products = [_sources(product, "FusedMatMul", 2, transB=1) for product in (scores, own)]
    causal = _causal(mask, constants)
    if other is not split or cached is None or new is None or split is None or None in products or causal is None:
        return None
    assert scores is not None
    assert own is not None
    (queries, past_keys), (same, new_keys) = scores.inputs, own.inputs
    if same != queries or [cached.inputs[0], new.inputs[0]] != split.outputs or not _are_lengths(sizes):
        return None
    heads, positions = causal
    inputs = [queries, past_keys, cached.inputs[1], new_keys, new.inputs[1], positions, _POSITIONS]
    return Node(ATTENTION, inputs, end.outputs, [integer_attribute("num_heads", heads)], DOMAIN)


def _causal(mask: Node | None, constants: Mapping[bytes, Tensor]) -> tuple[int, bytes] | None:
    """How many query heads this mask is for, and the queries' positions, if it is that of the last rows of one forward, or of all, by the
    order of their positions."""
    (spread,) = _sources(mask, "Flatten", 1, axis=2) or (None,)
    where, _ = _sources(spread, "Expand", 2) or (None, None)
    visible, _, _ = _sources(where, "Where", 3) or (None, None, None)
    of_queries, of_keys = _sources(visible, "GreaterOrEqual", 2) or (None, None)
    if _sources(of_queries, "Reshape", 2) is None or _sources(of_keys, "Reshape", 2) is None:
        return None
    assert spread is not None
    assert of_queries is not None
    assert of_keys is not None
    repeats = constants.get(spread.inputs[1])
    own = of_queries.inputs[0] == _POSITIONS or _are_last_positions(of_queries.sources[0], constants)
    if of_keys.inputs[0] != _POSITIONS or not own or repeats is None or repeats.integers is None or len(repeats.integers) != 3:
        return None
    return repeats.integers[1], of_queries.inputs[0]


def _are_last_positions(node: Node | None, constants: Mapping[bytes, Tensor]) -> bool:
    """Whether these are the positions of a forward's last rows."""
    if node is None or _sources(node, "Slice", 4) is None or node.inputs[0] != _POSITIONS:
        return False
    return _goes_to_the_end(node, constants)


def _goes_to_the_end(node: Node, constants: Mapping[bytes, Tensor]) -> bool:
    """Whether a Slice of four inputs takes all rows from its start on."""
    ends, axes = (constants.get(name) for name in node.inputs[2:])
    return ends is not None and axes is not None and (ends.integers, axes.integers) == ((_END,), (1,))


def _are_lengths(sizes: Node | None) -> bool:
    """Whether these are two numbers of rows. All layers take those of the first: they have the same rows."""
    return all(_sources(size, "Shape", 1, start=2, end=3) is not None for size in _sources(sizes, "Concat", 2, axis=0) or (None,))


def feed_forward(end: Node, constants: Mapping[bytes, Tensor]) -> Node | None:
    """The operator for a gated feed-forward, if `end` is its second product."""
    hidden = end.sources[0] if end.operator == PRODUCT else None
    gelu, values = _sources(hidden, "Mul", 2) or (None, None)
    (gates,) = _sources(gelu, "Gelu", 1, approximate=0) or (None,)
    product, _ = _sources(gates, "Split", 2, axis=-1) or (None, None)
    if hidden is None or gelu is None or gates is None or gates is not values or product is None or product.operator != PRODUCT:
        return None
    if [gelu.inputs[0], hidden.inputs[1]] != gates.outputs or gelu.attributes[0].text != b"tanh":
        return None
    second = {name: int(end.numbers.get(name, 0)) for name in (b"K", b"N", b"bits", b"block_size")}
    width, sizes = second[b"K"], constants.get(gates.inputs[1])
    if min(second.values()) < 1 or width % max(_MIN_WIDTH, second[b"block_size"]) or product.numbers.get(b"N") != 2 * width:
        return None
    if sizes is None or sizes.integers != (width, width):
        return None
    attributes = [*product.attributes, *(integer_attribute(f"second_{name.decode()}", number) for name, number in second.items())]
    return Node(FEED_FORWARD, [*product.inputs, *end.inputs[1:]], end.outputs, attributes, DOMAIN)


def static_product(end: Node, constants: Mapping[bytes, Tensor]) -> Node | None:
    """The operator for a product of activations with a static scale, if `end` rounds its results, or is it and nobody rounds them."""
    after = _rounding(end, constants)
    product, output_scale = (after[0].sources[0], after[1]) if after else (end, 0.0)
    if product is None or not _is_product(product, _FLOAT_ACTIVATIONS):
        return None
    before = _rounding(product.sources[0], constants)
    if before is None:
        return None
    sizes = [attribute for attribute in product.attributes if attribute.name != b"accuracy_level"]
    scales = [float_attribute("input_scale", before[1]), float_attribute("output_scale", output_scale)]
    return Node(STATIC, [before[0].inputs[0], *product.inputs[1:]], end.outputs, [*sizes, *scales], DOMAIN)


def _rounding(end: Node | None, constants: Mapping[bytes, Tensor]) -> tuple[Node, float] | None:
    """The division by a scale whose nearest level `end` multiplies with that scale, and the scale."""
    level, _ = _sources(end, "Mul", 2) or (None, None)
    nearest, _, _ = _sources(level, "Clip", 3) or (None, None, None)
    (divided,) = _sources(nearest, "Round", 1) or (None,)
    if end is None or level is None or divided is None or _sources(divided, "Div", 2) is None or end.inputs[1] != divided.inputs[1]:
        return None
    scale, *levels = (constants[name].number if name in constants else None for name in (end.inputs[1], *level.inputs[1:]))
    return (divided, scale) if scale is not None and 0 < scale < inf and levels == _LEVELS else None


def product_of_halves(node: Node, constants: Mapping[bytes, Tensor]) -> Node | None:
    """The operator for a product with a matrix of float16 constants."""
    _, cast = _sources(node, "FusedMatMul", 2, transB=1) or (None, None)
    weights = constants.get(cast.inputs[0]) if cast is not None and cast.operator == "Cast" else None
    if cast is None or weights is None or weights.type != FLOAT16 or len(weights.shape) != 2:
        return None
    return Node(HALVES, [node.inputs[0], cast.inputs[0]], node.outputs, [], DOMAIN)


def newer(node: Node, constants: Mapping[bytes, Tensor]) -> Node | None:
    """The operators that an earlier build of the kernels has not, each for the only output of a node."""
    if len(node.outputs) != 1:
        return None
    return norm_of_rows(node, constants) or residual(node, constants) or capped_product(node, constants)


def capped_product(end: Node, constants: Mapping[bytes, Tensor]) -> Node | None:
    """The operator for a product, if `end` multiplies its tanh with a constant."""
    capped, _ = _sources(end, "Mul", 2) or (None, None)
    (product,) = _sources(capped, "Tanh", 1) or (None,)
    cap = constants[end.inputs[1]].number if capped is not None and end.inputs[1] in constants else None
    if product is None or product.operator != PRODUCT or cap is None or not 0 < cap < inf:
        return None
    return Node(CAPPED, product.inputs, end.outputs, [*product.attributes, float_attribute("cap", cap)], DOMAIN)


def _is_norm(node: Node | None, constants: Mapping[bytes, Tensor]) -> bool:
    """Whether this is a norm over the last dimension with float32 weights."""
    if node is None or node.operator != "RMSNormalization" or len(node.inputs) != 2:
        return False
    numbers, weight = node.numbers, constants.get(node.inputs[1])
    usual = numbers.get(b"axis", -1) == -1 and numbers.get(b"stash_type", 1) == 1 and b"epsilon" in numbers
    return usual and weight is not None and weight.type == FLOAT and len(weight.shape) == 1 and weight.shape[0] > 0


def norm_of_rows(end: Node, constants: Mapping[bytes, Tensor]) -> Node | None:
    """The operator for a norm, or for one of the heads of a row if `end` makes them one row again."""
    norm, _ = _sources(end, "Reshape", 2) or (end, None)
    if norm is None or not _is_norm(norm, constants):
        return None
    rows, weight = norm.inputs
    (width,) = constants[weight].shape
    if norm is not end:
        parts = norm.sources[0]
        if parts is None or _sources(parts, "Reshape", 2) is None:
            return None
        apart, again = (constants[name].integers if name in constants else None for name in (parts.inputs[1], end.inputs[1]))
        if apart is None or again is None or len(apart) != 4 or min(apart[2:]) < 1:
            return None
        if apart != (0, 0, apart[2], width) or again != (0, 0, apart[2] * width):
            return None
        rows, width = parts.inputs[0], again[2]
    return Node(NORM, [rows, weight], end.outputs, _norm_attributes(norm, width), DOMAIN)


def residual(end: Node, constants: Mapping[bytes, Tensor]) -> Node | None:
    """The operator for a sum with a norm, if `end` is it or multiplies it with a constant of one element.

    Sizes are not known here: an Add that broadcasts, which the exporter does not write, becomes an operator that refuses each run.
    """
    factor, total = b"", end
    if end.operator == "Mul" and len(end.inputs) == 2 and (source := end.sources[0]) is not None:
        number = constants.get(end.inputs[1])
        if number is None or number.type != FLOAT or number.shape not in ((), (1,)):
            return None
        factor, total = end.inputs[1], source
    _, norm = _sources(total, "Add", 2) or (None, None)
    if norm is None or not _is_norm(norm, constants):
        return None
    (width,) = constants[norm.inputs[1]].shape
    return Node(RESIDUAL, [total.inputs[0], *norm.inputs, factor, b""], end.outputs, _norm_attributes(norm, width), DOMAIN)


def _norm_attributes(norm: Node, width: int) -> list[Attribute]:
    return [float_attribute("epsilon", norm.numbers[b"epsilon"]), integer_attribute("width", width)]


def _join_norms(graph: OnnxGraph, constants: Mapping[bytes, Tensor]) -> None:
    """Has each sum with a norm give the norm of the sum too, where that is what is computed next; not that of its heads."""
    sums = {node.outputs[0]: node for node in graph.nodes if node.operator == RESIDUAL}
    dropped = set()
    for node in graph.nodes:
        total = sums.get(node.inputs[0]) if node.operator == NORM else None
        if total is None or total.numbers != node.numbers or len(total.outputs) != 1:
            continue
        if constants[total.inputs[2]].shape == constants[node.inputs[1]].shape:
            total.inputs[4], total.outputs = node.inputs[1], [*total.outputs, *node.outputs]
            dropped.add(id(node))
    graph.nodes = [node for node in graph.nodes if id(node) not in dropped]


def _sources(node: Node | None, operator: str, count: int, **numbers: int) -> Sequence[Node | None] | None:
    """The sources of a node with this operator, this number of inputs and exactly these attributes; None for another node."""
    expected = {name.encode(): number for name, number in numbers.items()}
    fits = node is not None and node.operator == operator and len(node.inputs) == count and node.numbers == expected
    return node.sources if fits and node is not None else None
