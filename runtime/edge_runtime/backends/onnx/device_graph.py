"""Changes the target's graph for devices that keep K/V rows in buffers of their own, before onnxruntime reads it: WebGPU.

All attention becomes GroupQueryAttention on whole buffers, bound as its input and as its output, so that rows are written in place:

- Attention on rows, whose products run elsewhere and whose empty input at the first prefill ends the process (onnxruntime-ep-webgpu 0.4.0).
- Layers without K/V of their own give the operator no new rows; with a window its sums are then wrong there (0.4.0). They get the
  rows of the layer that owns the buffer once more, and write them where they already are.

Patterns: `edge_export.onnx.graphs.attention`. What the drafter needs of the device, another graph picks (`picking_graph`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from edge_devices.files.protobuf_wire import bytes_field, number_field
from edge_runtime.backends.onnx.row_kernels import STOCK_ATTENTION, attention_of_last_rows, attention_on_rows
from edge_runtime.bundle.onnx_file import (
    FLOAT,
    INT64,
    Attribute,
    Node,
    OnnxGraph,
    float_attribute,
    integer_attribute,
    read_graph,
    with_graph,
)
from edge_runtime.bundle.onnx_graph import CONTRIB

_POSITIONS = b"position_ids"
_INT32 = 6
_NODE, _TENSOR, _INPUT, _OUTPUT = 1, 5, 11, 12
_IR_VERSION, _OPSET = 10, 21
_MATRIX, _RANK = 2, 3
# A shader of WebGPU has eight buffers at least, one of which it reads (maxStorageBuffersPerShaderStage, www.w3.org/TR/webgpu).
_PARTS = 7
_FULL_COUNTS = (b"last_row_full", b"rows_full")


@dataclass(frozen=True, kw_only=True)
class DeviceGraph:
    """A changed model: `written` has the buffer that each output is bound to."""

    model: bytes
    written: dict[str, str]


@dataclass
class _NewRows:
    """The rows [1, n, kv_heads x head_dim] that a layer gives its operator, which turns the keys first if `turns`."""

    key: bytes
    value: bytes
    turns: Node | None


@dataclass
class _Change:
    """A graph being changed."""

    graph: OnnxGraph
    nodes: list[Node] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)
    own: dict[bytes, _NewRows] = field(default_factory=dict)  # by the name of the key buffer once they are in it
    last_rows: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.makers = {name: node for node in self.graph.nodes for name in node.outputs}
        for node in self.graph.nodes:
            node.sources = [self.makers.get(name) for name in node.inputs]

    def add(self, node: Node) -> list[bytes]:
        self.nodes.append(node)
        return node.outputs

    def output(self, name: bytes, buffer: bytes) -> bytes:
        """Declares a result that is the whole buffer."""
        self.written[name.decode()] = buffer.decode()
        self.graph.added.append(value_field(_OUTPUT, name, FLOAT, 4))
        return name

    def rows_of(self, value: bytes, positions: bytes) -> bytes:
        """Those rows of [1, n, width] that have these positions: all, or the last ones."""
        if positions == _POSITIONS:
            return value
        key = value, positions
        if key not in self.last_rows:
            cut = self.makers[positions]
            self.last_rows[key] = self.add(Node("Slice", [value, *cut.inputs[1:]], [value + b"@" + positions]))[0]
        return self.last_rows[key]


def device_graph(model: bytes, graph: OnnxGraph) -> DeviceGraph | None:
    """Returns the model of a target changed for such a device; None if it has attention that is none of the patterns.

    `model` has passed `check_onnx`, which says nothing of its patterns. `graph` is what `read_graph` says of it, and is changed.
    """
    try:
        return _changed(model, graph)
    except (LookupError, ValueError):  # a node that a pattern ends in is missing, or has other inputs
        return None


def _changed(model: bytes, graph: OnnxGraph) -> DeviceGraph | None:
    change = _Change(graph)
    makers, constants = change.makers, graph.constants
    for node in graph.nodes:
        on_rows = attention_on_rows(node, constants)
        without_padding = attention_of_last_rows(node, constants)
        if on_rows is not None and on_rows.inputs[1].startswith(b"key."):
            _attend_to_rows(change, on_rows, makers)
        elif without_padding is not None and node.sources[0] is not None:
            _attend_again(change, without_padding, node.sources[0])
        elif node.operator == STOCK_ATTENTION and len(node.outputs) == 3 and node.inputs[3].startswith(b"key."):
            _owner(change, node)
        elif node.operator == STOCK_ATTENTION and not _ends_in_slice(graph, node):
            _attend_again(change, node, node)
        else:
            change.nodes.append(node)
    change.nodes = _with_narrow_splits(graph, with_products(graph, change.nodes))
    graph.nodes = _still_read(change, {*graph.outputs, *(name.encode() for name in change.written)})
    if any(name.startswith((b"key.", b"value.")) for node in graph.nodes if node.operator != STOCK_ATTENTION for name in node.inputs):
        return None
    return DeviceGraph(model=with_graph(model, graph, None), written=change.written)


def has_branches(graph: OnnxGraph) -> bool:
    """Whether parts of the graph run only where they are needed, as experts do."""
    return any(node.operator == "If" for node in graph.nodes)


# What is picked of the hidden rows [1, n, hidden size], and at which rows; buffers and the positions read of them.
HIDDEN, HIDDEN_INDEX, POSITIONS, PICKED = "hidden", "index", "positions", "picked"


def picking_graph(buffers: Iterable[str]) -> bytes:
    """Returns a model that gives rows of what lies on a device: `hidden` at `index`, buffers [1, heads, rows, width] at `positions`.

    Its output `picked` float32 is the hidden row [1, 1, hidden size], or, with buffers, all of it one after the other in one axis: a host
    waits for each output that it reads.
    """
    picks = [(HIDDEN, HIDDEN_INDEX, 1), *((name, POSITIONS, 2) for name in buffers)]
    parts = [value_field(_INPUT, name.encode(), INT64, 1) for name in dict.fromkeys(at for _, at, _ in picks)]
    parts += [value_field(_INPUT, name.encode(), FLOAT, 2 + axis) for name, _, axis in picks]
    picked = [PICKED.encode()] if len(picks) == 1 else [f"{name}@picked".encode() for name, _, _ in picks]
    nodes = [
        Node("Gather", [name.encode(), at.encode()], [output], [integer_attribute("axis", axis)])
        for (name, at, axis), output in zip(picks, picked, strict=True)
    ]
    if len(picks) > 1:
        parts.append(constant(b"flat", -1))
        nodes += [Node("Reshape", [name, b"flat"], [name + b"@flat"]) for name in picked]
        nodes.append(Node("Concat", [name + b"@flat" for name in picked], [PICKED.encode()], [integer_attribute("axis", 0)]))
    parts += [bytes_field(_NODE, node.encoded()) for node in nodes]
    parts.append(value_field(_OUTPUT, PICKED.encode(), FLOAT, 3 if len(picks) == 1 else 1))
    opset = bytes_field(8, number_field(2, _OPSET))
    return number_field(1, _IR_VERSION) + bytes_field(7, b"".join([bytes_field(2, b"picks"), *parts])) + opset


# What the head gives of each row beside its logits: the likeliest token that is not suppressed, and numbers that show unsound rows.
CHOICE = "choice"
SUPPRESSED = "suppressed"


def head_with_choices(model: bytes) -> bytes | None:
    """Returns the model of a head that chooses on the device too, None if it gives no logits, or has products that are none.

    `suppressed` float32 [1, 1, vocabulary] is added to the logits before a token is chosen. The output `choice` float32 [1, n, 4] has the
    token, the largest and the least logit and their sum, which no NaN leaves finite: a host waits for each output that it reads.
    """
    graph = read_graph(model)
    logits, axis = b"logits", b"last_axis"
    if logits not in graph.outputs:
        return None
    masked = Node("Add", [logits, SUPPRESSED.encode()], [b"masked_logits"])
    chosen = Node("ArgMax", masked.outputs, [b"chosen"], [integer_attribute("axis", 2)])
    token = Node("Cast", chosen.outputs, [b"chosen_float"], [integer_attribute("to", FLOAT)])
    reduced = [Node(f"Reduce{word}", [logits, axis], [f"logits_{word}".encode()]) for word in ("Max", "Min", "Sum")]
    facts = [node.outputs[0] for node in (token, *reduced)]
    together = Node("Concat", facts, [CHOICE.encode()], [integer_attribute("axis", 2)])
    try:
        graph.nodes = [*with_products(graph, graph.nodes), masked, chosen, token, *reduced, together]
    except (LookupError, ValueError):  # a product of a stranger, with other inputs or outputs
        return None
    graph.added += [constant(axis, 2), value_field(_INPUT, SUPPRESSED.encode(), FLOAT, 3), value_field(_OUTPUT, CHOICE.encode(), FLOAT, 3)]
    return with_graph(model, graph, None)


def with_products(graph: OnnxGraph, nodes: Sequence[Node]) -> list[Node]:
    """The nodes with Gemm in the place of FusedMatMul with float weights [N, K], which devices do not have, on rows [1, n, K]."""
    makers, shapes, changed = {name: node for node in nodes for name in node.outputs}, dict[bytes, bytes](), list[Node]()

    def shape(*sizes: int) -> bytes:
        name = f"shape@{sizes}".encode()
        if name not in shapes:
            shapes[name] = constant(name, *sizes)
        return name

    for node in nodes:
        weights = graph.constants.get(_uncast(node.inputs[1], makers)) if node.operator == "FusedMatMul" else None
        if weights is None or len(weights.shape) != _MATRIX or node.numbers != {b"transB": 1} or _has_other_rank(node, makers, graph):
            changed.append(node)
            continue
        outputs, inputs = weights.shape
        (name,) = node.outputs
        flat = Node("Reshape", [node.inputs[0], shape(-1, inputs)], [name + b"@rows"])
        product = Node("Gemm", [*flat.outputs, node.inputs[1]], [name + b"@product"], [integer_attribute("transB", 1)])
        changed += [flat, product, Node("Reshape", [*product.outputs, shape(1, -1, outputs)], [name])]
    graph.added += shapes.values()
    return changed


def _with_narrow_splits(graph: OnnxGraph, nodes: Sequence[Node]) -> list[Node]:
    """The nodes with a tree of narrower ones in the place of each Split into more parts than a shader has buffers for."""
    changed, sizes_of = list[Node](), dict[tuple[int, ...], bytes]()

    def split(value: bytes, outputs: list[bytes], sizes: tuple[int, ...], attributes: list[Attribute]) -> None:
        each = 1
        while len(outputs) > _PARTS * each:
            each *= _PARTS
        ends = range(0, len(outputs), each)
        parts = [(outputs[first : first + each], sizes[first : first + each]) for first in ends]
        names = [names[0] if len(names) == 1 else names[0] + b"@parts" + str(each).encode() for names, _ in parts]
        sums = tuple(sum(widths) for _, widths in parts)
        if sums not in sizes_of:
            sizes_of[sums] = f"sizes@{sums}".encode()
            graph.added.append(constant(sizes_of[sums], *sums))
        changed.append(Node("Split", [value, sizes_of[sums]], names, attributes))
        for name, (inner, widths) in zip(names, parts, strict=True):
            if len(inner) > 1:
                split(name, inner, widths, attributes)

    for node in nodes:
        if node.operator != "Split" or len(node.outputs) <= _PARTS:
            changed.append(node)
            continue
        sizes = graph.constants[node.inputs[1]].integers or ()
        if len(sizes) != len(node.outputs):
            raise ValueError(node.name)
        split(node.inputs[0], node.outputs, sizes, node.attributes)
    return changed


def _has_other_rank(product: Node, makers: Mapping[bytes, Node], graph: OnnxGraph) -> bool:
    """Whether its rows, or those that they are the norm of, are made to have other than three dimensions, as a router's of experts are."""
    maker = makers.get(product.inputs[0])
    if maker is not None and maker.operator == "RMSNormalization":
        maker = makers.get(maker.inputs[0])
    if maker is None or maker.operator != "Reshape":
        return False
    shape = graph.constants.get(maker.inputs[1])
    return shape is None or len(shape.integers or ()) != _RANK


