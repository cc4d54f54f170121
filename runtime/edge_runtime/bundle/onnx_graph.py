"""Checks an ONNX file before onnxruntime opens it: valid protobuf, known operators that terminate, weights in the bundle's files only."""

from __future__ import annotations

from collections.abc import Mapping, Set
from math import prod
from pathlib import Path

from edge_devices.files.protobuf_wire import WireError
from edge_runtime.bundle.bundle import read_part
from edge_runtime.bundle.onnx_file import (
    LARGEST,
    MAX_DIMENSIONS,
    MAX_GRAPH_BYTES,
    MAX_PARTS,
    FunctionName,
    GraphReader,
    Node,
    OnnxGraph,
    Tensor,
    UnsoundGraphError,
)
from edge_runtime.errors import BundleError

# Only operators that the exporter writes are allowed. Others may load files (EPContext) or code (custom operators), or with a few bytes ask
# for any amount of time or memory (Scan, ConstantOfShape, Range).
CONTRIB = "com.microsoft"
# The domain of the kernels' own operators. The file has a function of each, made of allowed operators, which runs if there are no kernels.
KERNELS = "edge.mtp"
CONTRIB_OPS = frozenset(
    ["FusedMatMul", "GatherBlockQuantized", "GroupQueryAttention", "MatMulNBits", "MultiHeadAttention", "RotaryEmbedding"]
)
ONNX_OPS = frozenset(
    [
        "Abs",
        "Add",
        "ArgMax",
        "Cast",
        "Clip",
        "Concat",
        "Conv",
        "DequantizeLinear",
        "Div",
        "DynamicQuantizeLinear",
        "Exp",
        "Expand",
        "Flatten",
        "Gather",
        "Gelu",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "If",
        "LayerNormalization",
        "Loop",
        "MatMul",
        "MatMulInteger",
        "Mul",
        "NonZero",
        "QuantizeLinear",
        "RMSNormalization",
        "Reciprocal",
        "ReduceMax",
        "ReduceMean",
        "ReduceSum",
        "Relu",
        "Reshape",
        "Round",
        "ScatterElements",
        "ScatterND",
        "Shape",
        "Sigmoid",
        "Slice",
        "Softmax",
        "Split",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Tanh",
        "TopK",
        "Transpose",
        "Where",
    ]
)
# The input with the number of iterations of a drafter's Loop, which the runtime sets.
LOOP_INPUT = "draft_length"
# The most repetitions by Expand, which repeats a causal mask for each head.
_MAX_REPEATS = 1024
# Limits for a graph in which each call of a function is replaced by its body: nodes (128 experts in each of 30 layers have some 100,000),
# and bytes of the functions' constants.
_MAX_NODES, _MAX_CONSTANTS = 1 << 19, 64 << 20
_ONNX_DOMAINS = ("", "ai.onnx")
# Bits of an element by TensorProto.DataType. Strings (8) are not allowed: they have no fixed size, and no weights are strings.
_BITS = {
    kind: bits
    for bits, kinds in {
        4: (21, 22, 23),
        8: (2, 3, 9, 17, 18, 19, 20, 24),
        16: (4, 5, 10, 16),
        32: (1, 6, 12),
        64: (7, 11, 13, 14),
        128: (15,),
    }.items()
    for kind in kinds
}


def check_onnx(path: Path, names: Set[str] | None = None) -> None:
    """Raises BundleError unless the graph at `path` is valid, with weights only in files of its folder (if given, only in `names`)."""
    data = read_part(path, MAX_GRAPH_BYTES, "graph")
    try:
        _Check(path.parent, names).model(memoryview(data))
    except (UnsoundGraphError, WireError) as error:
        raise unsound(path, error) from error


def unsound(path: Path, error: Exception) -> BundleError:
    """Returns the error for a file that is not a valid graph."""
    return BundleError(f"{path} is no sound ONNX graph ({error}); copy the bundle again, or do not use it")


