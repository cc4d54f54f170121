"""Puts the project's own operator in the place of MatMulNBits in a graph, before onnxruntime reads it.

Only the operator's name and domain change: inputs, attributes and weights are the same, so every bundle gains, old ones too. Nodes with
zero points, or with blocks that do not fill their rows, stay as they are. Field numbers: onnx/onnx.proto.
"""

from __future__ import annotations

from edge_devices.files.protobuf_wire import bytes_field, fields_of, whole_fields_of
from edge_runtime.bundle.onnx_graph import CONTRIB

DOMAIN, OPERATOR, STOCK = "edge.mtp", "MatMulRows", "MatMulNBits"
_BITS, _BLOCKS = {2, 4, 8}, {16, 32, 64, 128}
# ModelProto.graph and opset_import; GraphProto.node; NodeProto.input, op_type, attribute and domain; AttributeProto.name, i and g.
_GRAPH, _OPSET = 7, 8
_NODE = 1
_INPUT, _OP_TYPE, _ATTRIBUTE, _OP_DOMAIN = 1, 4, 5, 7
_NAME, _INTEGER, _SUBGRAPH = 1, 3, 6
# OperatorSetIdProto: this domain in version 1.
_OPSET_OF_DOMAIN = bytes_field(1, DOMAIN.encode()) + b"\x10\x01"


def with_row_kernels(model: bytes) -> tuple[bytes, int]:
    """Returns the model with the operator, and how many nodes have it. `model` has passed `check_onnx`."""
    out, replaced = bytearray(), 0
    for number, value, whole in whole_fields_of(model):
        if number == _GRAPH and isinstance(value, bytes):
            graph, replaced = _graph(value)
            out += bytes_field(_GRAPH, graph)
        else:
            out += whole
    if replaced:
        out += bytes_field(_OPSET, _OPSET_OF_DOMAIN)
    return bytes(out), replaced


def _graph(graph: bytes) -> tuple[bytes, int]:
    out, replaced = bytearray(), 0
    for number, value, whole in whole_fields_of(graph):
        if number == _NODE and isinstance(value, bytes):
            node, count = _node(value)
            replaced += count
            out += bytes_field(_NODE, node) if count else whole
        else:
            out += whole
    return bytes(out), replaced


def _node(node: bytes) -> tuple[bytes, int]:
    if _fits(node):
        out = bytearray()
        for number, _, whole in whole_fields_of(node):
            if number not in (_OP_TYPE, _OP_DOMAIN):
                out += whole
        return bytes(out) + bytes_field(_OP_TYPE, OPERATOR.encode()) + bytes_field(_OP_DOMAIN, DOMAIN.encode()), 1
    out, replaced = bytearray(), 0
    for number, value, whole in whole_fields_of(node):
        if number == _ATTRIBUTE and isinstance(value, bytes):
            attribute, count = _attribute(value)
            replaced += count
            out += bytes_field(_ATTRIBUTE, attribute) if count else whole
        else:
            out += whole
    return bytes(out), replaced


def _attribute(attribute: bytes) -> tuple[bytes, int]:
    """Goes into the body of a Loop or a branch of an If."""
    out, replaced = bytearray(), 0
    for number, value, whole in whole_fields_of(attribute):
        if number == _SUBGRAPH and isinstance(value, bytes):
            graph, count = _graph(value)
            replaced += count
            out += bytes_field(_SUBGRAPH, graph)
        else:
            out += whole
    return bytes(out), replaced


def _fits(node: bytes) -> bool:
    """Whether this is a product that the kernels take: three inputs, so no zero points, and whole blocks."""
    names: dict[int, list[bytes]] = {_INPUT: [], _OP_TYPE: [], _OP_DOMAIN: [], _ATTRIBUTE: []}
    for number, value in fields_of(node):
        if number in names and isinstance(value, bytes):
            names[number].append(value)
    if names[_OP_TYPE] != [STOCK.encode()] or names[_OP_DOMAIN] != [CONTRIB.encode()] or len(names[_INPUT]) != 3:
        return False
    numbers = dict(map(_integer, names[_ATTRIBUTE]))
    block = numbers.get(b"block_size", 0)
    return numbers.get(b"bits") in _BITS and block in _BLOCKS and numbers.get(b"K", 1) % block == 0


def _integer(attribute: bytes) -> tuple[bytes, int]:
    name, integer = b"", 0
    for number, value in fields_of(attribute):
        if number == _NAME and isinstance(value, bytes):
            name = value
        elif number == _INTEGER and isinstance(value, int):
            integer = value
    return name, integer
