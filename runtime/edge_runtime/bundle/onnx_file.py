"""Reads ONNX files: a graph's nodes, tensors, inputs, outputs and functions. Needs no library.

Files may be hostile: fields that the exporter does not write are refused, and the length of each list is limited before memory is allocated
for it. Names stay bytes, because decoding could make two different names that are not UTF-8 equal. Field numbers: onnx/onnx.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from edge_devices.files.protobuf_wire import fields_of, varints

# The graph itself is small, because weights are in another file: 58 kB for 8 layers; some 8 MB and 900,000 fields for 128 experts in each
# of 30 layers.
MAX_GRAPH_BYTES = 16 << 20
MAX_FIELDS = 2_000_000
# The most fields of a node, tensor or attribute, and the most inputs of a graph.
MAX_PARTS = 4096
MAX_DIMENSIONS = 16
_MAX_DEPTH = 16
# A constant with more elements is not read as a shape.
_MAX_CONSTANT = 64
LARGEST = 1 << 62
INT64 = 7  # of TensorProto.DataType
_EXTERNAL = 1
# Field numbers by message. Fields that are not listed (sparse tensors, attributes that a function passes on, descriptions) are refused.
_GRAPH_OF_MODEL, _OPSETS, _FUNCTIONS = 7, 8, 25
_NODE, _TENSOR, _INPUT, _OUTPUT = 1, 5, 11, 12
_OPERATOR, _ATTRIBUTE, _DOMAIN, _OVERLOAD = 4, 5, 7, 8
_VALUE, _SUBGRAPH = 5, 6
_FUNCTION_NAME, _FUNCTION_INPUT, _FUNCTION_OUTPUT, _FUNCTION_NODE, _FUNCTION_DOMAIN, _FUNCTION_OVERLOAD = 1, 4, 5, 7, 10, 13
# Fields of an attribute for its value; it may have only one of them. A list of integers is in another field.
_SINGLE = {2, 3, 4, _VALUE, _SUBGRAPH}
_KNOWN = {
    "model": {1, 2, _GRAPH_OF_MODEL, _OPSETS, _FUNCTIONS},
    "function": {_FUNCTION_NAME, _FUNCTION_INPUT, _FUNCTION_OUTPUT, 6, _FUNCTION_NODE, 9, _FUNCTION_DOMAIN, _FUNCTION_OVERLOAD},
    "graph": {_NODE, 2, _TENSOR, _INPUT, _OUTPUT},
    "node": {1, 2, 3, _OPERATOR, _ATTRIBUTE, _DOMAIN, _OVERLOAD},
    "attribute": {1, 2, 3, 4, _VALUE, _SUBGRAPH, 8, 20},
    "tensor": {1, 2, 8, 9, 13, 14},
    "value": {1, 2},
}

# The only operator in functions that may have a tensor as an attribute.
_CONSTANT = "Constant"

Field = tuple[int, int | memoryview]
# The domain, name and overload of the operator or function that a node calls.
FunctionName = tuple[str, str, str]


class UnsoundGraphError(ValueError):
    """Says what is wrong with a graph. The message does not name the file."""


@dataclass(slots=True)
class Tensor:
    """A constant of a graph: its bytes (`raw`), or the entries that say in which file they are (`external`)."""

    name: bytes
    type: int
    shape: tuple[int, ...]
    raw: memoryview | None
    external: dict[str, str] | None

    @property
    def integers(self) -> tuple[int, ...] | None:
        """The elements of a short int64 list, which may be a shape; None for another tensor."""
        if self.raw is None or self.type != INT64 or len(self.raw) > 8 * _MAX_CONSTANT or len(self.raw) % 8:
            return None
        return struct.unpack(f"<{len(self.raw) // 8}q", self.raw)


@dataclass(slots=True)
class GraphValue:
    """An input or output of a graph. A size is None if it is known only at run time."""

    name: bytes
    shape: tuple[int | None, ...]
    output: bool


@dataclass(slots=True)
class Attribute:
    """A node's attribute. One of `number`, `integers`, `tensor` and `graph` is its value; a single integer is in the first two."""

    name: bytes = b""
    number: float | None = None
    integers: tuple[int, ...] = ()
    tensor: Tensor | None = None
    graph: memoryview | None = None


