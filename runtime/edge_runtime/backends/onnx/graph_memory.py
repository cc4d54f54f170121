"""An upper bound of the memory that a graph's values take, computed from shapes before onnxruntime opens the graph.

Every operator that `check_onnx` admits has a rule for the shapes of its outputs. Where a shape depends on values (NonZero, Slice, a Split
by computed sizes), the largest possible one counts. The rules follow onnx/docs/Operators.md and onnxruntime/docs/ContribOperators.md. Why
onnxruntime's own limit (OrtArenaCfg.max_mem) is not enough: docs/design/onnx-graphs.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from edge_devices.errors import byte_text
from edge_devices.files.protobuf_wire import WireError
from edge_devices.machine.memory import address_space_left, available_memory_bytes
from edge_runtime.bundle.bundle import read_part
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.bundle.onnx_file import INT64, MAX_DIMENSIONS, MAX_GRAPH_BYTES, Node, OnnxGraph, UnsoundGraphError, read_graph
from edge_runtime.bundle.onnx_graph import shown, unsound
from edge_runtime.errors import BackendError

Shape = tuple[int, ...]
# The limit where the system does not say how much memory is available.
_UNKNOWN_LIMIT = 8 << 30
# Values of int64: these inputs, and the outputs of these operators.
_WIDE_INPUTS = {b"input_ids", b"position_ids", b"token", b"draft_length"}
_WIDE_OPERATORS = {"ArgMax", "NonZero", "Shape", "TopK"}
# The types in TensorProto.DataType of 8 bytes or more: int64, double, uint64, complex.
_WIDE_TYPES = {INT64, 11, 13, 14, 15}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: its largest possible shape, and its elements if they are known, which is needed for tensors that are shapes.

    `constant`: it depends on constants only. `wide`: it may be int64. `placed`: it is in an existing array, so it takes no more memory.
    """

    shape: Shape
    items: tuple[int, ...] | None = None
    constant: bool = False
    wide: bool = False
    placed: bool = False

    @property
    def bytes(self) -> int:
        """Eight bytes an element if it may be int64, else four, for float32 and int32."""
        return 0 if self.placed else prod(self.shape) * (8 if self.wide else 4)


def check_graph_memory(path: Path, *forwards: Mapping[str, Shape], beside: int = 0) -> int:
    """Returns the most bytes that values of the graph at `path` take in any of `forwards`, which map inputs to shapes.

    The graph has passed `check_onnx`. `beside` is the size in bytes of other arrays that exist at the same time. Raises BundleError if a
    shape cannot be computed, BackendError if both together exceed the available memory.
    """
    limits = available_memory_bytes() or _UNKNOWN_LIMIT, address_space_left()
    available = min(limit for limit in limits if limit is not None)
    data = read_part(path, MAX_GRAPH_BYTES, "graph")
    try:
        body = read_graph(data)
        return max(_Peak(available - beside).of_file(body, {name.encode(): shape for name, shape in shapes.items()}) for shapes in forwards)
    except (UnsoundGraphError, WireError) as error:
        raise unsound(path, error) from error
    except _TooMuchError as error:
        what = "values and the KV cache" if beside else "values"
        raise BackendError(
            f"{path.name} needs {byte_text(error.needed + beside)} or more for its {what}, {byte_text(available)} of memory are available;"
            " free some memory or ask for a shorter context"
        ) from error


class _TooMuchError(Exception):
    """The values need more memory than is available."""

    def __init__(self, needed: int) -> None:
        self.needed = needed


