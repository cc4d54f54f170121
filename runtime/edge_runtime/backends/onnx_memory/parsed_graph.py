"""The nodes, constants and input shapes of an ONNX file that passed `check_onnx`. Field numbers: onnx/onnx.proto.

Names stay bytes: two that are no UTF-8 must not become one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from edge_devices.files.protobuf_wire import fields_of, varints

_INT64 = 7
# More elements are no shape.
_MOST_ITEMS = 64


@dataclass(frozen=True, slots=True)
class Tensor:
    """A constant of the graph; `items` are its elements if it is a short list of int64, which may be a shape."""

    shape: tuple[int, ...]
    items: tuple[int, ...] | None


@dataclass
class Body:
    """A graph: the file's own, a branch of an If or the body of a Loop. A size of an input is None if it is known at run time only."""

    nodes: list[Node] = field(default_factory=list)
    constants: dict[bytes, Tensor] = field(default_factory=dict)
    inputs: dict[bytes, tuple[int | None, ...]] = field(default_factory=dict)
    outputs: list[bytes] = field(default_factory=list)

    @cached_property
    def names(self) -> frozenset[bytes]:
        """All names that nodes here and in graphs inside read."""
        inner = {name for node in self.nodes for body in node.bodies.values() for name in (*body.names, *body.outputs)}
        return frozenset({name for node in self.nodes for name in node.inputs} | inner)


@dataclass
class Node:
    """An operator. `bodies` are its graphs by attribute name: `body`, `then_branch` and `else_branch`."""

    operator: str = ""
    inputs: list[bytes] = field(default_factory=list)
    outputs: list[bytes] = field(default_factory=list)
    integers: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    bodies: dict[bytes, Body] = field(default_factory=dict)

    def integer(self, name: bytes, default: int) -> int:
        """An attribute."""
        found = self.integers.get(name)
        return found[0] if found else default


def parse_graph(data: bytes) -> Body:
    """Parses a model that passed `check_onnx`."""
    graphs = [value for number, value in fields_of(memoryview(data)) if number == 7]
    return _body(_message(graphs[-1]))


def _body(message: memoryview) -> Body:
    body = Body()
    for number, value in fields_of(message):
        if number == 1:
            body.nodes.append(_node(_message(value)))
        elif number == 5:
            name, tensor = _tensor(_message(value))
            body.constants[name] = tensor
        elif number == 11:
            name, shape = _value_info(_message(value))
            body.inputs[name] = shape
        elif number == 12:
            body.outputs.append(_value_info(_message(value))[0])
    return body


def _node(message: memoryview) -> Node:
    node = Node()
    for number, value in fields_of(message):
        if number == 1:
            node.inputs.append(bytes(_message(value)))
        elif number == 2:
            node.outputs.append(bytes(_message(value)))
        elif number == 4:
            node.operator = bytes(_message(value)).decode("utf-8", "replace")
        elif number == 5:
            _attribute(_message(value), node)
    return node


def _attribute(message: memoryview, node: Node) -> None:
    name, integers = b"", []
    for number, value in fields_of(message):
        if number == 1:
            name = bytes(_message(value))
        elif number in (3, 8):
            integers += _integers(value)
        elif number == 6:
            node.bodies[name] = _body(_message(value))
    node.integers[name] = tuple(integers)


def _tensor(message: memoryview) -> tuple[bytes, Tensor]:
    name, dims, kind, raw = b"", list[int](), 0, None
    for number, value in fields_of(message):
        if number == 1:
            dims += _integers(value)
        elif number == 2 and isinstance(value, int):
            kind = value
        elif number == 8:
            name = bytes(_message(value))
        elif number == 9:
            raw = _message(value)
    short = raw is not None and kind == _INT64 and len(raw) <= 8 * _MOST_ITEMS
    items = tuple(number for (number,) in struct.iter_unpack("<q", raw)) if short and raw is not None else None
    return name, Tensor(tuple(dims), items)


def _value_info(message: memoryview) -> tuple[bytes, tuple[int | None, ...]]:
    """Name and shape: of ValueInfoProto the type, of it the tensor's type, of it the shape."""
    name, shape = b"", list[int | None]()
    for number, value in fields_of(message):
        if number == 1:
            name = bytes(_message(value))
        elif number == 2:
            for dimension in _inside(_message(value), (1, 2, 1)):
                sizes = [size for number, size in fields_of(dimension) if number == 1 and isinstance(size, int)]
                shape.append(sizes[-1] if sizes else None)
    return name, tuple(shape)


def _inside(message: memoryview, path: tuple[int, ...]) -> Iterator[memoryview]:
    for number, value in fields_of(message):
        if number == path[0]:
            if len(path) == 1:
                yield _message(value)
            else:
                yield from _inside(_message(value), path[1:])


def _integers(value: int | memoryview) -> list[int]:
    """One integer or a packed list, as signed numbers."""
    return [number - (1 << 64) if number >> 63 else number for number in ([value] if isinstance(value, int) else varints(value))]


def _message(value: int | memoryview) -> memoryview:
    return value if isinstance(value, memoryview) else memoryview(b"")