@dataclass(slots=True)
class Node:
    """An operator with the names of its inputs and outputs.

    `graphs` are the graphs inside it, by attribute (`body`, `then_branch`, `else_branch`); only `read_graph` fills them in.
    """

    operator: str = ""
    inputs: list[bytes] = field(default_factory=list)
    outputs: list[bytes] = field(default_factory=list)
    attributes: list[Attribute] = field(default_factory=list)
    domain: str = ""
    overload: str = ""
    graphs: dict[bytes, OnnxGraph] = field(default_factory=dict)

    @property
    def function(self) -> FunctionName:
        """The name of the function that it calls, if the file has such a function."""
        return self.domain, self.operator, self.overload

    @property
    def numbers(self) -> dict[bytes, float]:
        """The attributes by name; 0 for those that are not numbers."""
        return {attribute.name: attribute.number or 0 for attribute in self.attributes}

    def integers(self, name: bytes) -> tuple[int, ...] | None:
        """Returns an attribute that is a list of integers, or a single one; None if it is missing."""
        return next((attribute.integers for attribute in self.attributes if attribute.name == name), None)

    def integer(self, name: bytes, default: int) -> int:
        """Returns an attribute that is an integer, or `default`."""
        return (self.integers(name) or (default,))[0]

    @property
    def names_within(self) -> set[bytes]:
        """The names that the graphs inside it read or output."""
        return {name for graph in self.graphs.values() for name in graph.names}


@dataclass
class OnnxGraph:
    """A file's graph, a branch of an If, the body of a Loop, or a function. `functions` are those of the file.

    The inputs of a function have no shapes of their own, but those of the values that it is called with.
    """

    nodes: list[Node] = field(default_factory=list)
    constants: dict[bytes, Tensor] = field(default_factory=dict)
    inputs: dict[bytes, tuple[int | None, ...]] = field(default_factory=dict)
    outputs: list[bytes] = field(default_factory=list)
    functions: dict[FunctionName, OnnxGraph] = field(default_factory=dict)

    @cached_property
    def names(self) -> frozenset[bytes]:
        """The names of the outputs, and all names that nodes read, here and in graphs inside."""
        inner = {name for node in self.nodes for name in node.names_within}
        return frozenset({name for node in self.nodes for name in node.inputs} | inner | set(self.outputs))


def read_graph(model: bytes) -> OnnxGraph:
    """Returns a model's graph, with the graphs inside it. Raises UnsoundGraphError, WireError."""
    reader = GraphReader()
    graph = _tree(reader, reader.graph_of(memoryview(model)), 1)
    graph.functions = dict(map(reader.function, reader.functions))
    return graph


def _tree(reader: GraphReader, message: memoryview, depth: int) -> OnnxGraph:
    graph = OnnxGraph()
    for part in reader.parts(message, depth):
        if isinstance(part, Node):
            part.graphs = {inner.name: _tree(reader, inner.graph, depth + 1) for inner in part.attributes if inner.graph is not None}
            graph.nodes.append(part)
        elif isinstance(part, Tensor):
            graph.constants[part.name] = part
        elif part.output:
            graph.outputs.append(part.name)
        else:
            graph.inputs[part.name] = part.shape
    return graph