class _Peak:
    """Finds the peak of memory by following the nodes in their order: a value lives from its node to the last node that reads it.

    Values that depend on constants only are computed when the graph is opened, and live as long as the graph.
    """

    def __init__(self, available: int) -> None:
        self._available = available
        self._kept = 0
        self._peak = 0

    def of_file(self, body: OnnxGraph, shapes: Mapping[bytes, Shape]) -> int:
        """Returns the peak in bytes. Raises UnsoundGraphError, _TooMuchError."""
        self._functions = body.functions
        known: dict[bytes, Value] = {}
        for name, declared in body.inputs.items():
            runtime_shape = shapes.get(name, ())
            shape = tuple(runtime_shape[axis] if size is None and axis < len(runtime_shape) else size for axis, size in enumerate(declared))
            sizes = tuple(size for size in shape if size is not None and size >= 0)
            if len(sizes) < len(declared):
                raise UnsoundGraphError(f"the input {shown(name)} is none that the runtime gives")
            known[name] = Value(sizes, wide=name in _WIDE_INPUTS)
            if name not in shapes:  # the runtime allocates an array of the size that the graph states
                self._kept += known[name].bytes
        self._follow(body, known, 0)
        return self._peak

    def _follow(self, body: OnnxGraph, outer: Mapping[bytes, Value], held: int) -> dict[bytes, Value]:
        """Follows the nodes of a graph while `held` bytes are in use elsewhere; returns all its values."""
        known = dict(outer)
        for name, tensor in body.constants.items():
            known[name] = Value(tensor.shape, tensor.integers, constant=True, wide=tensor.type in _WIDE_TYPES)
        last = _last_readers(body)
        live = 0
        for place, node in enumerate(body.nodes):
            values = self._outputs(node, known, held + live)
            made = sum(value.bytes for value in values)
            self._take(held + live + made)
            for name, value in zip(node.outputs, values, strict=False):
                known[name] = value
                if value.constant:
                    self._kept += value.bytes
                elif last.get(name, -1) > place:
                    live += value.bytes
            for name in {name for name in (*node.inputs, *node.names_within) if last.get(name) == place}:
                if name not in outer and name not in body.constants and name in known and not known[name].constant:
                    live -= known[name].bytes
        return known

    def _take(self, held: int) -> None:
        self._peak = max(self._peak, self._kept + held)
        if self._peak > self._available:
            raise _TooMuchError(self._peak)

    def _outputs(self, node: Node, known: Mapping[bytes, Value], held: int) -> list[Value]:
        if node.graphs:
            return self._branches(node, known, held) if node.operator == "If" else self._loop(node, known, held)
        inputs = []
        for name in node.inputs:
            if name and name not in known:
                raise UnsoundGraphError(f"{node.operator[:40]} reads {shown(name)}, which nothing before it gives")
            inputs.append(known[name] if name else Value(()))
        while inputs and not node.inputs[len(inputs) - 1]:  # drops omitted inputs at the end
            inputs.pop()
        function = self._functions.get(node.function)
        return output_values(node, inputs) if function is None else self._called(node, function, inputs, held)

    def _called(self, node: Node, function: OnnxGraph, inputs: Sequence[Value], held: int) -> list[Value]:
        """Returns the outputs of a call of a function, which the kernel of its name may replace.

        Inside, the kernel needs less memory than the function; its outputs are checked not to be larger.
        """
        self._kept += sum(len(tensor.raw or b"") for tensor in function.constants.values())
        values = _outputs_of(function, self._follow(function, dict(zip(function.inputs, inputs, strict=False)), held))
        if node.operator in KERNEL_RULES:
            shapes = _shapes(KERNEL_RULES[node.operator], node, inputs)
            if any(prod(shape) > prod(value.shape) for shape, value in zip(shapes, values, strict=False)):
                raise UnsoundGraphError(f"the kernel of {node.operator} gives more than the function of that name")
        return values

    def _branches(self, node: Node, known: Mapping[bytes, Value], held: int) -> list[Value]:
        branches: list[list[Value]] = []
        for body in node.graphs.values():
            values = self._follow(body, known, held)
            branches.append(_outputs_of(body, values))
        return [max(pair, key=lambda value: value.bytes) for pair in zip(*branches, strict=False)]

    def _loop(self, node: Node, known: Mapping[bytes, Value], held: int) -> list[Value]:
        """Returns the outputs of a Loop. Carried values keep their size; collected ones grow with each of MAX_DRAFT_LENGTH iterations."""
        body = node.graphs.get(b"body")
        if body is None:
            raise UnsoundGraphError(f"{node.operator[:40]} has no graph 'body'")
        started = [known.get(name, Value(())) for name in node.inputs[2:]]
        own = dict(known)
        for name, value in zip(body.inputs, [Value(()), Value(()), *started], strict=False):
            own[name] = Value(value.shape, wide=True)
        ended = _outputs_of(body, self._follow(body, own, held + sum(value.bytes for value in started)))[1:]
        carried = ended[: len(started)]
        if any(prod(after.shape) > prod(before.shape) for before, after in zip(started, carried, strict=False)):
            raise UnsoundGraphError("a value of a Loop grows with each iteration")
        return [*carried, *(Value((MAX_DRAFT_LENGTH, *value.shape), wide=value.wide) for value in ended[len(started) :])]


def _outputs_of(body: OnnxGraph, known: Mapping[bytes, Value]) -> list[Value]:
    if missing := [name for name in body.outputs if name not in known]:
        raise UnsoundGraphError(f"the output {shown(missing[0])} is given by no node")
    return [known[name] for name in body.outputs]


def _last_readers(body: OnnxGraph) -> dict[bytes, int]:
    """Returns for each name the index of the last node that reads it; the graph's outputs are read after all nodes."""
    last = {name: place for place, node in enumerate(body.nodes) for name in (*node.inputs, *node.names_within)}
    return last | dict.fromkeys(body.outputs, len(body.nodes))


Rule = Callable[[Node, Sequence[Value]], list[Shape]]


def output_values(node: Node, inputs: Sequence[Value]) -> list[Value]:
    """Returns the largest possible outputs of a node without subgraphs. Raises UnsoundGraphError."""
    rule = RULES.get(node.operator)
    if rule is None:
        raise UnsoundGraphError(f"the operator {node.operator[:40]!r} has no known shape")
    shapes = _shapes(rule, node, inputs)
    # Quantized weights stay quantized until a product needs them, so their dequantized values are no constants kept in memory.
    constant = node.operator != "DequantizeLinear" and all(value.constant for value in inputs)
    wide = node.operator in _WIDE_OPERATORS or any(value.wide for value in inputs[: 2 if node.operator == "Where" else 1])
    if node.operator == "Cast":
        wide = node.integer(b"to", 1) in _WIDE_TYPES
    buffers = (1, 2) if node.operator == "GroupQueryAttention" else ()  # its present K and V are written into the cache's buffers
    items = _items(node, inputs)
    return [Value(shape, items, constant, wide, place in buffers) for place, shape in enumerate(shapes)]


