"""The change of a whole model: every bundle gains, old ones too."""

from __future__ import annotations

from collections.abc import Mapping

from edge_devices.files.protobuf_wire import bytes_field, whole_fields_of
from edge_runtime.backends.onnx.row_kernels.attention import attention_on_buffers, attention_on_rows
from edge_runtime.backends.onnx.row_kernels.gates import gated_rows
from edge_runtime.backends.onnx.row_kernels.messages import (
    ATTRIBUTE,
    DOMAIN,
    GRAPH,
    NODE,
    OPSET,
    SUBGRAPH,
    changed,
    constants_of,
    output_names,
    parse_node,
)
from edge_runtime.backends.onnx.row_kernels.products import with_products

# OperatorSetIdProto: this domain in version 1.
_OPSET_OF_DOMAIN = bytes_field(1, DOMAIN.encode()) + b"\x10\x01"


def with_row_kernels(model: bytes) -> tuple[bytes, int]:
    """Returns the model with the operators, and how many nodes have one. `model` has passed `check_onnx`."""
    replaced, products = changed(model, GRAPH, with_products)
    if not products:
        return model, 0
    replaced, others = changed(replaced, GRAPH, lambda graph: _joined(graph, {}))
    return replaced + bytes_field(OPSET, _OPSET_OF_DOMAIN), products + others


def _joined(graph: bytes, outer: Mapping[bytes, tuple[int, ...]]) -> tuple[bytes, int]:
    """Puts one operator in the place of several nodes, and drops what nobody reads any more; so in the graphs within.

    `outer` are the constants of the graphs around it.
    """
    constants = {**outer, **constants_of(graph)}
    graph, within = changed(
        graph, NODE, lambda node: changed(node, ATTRIBUTE, lambda one: changed(one, SUBGRAPH, lambda inner: _joined(inner, constants)))
    )
    fields = list(whole_fields_of(graph))
    nodes = {at: parse_node(value) for at, (number, value, _) in enumerate(fields) if number == NODE and isinstance(value, bytes)}
    makers = {name: node for node in nodes.values() for name in node.outputs}
    for node in nodes.values():
        node.sources = [makers.get(name) for name in node.inputs]
    joins = {at: attention_on_rows(node) or attention_on_buffers(node) or gated_rows(node, constants) for at, node in nodes.items()}
    found = {at: new for at, new in joins.items() if new is not None}
    if not found:
        return graph, within
    nodes |= found
    read = set(output_names(graph))
    kept: set[int] = set()
    for at in reversed(nodes):  # nodes stand in the order in which they run
        if not read.isdisjoint(nodes[at].outputs):
            kept.add(at)
            read.update(nodes[at].inputs, nodes[at].names_within())
    out = bytearray()
    for at, (_, _, whole) in enumerate(fields):
        if at in found:
            out += bytes_field(NODE, found[at].encoded())
        elif at in kept or at not in nodes:
            out += whole
    return bytes(out), within + len(found)