def _uncast(name: bytes, makers: Mapping[bytes, Node]) -> bytes:
    """The name of float16 weights where they are converted to float32."""
    maker = makers.get(name)
    return maker.inputs[0] if maker is not None and maker.operator == "Cast" else name


def _owner(change: _Change, node: Node) -> None:
    """An operator that writes its own rows already."""
    change.nodes.append(node)
    for output, buffer in zip(node.outputs[1:], node.inputs[3:5], strict=True):
        change.written[output.decode()] = buffer.decode()
    change.own[node.outputs[1]] = _NewRows(key=node.inputs[1], value=node.inputs[2], turns=node)


def _attend_again(change: _Change, attention: Node, stock: Node) -> None:
    """Attention to a buffer that another layer has written: `stock` as the graph has it, `attention` with its inputs now."""
    own = change.own.get(attention.inputs[3])
    if own is None:
        change.nodes.append(stock)
        return
    positions = attention.inputs[9]
    new = [change.rows_of(value, positions) for value in (own.key, own.value)]
    inputs = [attention.inputs[0], *new, *attention.inputs[3:]]
    outputs = [attention.outputs[0], *_again(change, attention.inputs[3:5], attention.outputs[0])]
    change.add(Node(STOCK_ATTENTION, inputs, outputs, stock.attributes, CONTRIB))


