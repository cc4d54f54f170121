"""Puts the project's own operators in the place of stock ones in a graph, before onnxruntime reads it.

MatMulNBits becomes MatMulRows, of which only name and domain differ: inputs, attributes and weights are the same, so every bundle gains,
old ones too. Nodes with zero points, or with blocks that do not fill their rows, stay as they are. Attention, as
`edge_export.onnx.graphs.attention` writes it, gets operators whose sums for a row depend on nothing else in its batch: both
GroupQueryAttention on float32 buffers, and the nodes of attention on rows together. Field numbers: onnx/onnx.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edge_devices.files.protobuf_wire import bytes_field, fields_of, whole_fields_of
from edge_runtime.bundle.onnx_graph import CONTRIB

DOMAIN, OPERATOR, STOCK = "edge.mtp", "MatMulRows", "MatMulNBits"
ATTENTION, WRITER, READER, STOCK_ATTENTION = "AttendRows", "AttendBuffers", "ReadBuffers", "GroupQueryAttention"
_BITS, _BLOCKS = {2, 4, 8}, {16, 32, 64, 128}
# MatMulNBits, accuracy_level
_INT8_ACTIVATIONS = 4
# ModelProto.graph and opset_import; GraphProto.node and output, ValueInfoProto.name; NodeProto.input, output, op_type, attribute and
# domain; AttributeProto.name, f, i and g.
_GRAPH, _OPSET = 7, 8
_NODE, _GRAPH_OUTPUT, _VALUE_NAME = 1, 12, 1
_INPUT, _OUTPUT, _OP_TYPE, _ATTRIBUTE, _OP_DOMAIN = 1, 2, 4, 5, 7
_NAME, _FLOAT, _INTEGER, _SUBGRAPH = 1, 2, 3, 6
# What a GroupQueryAttention may say besides its sizes: no soft cap, no sinks, no rotation of neighbours.
_SIZES, _FIXED = {b"num_heads", b"kv_num_heads", b"local_window_size"}, {b"do_rotary": 1, b"scale": 1.0}
# OperatorSetIdProto: this domain in version 1.
_OPSET_OF_DOMAIN = bytes_field(1, DOMAIN.encode()) + b"\x10\x01"


def with_row_kernels(model: bytes) -> tuple[bytes, int]:
    """Returns the model with the operators, and how many nodes have one. `model` has passed `check_onnx`."""
    changed, products = _changed(model, _GRAPH, _graph)
    if not products:
        return model, 0
    changed, attentions = _changed(changed, _GRAPH, _attends)
    return changed + bytes_field(_OPSET, _OPSET_OF_DOMAIN), products + attentions


def _changed(message: bytes, field: int, change: Callable[[bytes], tuple[bytes, int]]) -> tuple[bytes, int]:
    """Applies `change` to every `field` of a message; what it replaces nothing in stays byte for byte."""
    out, replaced = bytearray(), 0
    for number, value, whole in whole_fields_of(message):
        new, count = change(value) if number == field and isinstance(value, bytes) else (b"", 0)
        replaced += count
        out += bytes_field(field, new) if count else whole
    return bytes(out), replaced


def _graph(graph: bytes) -> tuple[bytes, int]:
    return _changed(graph, _NODE, _node)


def _node(node: bytes) -> tuple[bytes, int]:
    if not _fits(node):
        return _changed(node, _ATTRIBUTE, _attribute)
    kept = b"".join(whole for number, _, whole in whole_fields_of(node) if number not in (_OP_TYPE, _OP_DOMAIN))
    return kept + bytes_field(_OP_TYPE, OPERATOR.encode()) + bytes_field(_OP_DOMAIN, DOMAIN.encode()), 1


def _attribute(attribute: bytes) -> tuple[bytes, int]:
    """Goes into the body of a Loop or a branch of an If."""
    return _changed(attribute, _SUBGRAPH, _graph)


def _fits(node: bytes) -> bool:
    """Whether this is a product that the kernels take: activations rounded to int8, no zero points (three inputs), whole blocks."""
    names: dict[int, list[bytes]] = {_INPUT: [], _OP_TYPE: [], _OP_DOMAIN: [], _ATTRIBUTE: []}
    for number, value in fields_of(node):
        if number in names and isinstance(value, bytes):
            names[number].append(value)
    if names[_OP_TYPE] != [STOCK.encode()] or names[_OP_DOMAIN] != [CONTRIB.encode()] or len(names[_INPUT]) != 3:
        return False
    numbers = dict(map(_number, names[_ATTRIBUTE]))
    block = numbers.get(b"block_size", 0)
    if numbers.get(b"accuracy_level", _INT8_ACTIVATIONS) != _INT8_ACTIVATIONS:
        return False
    return numbers.get(b"bits") in _BITS and block in _BLOCKS and numbers.get(b"K", 1) % block == 0


def _number(attribute: bytes) -> tuple[bytes, float]:
    name, found = b"", 0.0
    for number, value in fields_of(attribute):
        if number == _NAME and isinstance(value, bytes):
            name = value
        elif number == _INTEGER and isinstance(value, int):
            found = value - (1 << 64) if value >> 63 else value
        elif number == _FLOAT and isinstance(value, bytes):
            (found,) = struct.unpack("<f", value)
    return name, found


@dataclass
class _Node:
    """A node by its names. `sources` are the nodes that its inputs come from, None for inputs and weights of the graph."""

    operator: str
    inputs: list[bytes] = field(default_factory=list)
    outputs: list[bytes] = field(default_factory=list)
    attributes: list[bytes] = field(default_factory=list)
    sources: list[_Node | None] = field(default_factory=list)

    @property
    def numbers(self) -> dict[bytes, float]:
        """The attributes that are numbers."""
        return dict(map(_number, self.attributes))

    @property
    def nested(self) -> bool:
        """Whether it holds a graph."""
        return any(number == _SUBGRAPH for attribute in self.attributes for number, _ in fields_of(attribute))

    def encoded(self) -> bytes:
        """The node as a message, in the project's own domain."""
        parts = [(_INPUT, self.inputs), (_OUTPUT, self.outputs), (_ATTRIBUTE, self.attributes)]
        names = b"".join(bytes_field(number, value) for number, values in parts for value in values)
        return names + bytes_field(_OP_TYPE, self.operator.encode()) + bytes_field(_OP_DOMAIN, DOMAIN.encode())