class GraphReader:
    """Reads the messages of one file."""

    def __init__(self) -> None:
        self._fields_left = MAX_FIELDS
        # The messages of the model's functions.
        self.functions: list[memoryview] = []

    def graph_of(self, model: memoryview) -> memoryview:
        """Returns the message of a model's graph, and stores those of its functions. Raises UnsoundGraphError, WireError."""
        graph = None
        for number, value in self._fields("model", model):
            if number == _GRAPH_OF_MODEL:
                if graph is not None:
                    raise UnsoundGraphError("it holds more than one graph")
                graph = _message(value)
            elif number == _FUNCTIONS:
                self.functions.append(_message(value))
                if len(self.functions) > MAX_PARTS:
                    raise UnsoundGraphError(f"it has more than {MAX_PARTS} functions")
        if graph is None:
            raise UnsoundGraphError("it holds no graph")
        return graph

    def function(self, message: memoryview) -> tuple[FunctionName, OnnxGraph]:
        """Returns a function's name and body, with Constant nodes read as constants. Raises UnsoundGraphError, WireError."""
        body, texts = OnnxGraph(), dict.fromkeys((_FUNCTION_DOMAIN, _FUNCTION_NAME, _FUNCTION_OVERLOAD), "")
        for number, value in self._few("function", message):
            if number in texts:
                texts[number] = _text(value)
            elif number == _FUNCTION_INPUT:
                body.inputs[bytes(_message(value))] = ()
            elif number == _FUNCTION_OUTPUT:
                body.outputs.append(bytes(_message(value)))
            elif number == _FUNCTION_NODE:
                node = self._node(_message(value))
                if node.operator == _CONSTANT and not node.domain:
                    body.constants[_only_name(node)] = _only_tensor(node)
                else:
                    body.nodes.append(node)
        domain, name, overload = texts.values()
        return (domain, name, overload), body

    def parts(self, graph: memoryview, depth: int) -> Iterator[Node | Tensor | GraphValue]:
        """Yields the parts of a graph, one at a time. `depth` is 1 for the outermost graph. Raises UnsoundGraphError, WireError."""
        if depth > _MAX_DEPTH:
            raise UnsoundGraphError(f"graphs are nested more than {_MAX_DEPTH} deep")
        for number, value in self._fields("graph", graph):
            if number == _NODE:
                yield self._node(_message(value))
            elif number == _TENSOR:
                yield self._tensor(_message(value))
            elif number in (_INPUT, _OUTPUT):
                yield self._value(_message(value), output=number == _OUTPUT)

    def _fields(self, kind: str, message: memoryview) -> Iterator[Field]:
        known = _KNOWN[kind]
        for number, value in fields_of(message):
            self._fields_left -= 1
            if self._fields_left < 0:
                raise UnsoundGraphError(f"it has more than {MAX_FIELDS} fields")
            if number not in known:
                raise UnsoundGraphError(f"field {number} of a {kind} is none that this runtime knows")
            yield number, value

    def _few(self, kind: str, message: memoryview) -> list[Field]:
        return _limited(self._fields(kind, message), kind)

    def _node(self, message: memoryview) -> Node:
        node = Node()
        names = {1: node.inputs, 2: node.outputs}
        for number, value in self._few("node", message):
            if number in names:
                names[number].append(bytes(_message(value)))
            elif number == _OPERATOR:
                node.operator = _text(value)
            elif number == _DOMAIN:
                node.domain = _text(value)
            elif number == _OVERLOAD:
                node.overload = _text(value)
            elif number == _ATTRIBUTE:
                node.attributes.append(self._attribute(_message(value)))
        return node

    def _attribute(self, message: memoryview) -> Attribute:
        attribute, integers, values = Attribute(), list[int](), 0
        for number, value in self._few("attribute", message):
            values += number in _SINGLE
            if number == 1:
                attribute.name = bytes(_message(value))
            elif number == 2 and isinstance(value, memoryview) and len(value) == 4:
                (attribute.number,) = struct.unpack("<f", value)
            elif number == 3:
                attribute.number = _signed(_number(value))
                integers.append(attribute.number)
            elif number == _VALUE:
                attribute.tensor = self._tensor(_message(value))
            elif number == _SUBGRAPH:
                attribute.graph = _message(value)
            elif number == 8:
                integers += map(_signed, _integers(value, MAX_PARTS))
        if values > 1 or (values and len(integers) > 1) or len(integers) > MAX_PARTS:
            raise UnsoundGraphError(f"an attribute holds more than one value, or more than {MAX_PARTS} integers")
        attribute.integers = tuple(integers)
        return attribute

    def _tensor(self, message: memoryview) -> Tensor:
        fields = self._few("tensor", message)
        last = dict(fields)
        raw = [value for number, value in fields if number == 9]
        sizes = [size for number, value in fields if number == 1 for size in _integers(value, MAX_DIMENSIONS)]
        if len(sizes) > MAX_DIMENSIONS or any(size > LARGEST for size in sizes):  # read as unsigned, negative sizes are huge
            raise UnsoundGraphError("a tensor has a shape that none can have")
        external = dict(_entry(_message(value)) for number, value in fields if number == 13)
        return Tensor(
            name=bytes(_message(last.get(8, memoryview(b"")))),
            type=_number(last.get(2, 0)),
            shape=tuple(sizes),
            raw=_message(raw[0]) if len(raw) == 1 else None,
            external=external if _number(last.get(14, 0)) == _EXTERNAL else None,
        )

    def _value(self, message: memoryview, *, output: bool) -> GraphValue:
        """Reads a ValueInfoProto; the dimensions are nested in it as type, tensor_type, shape, dim."""
        fields = self._few("value", message)
        types = [_message(value) for number, value in fields if number == 2]
        shape = []
        for dimension in islice(_inside(types, (1, 2, 1)), MAX_DIMENSIONS + 1):
            sizes = [size for number, size in _limited(fields_of(dimension), "dimension") if number == 1 and isinstance(size, int)]
            shape.append(_signed(sizes[-1]) if sizes else None)
        return GraphValue(bytes(_message(dict(fields).get(1, memoryview(b"")))), tuple(shape), output)


