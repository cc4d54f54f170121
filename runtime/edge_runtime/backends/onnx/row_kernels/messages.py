"""Graphs as protobuf messages: nodes by their names, and changes that leave every other byte as it is. Field numbers: onnx/onnx.proto."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from edge_devices.files.protobuf_wire import bytes_field, fields_of, whole_fields_of

DOMAIN = "edge.mtp"
# ModelProto.graph and opset_import; GraphProto.node, initializer and output, ValueInfoProto.name; NodeProto.input, output, op_type,
# attribute and domain; AttributeProto.name, f, i, s and g; TensorProto.data_type, name and raw_data.
GRAPH, OPSET = 7, 8
NODE, INITIALIZER, GRAPH_OUTPUT, _VALUE_NAME = 1, 5, 12, 1
INPUT, OUTPUT, OP_TYPE, ATTRIBUTE, OP_DOMAIN = 1, 2, 4, 5, 7
_NAME, _FLOAT, _INTEGER, _STRING, SUBGRAPH = 1, 2, 3, 4, 6
_DATA_TYPE, _TENSOR_NAME, _RAW_DATA = 2, 8, 9
_INT64, _LONGEST_CONSTANT = 7, 64


def changed(message: bytes, field: int, change: Callable[[bytes], tuple[bytes, int]]) -> tuple[bytes, int]:
    """Applies `change` to every `field` of a message; what it replaces nothing in stays byte for byte."""
    out, replaced = bytearray(), 0
    for number, value, whole in whole_fields_of(message):
        new, count = change(value) if number == field and isinstance(value, bytes) else (b"", 0)
        replaced += count
        out += bytes_field(field, new) if count else whole
    return bytes(out), replaced


def number_of(attribute: bytes) -> tuple[bytes, float]:
    """Returns an attribute's name, and its number; 0 if it has none."""
    name, found = b"", 0.0
    for number, value in fields_of(attribute):
        if number == _NAME and isinstance(value, bytes):
            name = value
        elif number == _INTEGER and isinstance(value, int):
            found = value - (1 << 64) if value >> 63 else value
        elif number == _FLOAT and isinstance(value, bytes):
            (found,) = struct.unpack("<f", value)
    return name, found


def text_of(attribute: bytes) -> bytes:
    """Returns an attribute's text; nothing if it has none."""
    return next((value for number, value in fields_of(attribute) if number == _STRING and isinstance(value, bytes)), b"")


@dataclass
class Node:
    """A node by its names. `sources` are the nodes that its inputs come from, None for inputs and weights of the graph."""

    operator: str
    inputs: list[bytes] = field(default_factory=list)
    outputs: list[bytes] = field(default_factory=list)
    attributes: list[bytes] = field(default_factory=list)
    sources: list[Node | None] = field(default_factory=list)

    @property
    def numbers(self) -> dict[bytes, float]:
        """The attributes that are numbers."""
        return dict(map(number_of, self.attributes))

    def encoded(self) -> bytes:
        """The node as a message, in the project's own domain."""
        parts = [(INPUT, self.inputs), (OUTPUT, self.outputs), (ATTRIBUTE, self.attributes)]
        names = b"".join(bytes_field(number, value) for number, values in parts for value in values)
        return names + bytes_field(OP_TYPE, self.operator.encode()) + bytes_field(OP_DOMAIN, DOMAIN.encode())

    def names_within(self) -> Iterator[bytes]:
        """The names that the graphs in it read; some are the outer graph's."""
        for attribute in self.attributes:
            for number, graph in fields_of(attribute):
                if number == SUBGRAPH and isinstance(graph, bytes):
                    for inner in (parse_node(value) for kind, value in fields_of(graph) if kind == NODE and isinstance(value, bytes)):
                        yield from inner.inputs
                        yield from inner.names_within()
                    yield from output_names(graph)


def parse_node(node: bytes) -> Node:
    """Returns a node without its sources."""
    parsed = Node("")
    lists = {INPUT: parsed.inputs, OUTPUT: parsed.outputs, ATTRIBUTE: parsed.attributes}
    for number, value in fields_of(node):
        if number == OP_TYPE and isinstance(value, bytes):
            parsed.operator = value.decode("utf-8", "replace")
        elif number in lists and isinstance(value, bytes):
            lists[number].append(value)
    return parsed


def output_names(graph: bytes) -> Iterator[bytes]:
    """Returns the names of a graph's outputs."""
    for number, value in fields_of(graph):
        if number == GRAPH_OUTPUT and isinstance(value, bytes):
            yield from (name for kind, name in fields_of(value) if kind == _VALUE_NAME and isinstance(name, bytes))


def constants_of(graph: bytes) -> Mapping[bytes, tuple[int, ...]]:
    """Returns a graph's short int64 constants by their names."""
    found = {}
    for number, value in fields_of(graph):
        if number == INITIALIZER and isinstance(value, bytes):
            parts = dict(fields_of(value))
            name, raw = parts.get(_TENSOR_NAME), parts.get(_RAW_DATA)
            short = isinstance(raw, bytes) and len(raw) <= _LONGEST_CONSTANT and len(raw) % 8 == 0
            if parts.get(_DATA_TYPE) == _INT64 and short and isinstance(name, bytes) and isinstance(raw, bytes):
                found[name] = struct.unpack(f"<{len(raw) // 8}q", raw)
    return found


def sources(node: Node | None, operator: str, count: int, **numbers: int) -> Sequence[Node | None] | None:
    """Returns the sources of a node with this operator, this number of inputs and exactly these attributes; None for another node."""
    wanted = {name.encode(): number for name, number in numbers.items()}
    fits = node is not None and node.operator == operator and len(node.inputs) == count and node.numbers == wanted
    return node.sources if fits and node is not None else None
