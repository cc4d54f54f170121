"""MatMulNBits becomes MatMulRows, of which only name and domain differ: inputs, attributes and weights are the same.

Nodes with zero points, or with blocks that do not fill their rows, stay as they are.
"""

from __future__ import annotations

from edge_devices.files.protobuf_wire import bytes_field, fields_of, whole_fields_of
from edge_runtime.backends.onnx.row_kernels.messages import ATTRIBUTE, DOMAIN, INPUT, NODE, OP_DOMAIN, OP_TYPE, SUBGRAPH, changed, number_of
from edge_runtime.bundle.onnx_graph import CONTRIB

PRODUCT, STOCK_PRODUCT = "MatMulRows", "MatMulNBits"
_BITS, _BLOCKS = {2, 4, 8}, {16, 32, 64, 128}
# MatMulNBits, accuracy_level
_INT8_ACTIVATIONS = 4


def with_products(graph: bytes) -> tuple[bytes, int]:
    """Returns the graph, and those in it, with the operators, and how many."""
    return changed(graph, NODE, _node)


def _node(node: bytes) -> tuple[bytes, int]:
    if not _fits(node):
        return changed(node, ATTRIBUTE, _attribute)
    kept = b"".join(whole for number, _, whole in whole_fields_of(node) if number not in (OP_TYPE, OP_DOMAIN))
    return kept + bytes_field(OP_TYPE, PRODUCT.encode()) + bytes_field(OP_DOMAIN, DOMAIN.encode()), 1


def _attribute(attribute: bytes) -> tuple[bytes, int]:
    """Goes into the body of a Loop or a branch of an If."""
    return changed(attribute, SUBGRAPH, with_products)


def _fits(node: bytes) -> bool:
    """Whether this is a product that the kernels take: activations rounded to int8, no zero points (three inputs), whole blocks."""
    names: dict[int, list[bytes]] = {INPUT: [], OP_TYPE: [], OP_DOMAIN: [], ATTRIBUTE: []}
    for number, value in fields_of(node):
        if number in names and isinstance(value, bytes):
            names[number].append(value)
    if names[OP_TYPE] != [STOCK_PRODUCT.encode()] or names[OP_DOMAIN] != [CONTRIB.encode()] or len(names[INPUT]) != 3:
        return False
    numbers = dict(map(number_of, names[ATTRIBUTE]))
    block = numbers.get(b"block_size", 0)
    if numbers.get(b"accuracy_level", _INT8_ACTIVATIONS) != _INT8_ACTIVATIONS:
        return False
    return numbers.get(b"bits") in _BITS and block in _BLOCKS and numbers.get(b"K", 1) % block == 0