def _attends(graph: bytes) -> tuple[bytes, int]:
    """Puts the project's operators in the place of attention, and drops what nobody reads any more. Graphs in graphs stay as they are."""
    fields = [(number, value, whole) for number, value, whole in whole_fields_of(graph)]
    nodes = {at: _parsed(value) for at, (number, value, _) in enumerate(fields) if number == _NODE and isinstance(value, bytes)}
    makers = {name: node for node in nodes.values() for name in node.outputs}
    for node in nodes.values():
        node.sources = [makers.get(name) for name in node.inputs]
    found = {at: new for at, node in nodes.items() if (new := _attention(node) or _on_buffers(node)) is not None}
    if not found or any(node.nested for node in nodes.values()):
        return graph, 0
    nodes |= found
    read = {name for number, value, _ in fields if number == _GRAPH_OUTPUT and isinstance(value, bytes) for name in _names(value)}
    kept: set[int] = set()
    for at in reversed(nodes):  # nodes stand in the order in which they run
        if not read.isdisjoint(nodes[at].outputs):
            kept.add(at)
            read.update(nodes[at].inputs)
    out = bytearray()
    for at, (_, _, whole) in enumerate(fields):
        if at in found:
            out += bytes_field(_NODE, found[at].encoded())
        elif at in kept or at not in nodes:
            out += whole
    return bytes(out), len(found)


