"""Upper bounds of the shapes that operators give, for all operators that `check_onnx` admits.

Sizes that depend on values (NonZero, Slice, a Split by computed sizes) are taken as the largest possible ones. Rules: the operators'
specifications, onnx/docs/Operators.md and onnxruntime/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from edge_runtime.backends.onnx_memory.parsed_graph import Node

Shape = tuple[int, ...]
_MOST_DIMENSIONS = 16


class ShapeError(Exception):
    """A shape that no sound graph has, without the file's name."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: its largest shape, and its elements where they are a known shape.

    `constant`: nothing but constants makes it. `placed`: it lies in an array that is there already, so it takes nothing.
    """

    shape: Shape
    items: tuple[int, ...] | None = None
    constant: bool = False
    wide: bool = False
    placed: bool = False

    @property
    def bytes(self) -> int:
        """Eight bytes an element where it may be an int64, otherwise four, which float32 and int32 take."""
        return 0 if self.placed else prod(self.shape) * (8 if self.wide else 4)


Rule = Callable[[Node, Sequence[Value]], list[Shape]]
# What gives int64 itself.
_WIDE = frozenset({"ArgMax", "NonZero", "Shape", "TopK"})
# TensorProto.DataType of 8 bytes and more: int64, double, uint64, complex.
_WIDE_TYPES = (7, 11, 13, 14, 15)


def output_values(node: Node, inputs: Sequence[Value]) -> list[Value]:
    """Returns the largest outputs of a node without graphs inside. Raises ShapeError."""
    rule = RULES.get(node.operator)
    if rule is None:
        raise ShapeError(f"the operator {node.operator[:40]!r} has no known shape")
    try:
        shapes = rule(node, inputs)
    except (IndexError, ZeroDivisionError, ValueError) as error:
        raise ShapeError(f"{node.operator} does not fit its inputs") from error
    if any(len(shape) > _MOST_DIMENSIONS or min(shape, default=0) < 0 for shape in shapes):
        raise ShapeError(f"{node.operator} gives a shape that none can have")
    # Dequantized weights stay as they are stored until their product needs them.
    constant = node.operator != "DequantizeLinear" and all(value.constant for value in inputs)
    wide = node.operator in _WIDE or any(value.wide for value in inputs[: 2 if node.operator == "Where" else 1])
    if node.operator == "Cast":
        wide = node.integer(b"to", 1) in _WIDE_TYPES
    buffers = (1, 2) if node.operator == "GroupQueryAttention" else ()  # where the presents are written
    items = _items(node, inputs)
    return [Value(shape, items, constant, wide, place in buffers) for place, shape in enumerate(shapes)]


def _items(node: Node, inputs: Sequence[Value]) -> tuple[int, ...] | None:
    """The elements of what is a shape or a part of one."""
    if node.operator == "Shape":
        sizes = inputs[0].shape
        return sizes[slice(node.integer(b"start", 0), node.integer(b"end", len(sizes)))]
    if node.operator == "Concat" and all(value.items is not None for value in inputs):
        return tuple(size for value in inputs for size in value.items or ())
    return inputs[0].items if node.operator in ("Cast", "Identity") and inputs else None


def _first(_: Node, inputs: Sequence[Value]) -> list[Shape]:
    return [inputs[0].shape]


def broadcast(*shapes: Shape) -> Shape:
    """Returns the common shape of operands."""
    length = max(map(len, shapes))
    aligned = [(1,) * (length - len(shape)) + shape for shape in shapes]
    return tuple(0 if 0 in sizes else max(sizes) for sizes in zip(*aligned, strict=True))


def _broadcast(_: Node, inputs: Sequence[Value]) -> list[Shape]:
    return [broadcast(*(value.shape for value in inputs))]


def _axis(node: Node, shape: Shape, default: int) -> int:
    axis = node.integer(b"axis", default)
    if not -len(shape) <= axis < max(1, len(shape)):
        raise ShapeError(f"{node.operator} along the axis {axis} of {len(shape)}")
    return axis % len(shape) if shape else 0


def _reduce(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    shape = inputs[0].shape
    axes = node.integers.get(b"axes")
    if node.operator == "ArgMax":
        axes = (node.integer(b"axis", 0),)
    elif axes is None:
        axes = (inputs[1].items if len(inputs) > 1 else None) or tuple(range(len(shape)))
    reduced = {axis % len(shape) for axis in axes} if shape else set()
    keep = node.integer(b"keepdims", 1)
    return [tuple(1 if axis in reduced else size for axis, size in enumerate(shape) if keep or axis not in reduced)]


def _concat(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    shapes = [value.shape for value in inputs]
    axis = _axis(node, shapes[0], 0)
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        raise ShapeError("Concat of tensors with different numbers of dimensions")
    return [tuple(sum(sizes) if at == axis else max(sizes) for at, sizes in enumerate(zip(*shapes, strict=True)))]


def _expand(_: Node, inputs: Sequence[Value]) -> list[Shape]:
    if inputs[1].items is None:
        raise ShapeError("an Expand by a shape that is not known beforehand")
    return [broadcast(inputs[0].shape, inputs[1].items)]


def _flatten(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    axis = node.integer(b"axis", 1)
    return [(prod(inputs[0].shape[:axis]), prod(inputs[0].shape[axis:]))]


def _gather(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    shape = inputs[0].shape
    axis = _axis(node, shape, 0)
    return [shape[:axis] + inputs[1].shape + shape[axis + 1 :]]


def _gather_blocks(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    shape = inputs[0].shape
    # Elements of less than 8 bits are packed along the last axis.
    return [inputs[1].shape + shape[1:-1] + (shape[-1] * (8 // min(8, max(1, node.integer(b"bits", 4)))),)]


def _matmul(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    left, right = inputs[0].shape, inputs[1].shape
    if len(left) < 2 or len(right) < 2 or any(node.integer(name, 0) for name in (b"transBatchA", b"transBatchB")):
        raise ShapeError(f"{node.operator} of {list(left)} and {list(right)}")
    rows = left[-1] if node.integer(b"transA", 0) else left[-2]
    columns = right[-2] if node.integer(b"transB", 0) else right[-1]
    return [(*broadcast(left[:-2], right[:-2]), rows, columns)]


def _matmul_blocks(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    return [(*inputs[0].shape[:-1], node.integer(b"N", 0))]


def _reshape(_: Node, inputs: Sequence[Value]) -> list[Shape]:
    wanted = inputs[1].items
    if wanted is None:
        raise ShapeError("a Reshape to a shape that is not known beforehand")
    shape = inputs[0].shape
    sizes = [shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
    known = prod(size for size in sizes if size != -1)
    return [tuple(-(-prod(shape) // max(1, known)) if size == -1 else size for size in sizes)]


def _slice(_: Node, inputs: Sequence[Value]) -> list[Shape]:
    """A positive range with constant ends is as long as it says at most; another may be all of the input."""
    shape = list(inputs[0].shape)
    starts, ends, axes = (value.items for value in (*inputs[1:4], *[Value((), ())] * (4 - len(inputs[:4]))))
    for start, end, axis in zip(starts or (), ends or (), axes or (), strict=False):
        if 0 <= start <= end:
            shape[axis] = min(shape[axis], end - start)
    return [tuple(shape)]


def _split(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    shape = inputs[0].shape
    axis, count = _axis(node, shape, 0), len(node.outputs)
    even = -(-shape[axis] // count)  # the last piece may be smaller
    sizes = inputs[1].items if len(inputs) > 1 else (even,) * (count - 1) + (shape[axis] - even * (count - 1),)
    return [(*shape[:axis], min(shape[axis], size), *shape[axis + 1 :]) for size in sizes or (shape[axis],) * count]


def _squeeze(_: Node, inputs: Sequence[Value]) -> list[Shape]:
    shape = inputs[0].shape
    axes = inputs[1].items if len(inputs) > 1 else None
    gone = {axis % len(shape) for axis in axes} if axes and shape else {axis for axis, size in enumerate(shape) if size == 1}
    return [tuple(size for axis, size in enumerate(shape) if axis not in gone)]


def _top(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    shape = inputs[0].shape
    axis = _axis(node, shape, -1)
    most = inputs[1].items[0] if inputs[1].items else shape[axis]
    return [(*shape[:axis], min(most, shape[axis]), *shape[axis + 1 :])] * 2


def _transpose(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    shape = inputs[0].shape
    order = node.integers.get(b"perm", tuple(reversed(range(len(shape)))))
    if sorted(order) != list(range(len(shape))):
        raise ShapeError(f"Transpose of {len(shape)} dimensions by {list(order)[:20]}")
    return [tuple(shape[axis] for axis in order)]


def _convolution(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    batch, _, *sizes = inputs[0].shape
    outputs, _, *kernel = inputs[1].shape
    pads = node.integers.get(b"pads", (0,) * (2 * len(sizes)))
    strides = node.integers.get(b"strides", (1,) * len(sizes))
    places = [
        max(0, (size + pads[axis] + pads[axis + len(sizes)] - kernel[axis]) // max(1, strides[axis]) + 1) for axis, size in enumerate(sizes)
    ]
    return [(batch, outputs, *places)]


def _attention(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    """Beside the outputs there are the scores, the last shape here."""
    _, rows, _ = inputs[0].shape
    return [inputs[0].shape, inputs[3].shape, inputs[4].shape, (max(1, node.integer(b"num_heads", 1)), rows, inputs[3].shape[2])]


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("Abs", "Cast", "DequantizeLinear", "Exp", "Gelu", "Identity", "QuantizeLinear", "RMSNormalization", "Reciprocal"), _first
    ),
    **dict.fromkeys(("Clip", "LayerNormalization", "MultiHeadAttention", "Relu", "Round", "Sigmoid"), _first),
    **dict.fromkeys(("RotaryEmbedding", "ScatterElements", "ScatterND", "Softmax", "Sqrt", "Tanh"), _first),
    **dict.fromkeys(("Add", "Div", "Greater", "GreaterOrEqual", "Mul", "Sub", "Where"), _broadcast),
    **dict.fromkeys(("ArgMax", "ReduceMax", "ReduceMean", "ReduceSum"), _reduce),
    **dict.fromkeys(("FusedMatMul", "MatMul", "MatMulInteger"), _matmul),
    "Concat": _concat,
    "Conv": _convolution,
    "DynamicQuantizeLinear": lambda _, inputs: [inputs[0].shape, (), ()],
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherBlockQuantized": _gather_blocks,
    "GroupQueryAttention": _attention,
    "MatMulNBits": _matmul_blocks,
    "NonZero": lambda _, inputs: [(len(inputs[0].shape), prod(inputs[0].shape))],
    "Reshape": _reshape,
    "Shape": lambda node, inputs: [(len(_items(node, inputs) or ()),)],
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "TopK": _top,
    "Transpose": _transpose,
}
