"""The gated feed-forward, as `edge_export.onnx.graphs.blocks` writes it: the product with both halves, their split, GELU and the product of
the halves become one operator, so that neither half is written to memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from edge_runtime.backends.onnx.row_kernels.messages import Node, sources, text_of
from edge_runtime.backends.onnx.row_kernels.products import PRODUCT

GATED = "GatedRows"
# Outputs of both halves that a thread computes together.
_STEP = 128


def gated_rows(end: Node, constants: Mapping[bytes, tuple[int, ...]]) -> Node | None:
    """The operator, if `end` multiplies the halves. `constants` are the graph's, and those of the graphs around it."""
    gelu, values = sources(end, "Mul", 2) or (None, None)
    (gates,) = sources(gelu, "Gelu", 1, approximate=0) or (None,)
    product, _ = sources(gates, "Split", 2, axis=-1) or (None, None)
    if gelu is None or gates is None or gates is not values or product is None or product.operator != PRODUCT:
        return None
    if [gelu.inputs[0], end.inputs[1]] != gates.outputs or text_of(gelu.attributes[0]) != b"tanh":
        return None
    outputs = int(product.numbers.get(b"N", 1))
    if outputs % _STEP or constants.get(gates.inputs[1]) != (outputs // 2, outputs // 2):
        return None
    return Node(GATED, product.inputs, end.outputs, product.attributes)