def _on_buffers(node: _Node) -> _Node | None:
    """The operator for a GroupQueryAttention on float32 buffers; float16 rows are cast before it, scales of int8 ones are more inputs."""
    casts = any(source is not None and source.operator == "Cast" for source in node.sources[:3])
    fixed = {name: number for name, number in node.numbers.items() if name not in _SIZES}
    if node.operator != STOCK_ATTENTION or len(node.inputs) != 10 or casts or fixed != _FIXED or len(node.outputs) not in (1, 3):
        return None
    kept = [one for one, (name, _) in zip(node.attributes, map(_number, node.attributes), strict=True) if name in _SIZES]
    return _Node(WRITER if len(node.outputs) == 3 else READER, node.inputs, node.outputs, kept)


def _attention(end: _Node) -> _Node | None:
    """The operator for attention on rows, if `end` adds up its two products."""
    cached, new = _sources(end, "Add", 2) or (None, None)
    split, _ = _sources(cached, "MatMul", 2) or (None, None)
    other, _ = _sources(new, "MatMul", 2) or (None, None)
    softmax, sizes = _sources(split, "Split", 2, axis=-1) or (None, None)
    (joined,) = _sources(softmax, "Softmax", 1, axis=-1) or (None,)
    scores, masked = _sources(joined, "Concat", 2, axis=-1) or (None, None)
    own, mask = _sources(masked, "Add", 2) or (None, None)
    products = [_sources(one, "FusedMatMul", 2, transB=1) for one in (scores, own)]
    if other is not split or cached is None or new is None or split is None or None in products or not _causal(mask):
        return None
    assert scores is not None
    assert own is not None
    (queries, past_keys), (same, new_keys) = scores.inputs, own.inputs
    if same != queries or [cached.inputs[0], new.inputs[0]] != split.outputs or not _lengths(sizes):
        return None
    return _Node(ATTENTION, [queries, past_keys, cached.inputs[1], new_keys, new.inputs[1]], end.outputs)


def _causal(mask: _Node | None) -> bool:
    """Whether this is the mask of the rows of one forward, made from the order of their positions."""
    (spread,) = _sources(mask, "Flatten", 1, axis=2) or (None,)
    where, _ = _sources(spread, "Expand", 2) or (None, None)
    seen, _, _ = _sources(where, "Where", 3) or (None, None, None)
    rows = _sources(seen, "GreaterOrEqual", 2) or (None, None)
    return all(_sources(one, "Reshape", 2) is not None and one is not None and one.inputs[0] == b"position_ids" for one in rows)


def _lengths(sizes: _Node | None) -> bool:
    """Whether these are two numbers of rows. All layers take those of the first: they have the same rows."""
    return all(_sources(one, "Shape", 1, start=2, end=3) is not None for one in _sources(sizes, "Concat", 2, axis=0) or (None,))


def _sources(node: _Node | None, operator: str, count: int, **numbers: int) -> Sequence[_Node | None] | None:
    """The sources of a node with this operator, this number of inputs and exactly these attributes."""
    wanted = {name.encode(): number for name, number in numbers.items()}
    fits = node is not None and node.operator == operator and len(node.inputs) == count and node.numbers == wanted
    return node.sources if fits and node is not None else None


def _parsed(node: bytes) -> _Node:
    parsed = _Node("")
    lists = {_INPUT: parsed.inputs, _OUTPUT: parsed.outputs, _ATTRIBUTE: parsed.attributes}
    for number, value in fields_of(node):
        if number == _OP_TYPE and isinstance(value, bytes):
            parsed.operator = value.decode("utf-8", "replace")
        elif number in lists and isinstance(value, bytes):
            lists[number].append(value)
    return parsed


def _names(value_info: bytes) -> list[bytes]:
    return [value for number, value in fields_of(value_info) if number == _VALUE_NAME and isinstance(value, bytes)]