def _only_name(constant: Node) -> bytes:
    if len(constant.outputs) != 1:
        raise UnsoundGraphError("a Constant gives something else than one value")
    return constant.outputs[0]


def _only_tensor(constant: Node) -> Tensor:
    tensors = [attribute.tensor for attribute in constant.attributes]
    if len(tensors) != 1 or tensors[0] is None:
        raise UnsoundGraphError("a Constant of a function is none of one tensor")
    return tensors[0]


def _limited(fields: Iterable[Field], kind: str) -> list[Field]:
    """Returns the fields of a small message as a list."""
    few = list(islice(fields, MAX_PARTS + 1))
    if len(few) > MAX_PARTS:
        raise UnsoundGraphError(f"a {kind} has more than {MAX_PARTS} fields")
    return few


def _entry(message: memoryview) -> tuple[str, str]:
    """Returns the key and value of an entry that says where an external tensor is."""
    entry = dict(_limited(fields_of(message), "entry"))
    return _text(entry.get(1, memoryview(b""))), _text(entry.get(2, memoryview(b"")))


def _inside(messages: Iterable[memoryview], path: tuple[int, ...]) -> Iterator[memoryview]:
    """Yields the messages that are nested in `messages` along a path of field numbers."""
    for message in messages:
        inner = (_message(value) for number, value in fields_of(message) if number == path[0])
        yield from inner if len(path) == 1 else _inside(inner, path[1:])


def _integers(value: int | memoryview, max_count: int) -> list[int]:
    """Returns one unsigned integer, or those of a packed list, at most `max_count` + 1 of them."""
    return [value] if isinstance(value, int) else list(islice(varints(value), max_count + 1))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise UnsoundGraphError("a number stands where a text or a message belongs")
    return value


def _number(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise UnsoundGraphError("a text stands where a number belongs")
    return value


def _text(value: int | memoryview) -> str:
    return bytes(_message(value)).decode("utf-8", "replace")
