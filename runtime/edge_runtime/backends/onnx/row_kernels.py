"""Puts the project's own operator in the place of MatMulNBits in a graph, before onnxruntime reads it.

Only the operator's name and domain change: inputs, attributes and weights are the same, so every bundle gains, old ones too. Nodes with
zero points, or with blocks that do not fill their rows, stay as they are. Field numbers: onnx/onnx.proto.
"""

from __future__ import annotations

from collections.abc import Callable

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
    changed, replaced = _changed(model, _GRAPH, _graph)
    return changed + bytes_field(_OPSET, _OPSET_OF_DOMAIN) if replaced else model, replaced


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