def _shapes(rule: Rule, node: Node, inputs: Sequence[Value]) -> list[Shape]:
    try:
        shapes = rule(node, inputs)
    except UnsoundGraphError:
        raise
    except (IndexError, ZeroDivisionError, ValueError) as error:
        raise UnsoundGraphError(f"{node.operator} does not fit its inputs") from error
    if any(len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 for shape in shapes):
        raise UnsoundGraphError(f"{node.operator} gives a shape that none can have")
    return shapes


def _items(node: Node, inputs: Sequence[Value]) -> tuple[int, ...] | None:
    """Returns the elements of a value that is a shape or a part of one; None if they are unknown."""
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
        raise UnsoundGraphError(f"{node.operator} along the axis {axis} of {len(shape)}")
    return axis % len(shape) if shape else 0


def _reduce(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    shape = inputs[0].shape
    axes = node.integers(b"axes")
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
        raise UnsoundGraphError("Concat of tensors with different numbers of dimensions")
    return [tuple(sum(sizes) if at == axis else max(sizes) for at, sizes in enumerate(zip(*shapes, strict=True)))]


def _expand(_: Node, inputs: Sequence[Value]) -> list[Shape]:
    if inputs[1].items is None:
        raise UnsoundGraphError("an Expand by a shape that is not known beforehand")
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
    # Elements of fewer than 8 bits are packed along the last axis.
    return [inputs[1].shape + shape[1:-1] + (shape[-1] * (8 // min(8, max(1, node.integer(b"bits", 4)))),)]


def _matmul(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    left, right = inputs[0].shape, inputs[1].shape
    if len(left) < 2 or len(right) < 2 or any(node.integer(name, 0) for name in (b"transBatchA", b"transBatchB")):
        raise UnsoundGraphError(f"{node.operator} of {list(left)} and {list(right)}")
    rows = left[-1] if node.integer(b"transA", 0) else left[-2]
    columns = right[-2] if node.integer(b"transB", 0) else right[-1]
    return [(*broadcast(left[:-2], right[:-2]), rows, columns)]


def _matmul_blocks(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    return [(*inputs[0].shape[:-1], node.integer(b"N", 0))]


def _reshape(_: Node, inputs: Sequence[Value]) -> list[Shape]:
    new_shape = inputs[1].items
    if new_shape is None:
        raise UnsoundGraphError("a Reshape to a shape that is not known beforehand")
    shape = inputs[0].shape
    sizes = [shape[axis] if size == 0 else size for axis, size in enumerate(new_shape)]
    known = prod(size for size in sizes if size != -1)
    return [tuple(-(-prod(shape) // max(1, known)) if size == -1 else size for size in sizes)]


def _slice(_: Node, inputs: Sequence[Value]) -> list[Shape]:
    """A slice with constant, non-negative ends has at most their distance as its length; any other may be as large as the input."""
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
    count = inputs[1].items[0] if inputs[1].items else shape[axis]
    return [(*shape[:axis], min(count, shape[axis]), *shape[axis + 1 :])] * 2


def _transpose(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    shape = inputs[0].shape
    order = node.integers(b"perm") or tuple(reversed(range(len(shape))))
    if sorted(order) != list(range(len(shape))):
        raise UnsoundGraphError(f"Transpose of {len(shape)} dimensions by {list(order)[:20]}")
    return [tuple(shape[axis] for axis in order)]


def _convolution(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    batch, _, *sizes = inputs[0].shape
    outputs, _, *kernel = inputs[1].shape
    pads = node.integers(b"pads") or (0,) * (2 * len(sizes))
    strides = node.integers(b"strides") or (1,) * len(sizes)
    places = [
        max(0, (size + pads[axis] + pads[axis + len(sizes)] - kernel[axis]) // max(1, strides[axis]) + 1) for axis, size in enumerate(sizes)
    ]
    return [(batch, outputs, *places)]


def _attention(node: Node, inputs: Sequence[Value]) -> list[Shape]:
    """The last shape is that of the attention scores, which are no output but take memory."""
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
# Shapes of the outputs of the kernels that replace functions of these names.
KERNEL_RULES: dict[str, Rule] = {
    **dict.fromkeys(("MatMulRows", "MatMulCapRows", "MatMulStatic"), _matmul_blocks),
    **dict.fromkeys(("AttendBuffers", "ReadBuffers"), _attention),
    **dict.fromkeys(("AttendRows", "NormRows"), _first),
    "FeedForwardRows": lambda node, inputs: [(*inputs[0].shape[:-1], node.integer(b"second_N", 0))],
    "MatMulHalves": lambda _, inputs: [(*inputs[0].shape[:-1], inputs[1].shape[0])],
    "ResidualRows": lambda _, inputs: [inputs[0].shape, inputs[0].shape],
}