def _again(change: _Change, written: list[bytes], unique: bytes) -> list[bytes]:
    """Names of results that are buffers which were written before."""
    return [change.output(name + b"@" + unique, change.written[name.decode()].encode()) for name in written]


def _attend_to_rows(change: _Change, attention: Node, makers: dict[bytes, Node]) -> None:
    """Attention on rows, as the same on the whole buffers. What was turned by then is not turned again."""
    queries, past_key, past_value, new_key, new_value = attention.inputs
    turned = makers[makers[queries].inputs[0]]
    heads = int(attention.numbers[b"num_heads"])
    if new_key not in change.own:
        key, value = (makers[name].inputs[0] for name in (new_key, new_value))
        change.own[new_key] = _NewRows(key=key, value=value, turns=None)
        for name, buffer in ((new_key, past_key), (new_value, past_value)):
            change.written[name.decode()] = buffer.decode()
        if not set(_FULL_COUNTS) <= set(change.graph.inputs):
            change.graph.added += [value_field(_INPUT, name, _INT32, rank) for name, rank in zip(_FULL_COUNTS, (1, 0), strict=True)]
            change.graph.inputs |= dict.fromkeys(_FULL_COUNTS, ())
        # The operator writes as many rows as it has queries: here keys, which attend to themselves.
        inputs = [key, key, value, past_key, past_value, *_FULL_COUNTS]
        change.add(Node(STOCK_ATTENTION, inputs, [new_key + b"@unread", new_key, new_value], _attributes(1, window=1), CONTRIB))
    own, positions = change.own[new_key], turned.inputs[1]
    new = [change.rows_of(name, positions) for name in (own.key, own.value)]
    outputs = [attention.outputs[0], *_again(change, [new_key, new_value], attention.outputs[0])]
    inputs = [turned.outputs[0], *new, new_key, new_value, *_FULL_COUNTS]
    change.add(Node(STOCK_ATTENTION, inputs, outputs, _attributes(heads, window=None), CONTRIB))