def shown(name: bytes) -> str:
    """Returns a name in a file as messages quote it."""
    return repr(name[:80].decode("utf-8", "replace"))


_NO_CONSTANTS: Mapping[bytes, Tensor] = {}


class _Check:
    """Walks through the graphs of one file, and keeps little of them in memory."""

    def __init__(self, folder: Path, names: Set[str] | None) -> None:
        self._folder = folder
        self._names = names
        self._reader = GraphReader()
        self._sizes: dict[str, int] = {}
        self._inputs: set[bytes] = set()
        # The product of the integers in each initializer, by name; and the names of shapes of Expand and of iteration counts of Loop.
        self._products: dict[bytes, int] = {}
        self._repeats: list[bytes] = []
        self._loops: list[bytes] = []
        # How many nodes and bytes of constants each function has, and the whole graph with functions in place of their calls.
        self._functions: dict[FunctionName, tuple[int, int]] = {}
        self._nodes = self._constants = 0

    def model(self, message: memoryview) -> None:
        """Checks a model. Raises UnsoundGraphError, WireError."""
        graph, called = self._reader.graph_of(message), dict[FunctionName, tuple[int, int]]()
        for function, body in map(self._reader.function, self._reader.functions):
            if function in called:
                raise UnsoundGraphError(f"it has two functions of the name {function[1][:40]!r}")
            called[function] = self._function(function, body)
        self._functions, self._nodes, self._constants = called, 0, 0
        self._graph(graph, 1)
        for name in self._repeats:
            if self._products.get(name, LARGEST) > _MAX_REPEATS:
                raise UnsoundGraphError(f"an Expand by {shown(name)}, which is no constant shape of at most {_MAX_REPEATS} elements")
        for name in self._loops:
            if name != LOOP_INPUT.encode() or name not in self._inputs or name in self._products:
                raise UnsoundGraphError(f"a Loop repeats {shown(name)} times, which is not the input {LOOP_INPUT!r}")

    def _function(self, name: FunctionName, body: OnnxGraph) -> tuple[int, int]:
        """Checks a function, which may contain neither calls nor graphs. Returns its numbers of nodes and of bytes of constants."""
        if name[0] != KERNELS:
            raise UnsoundGraphError(f"it has a function of {name[0][:40]!r}")
        for tensor in body.constants.values():
            if tensor.external is not None:
                raise UnsoundGraphError(f"a constant of the function {name[1][:40]!r} lies in a file")
            self._tensor(tensor)
        for node in body.nodes:
            if any(attribute.graph is not None for attribute in node.attributes):
                raise UnsoundGraphError(f"the function {name[1][:40]!r} holds a graph")
            self._operator(node, outermost=False, shapes=body.constants)
        return len(body.nodes), sum(len(tensor.raw or b"") for tensor in body.constants.values())

    def _graph(self, message: memoryview, depth: int) -> None:
        for part in self._reader.parts(message, depth):
            if isinstance(part, Tensor):
                self._tensor(part)
                # If a name occurs twice, the larger product counts.
                self._products[part.name] = max(self._products.get(part.name, 1), _product(part))
            elif isinstance(part, Node):
                self._operator(part, outermost=depth == 1)
                for attribute in part.attributes:
                    if attribute.graph is not None:
                        self._graph(attribute.graph, depth + 1)
            elif depth == 1 and not part.output:
                self._inputs.add(part.name)
                if len(self._inputs) > MAX_PARTS:
                    raise UnsoundGraphError(f"it has more than {MAX_PARTS} inputs")

    def _operator(self, node: Node, *, outermost: bool, shapes: Mapping[bytes, Tensor] = _NO_CONSTANTS) -> None:
        """Checks a node. `shapes` are constants that an Expand may use as its shape even if it is not in the outermost graph."""
        operator, domain = node.operator, node.domain
        nodes, constants = self._functions.get(node.function, (1, 0))
        self._nodes, self._constants = self._nodes + nodes, self._constants + constants
        if self._nodes > _MAX_NODES or self._constants > _MAX_CONSTANTS:
            raise UnsoundGraphError(f"its functions make more than {_MAX_NODES} nodes of it, or {_MAX_CONSTANTS} bytes of constants")
        if any(attribute.tensor is not None for attribute in node.attributes):
            raise UnsoundGraphError(f"the operator {operator[:40]!r} has a tensor as an attribute")
        if node.function in self._functions:
            return
        if not (operator in ONNX_OPS if domain in _ONNX_DOMAINS else domain == CONTRIB and operator in CONTRIB_OPS):
            raise UnsoundGraphError(f"the operator {operator[:40]!r} of {domain[:40]!r} is none that this runtime writes or trusts")
        if operator not in ("Expand", "Loop"):
            return
        shape = shapes.get(node.inputs[1]) if operator == "Expand" and len(node.inputs) > 1 else None
        if shape is not None and _product(shape) <= _MAX_REPEATS:
            return
        if not outermost:
            raise UnsoundGraphError(f"a graph inside the graph holds the operator {operator!r}")
        if operator == "Expand":
            self._repeats.append(node.inputs[1] if len(node.inputs) > 1 else b"")
            return
        self._loops.append(node.inputs[0] if node.inputs else b"")
        if len(self._loops) > 1:
            raise UnsoundGraphError("it holds more than one Loop")

    def _tensor(self, tensor: Tensor) -> None:
        name = shown(tensor.name)
        if tensor.type not in _BITS:
            raise UnsoundGraphError(f"tensor {name} has the element type {tensor.type}")
        count = prod(tensor.shape)
        needed = -(-count * _BITS[tensor.type] // 8)
        if needed > LARGEST:
            raise UnsoundGraphError(f"tensor {name} has {count} elements")
        if tensor.external is not None:
            self._external(name, tensor.external, needed)
        elif tensor.raw is None or len(tensor.raw) != needed:
            raise UnsoundGraphError(f"tensor {name} does not have the {needed} bytes of its shape")

    def _external(self, name: str, entries: dict[str, str], needed: int) -> None:
        location = entries.get("location", "")
        offset = _decimal(name, "offset", entries.get("offset", "0"))
        length = _decimal(name, "length", entries.get("length", str(needed)))
        size = self._size(name, location)
        if length != needed or offset + length > size:
            raise UnsoundGraphError(f"tensor {name} of {needed} bytes claims {length} bytes at {offset} of {location}, which has {size}")

    def _size(self, name: str, location: str) -> int:
        if location not in self._sizes:
            plain = location not in ("", ".", "..") and location.isprintable() and not set(location) & set('/\\:*"<>|')
            if not plain or (self._names is not None and location not in self._names):
                raise UnsoundGraphError(f"tensor {name} wants weights from {location[:80]!r}, which is no file of the bundle")
            path = self._folder / location
            try:
                inside = path.resolve().is_relative_to(self._folder.resolve())
                self._sizes[location] = path.stat().st_size
            except (OSError, ValueError) as error:
                raise UnsoundGraphError(f"{location[:80]!r}, from which tensor {name} wants weights, cannot be read") from error
            if not inside or not path.is_file():
                raise UnsoundGraphError(f"{location[:80]!r} is a symbolic link that leaves the bundle, or no file")
        return self._sizes[location]


def _product(shape: Tensor) -> int:
    """Returns the product of the integers in a short list; a huge number for any other tensor."""
    if shape.external is not None or shape.integers is None or prod(shape.shape) > MAX_DIMENSIONS:
        return LARGEST
    return prod(LARGEST if number < 0 else max(1, number) for number in shape.integers)


def _decimal(name: str, what: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise UnsoundGraphError(f"the {what} of tensor {name} is {text[:40]!r}")
    return int(text)