def _attributes(heads: int, *, window: int | None) -> list[Attribute]:
    """Of attention to one K/V head, unscaled and not turned; without a window that is -1, which is the operator's default."""
    sizes = {"num_heads": heads, "kv_num_heads": 1, "do_rotary": 0} | ({} if window is None else {"local_window_size": window})
    return [float_attribute("scale", 1.0), *(integer_attribute(name, size) for name, size in sizes.items())]


def _ends_in_slice(graph: OnnxGraph, attention: Node) -> bool:
    """Whether a Slice that `attention_of_last_rows` takes follows: it stands for both."""
    return any(
        node.operator == "Slice" and node.inputs[0] == attention.outputs[0] and attention_of_last_rows(node, graph.constants)
        for node in graph.nodes
    )


def _still_read(change: _Change, outputs: set[bytes]) -> list[Node]:
    """The nodes without those whose results nobody reads, or that another node gives now."""
    read, kept, made = set(outputs), list[Node](), set[bytes]()
    attentions = {id(node) for node in change.nodes if node.operator == STOCK_ATTENTION}
    replaced = {name for node in change.nodes if id(node) in attentions for name in node.outputs}
    for node in reversed(change.nodes):
        doubled = id(node) not in attentions and not replaced.isdisjoint(node.outputs)
        if not doubled and not read.isdisjoint(node.outputs) and made.isdisjoint(node.outputs):
            kept.append(node)
            made.update(node.outputs)
            read.update(node.inputs, node.names_within)
    return kept[::-1]


def value_field(number: int, name: bytes, element_type: int, rank: int) -> bytes:
    """An input or output of a graph whose sizes are known at run time only (ValueInfoProto)."""
    dimensions = b"".join(bytes_field(1, b"") for _ in range(rank))
    tensor = number_field(1, element_type) + bytes_field(2, dimensions)
    return bytes_field(number, bytes_field(1, name) + bytes_field(2, bytes_field(1, tensor)))


def constant(name: bytes, *values: int) -> bytes:
    """A list of int64 (TensorProto) among a graph's fields."""
    shape = number_field(1, len(values)) + number_field(2, INT64)
    return bytes_field(_TENSOR, shape + bytes_field(8, name) + bytes_field(9, struct.pack(f"<{len(values)}q", *values)))
