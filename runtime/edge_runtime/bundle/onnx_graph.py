"""Checks an ONNX file before onnxruntime opens it: valid protobuf, known operators that terminate, weights in the files of the bundle.

Only fields that name files, code or sizes are read; field numbers: onnx/onnx.proto. Needs no library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Set
from itertools import islice
from math import prod
from pathlib import Path

from edge_devices.files.protobuf_wire import WireError, fields_of, varints
from edge_runtime.bundle.integrity import read_part
from edge_runtime.errors import BundleError

# Weights are in a file beside the graph, so the graph itself is small: 58 kB for 8 layers; some 8 MB and 900,000 fields for
# 128 experts in each of 30 layers.
MAX_GRAPH_BYTES = 16 << 20
_MAX_FIELDS = 2_000_000
# No node, tensor or attribute has more, and a graph has no more inputs.
_MAX_PARTS = 4096
# The operators that the exporter writes. Others may name files (EPContext) or code (custom operators), or take any time or memory for a
# few bytes (Scan, ConstantOfShape, Range).
CONTRIB = "com.microsoft"
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
# Most repetitions by Expand: a causal mask is repeated for each head.
_MAX_REPEATS = 1024
_ONNX_DOMAINS = ("", "ai.onnx")
_MAX_DEPTH, _MAX_DIMENSIONS = 16, 16
_EXTERNAL, _INT64 = 1, 7
# Bits of an element by TensorProto.DataType; strings (8) have no size and no place in weights.
_BITS = {
    1: 32,
    2: 8,
    3: 8,
    4: 16,
    5: 16,
    6: 32,
    7: 64,
    9: 8,
    10: 16,
    11: 64,
    12: 32,
    13: 64,
    14: 64,
    15: 128,
    16: 16,
    17: 8,
    18: 8,
    19: 8,
    20: 8,
    21: 4,
    22: 4,
    23: 4,
    24: 8,
}
_LARGEST = 1 << 62
# The fields that the exporter writes; others (functions, sparse tensors, descriptions) are refused.
_KNOWN = {
    "model": {1, 2, 7, 8},
    "graph": {1, 2, 5, 11, 12},
    "node": {1, 2, 3, 4, 5, 7},
    "attribute": {1, 2, 3, 4, 6, 8, 20},
    "tensor": {1, 2, 8, 9, 13, 14},
    "input": {1, 2},
}
# The fields that hold messages, by kind.
_CHILDREN = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor", 11: "input"},
    "node": {5: "attribute"},
    "attribute": {6: "graph"},
}

Field = tuple[int, int | memoryview]
Fields = list[Field]


def check_onnx(path: Path, names: Set[str] | None = None) -> None:
    """Raises BundleError unless the graph at `path` is valid and has weights only in files of its folder (those of `names` if given)."""
    data = read_part(path, MAX_GRAPH_BYTES, "graph")
    try:
        _Graph(path, names).check(memoryview(data))
    except (_UnsoundError, WireError) as error:
        raise BundleError(f"{path} is no sound ONNX graph ({error}); copy the bundle again, or do not use it") from error


class _UnsoundError(ValueError):
    """What is wrong, without the file's name."""


class _Graph:
    """Walks through the messages of one file."""

    def __init__(self, path: Path, names: Set[str] | None) -> None:
        self._folder = path.parent
        self._names = names
        self._sizes: dict[str, int] = {}
        self._fields_left = _MAX_FIELDS
        self._inputs: set[str] = set()
        # Initializers by name, and the product of the integers in them.
        self._products: dict[str, int] = {}
        self._repeats: list[str] = []
        self._loops: list[str] = []

    def check(self, message: memoryview) -> None:
        """Checks a model."""
        if not any(number == 7 for number, _ in self._fields("model", message)):
            raise _UnsoundError("it holds no graph")
        self._walk("model", message, 0)
        for name in self._repeats:
            if self._products.get(name, _LARGEST) > _MAX_REPEATS:
                raise _UnsoundError(f"an Expand by {name[:80]!r}, which is no constant shape of at most {_MAX_REPEATS} elements")
        for name in self._loops:
            if name != LOOP_INPUT or name not in self._inputs or name in self._products:
                raise _UnsoundError(f"a Loop repeats {name[:80]!r} times, which is not the input {LOOP_INPUT!r}")

    def _walk(self, kind: str, message: memoryview, depth: int) -> None:
        """Checks a message of this kind and all below it; `depth` counts the graphs around it."""
        if depth > _MAX_DEPTH:
            raise _UnsoundError(f"graphs are nested more than {_MAX_DEPTH} deep")
        fields: Iterable[Field] = self._fields(kind, message)
        if kind != "graph":
            fields = _few(fields, kind)
            self._check_parts(kind, fields, depth)
        children = _CHILDREN.get(kind, {})
        for number, value in fields:
            if number in children:
                if not isinstance(value, memoryview):
                    raise _UnsoundError(f"field {number} of a {kind} is a number")
                self._walk(children[number], value, depth + (kind == "graph"))

    def _fields(self, kind: str, message: memoryview) -> Iterator[Field]:
        known = _KNOWN[kind]
        for field in fields_of(message):
            self._fields_left -= 1
            if self._fields_left < 0:
                raise _UnsoundError(f"it has more than {_MAX_FIELDS} fields")
            if field[0] not in known:
                raise _UnsoundError(f"field {field[0]} of a {kind} is none that this runtime knows")
            yield field

    def _check_parts(self, kind: str, fields: Fields, depth: int) -> None:
        if kind == "tensor":
            self._tensor(fields)
        elif kind == "node":
            self._operator(fields, outermost=depth == 1)
        elif kind == "input" and depth == 1:
            self._inputs.add(_text(fields, 1))
            if len(self._inputs) > _MAX_PARTS:
                raise _UnsoundError(f"it has more than {_MAX_PARTS} inputs")

    def _operator(self, fields: Fields, *, outermost: bool) -> None:
        domain, operator = _text(fields, 7), _text(fields, 4)
        if not (operator in ONNX_OPS if domain in _ONNX_DOMAINS else domain == CONTRIB and operator in CONTRIB_OPS):
            raise _UnsoundError(f"the operator {operator[:40]!r} of {domain[:40]!r} is none that this runtime writes or trusts")
        if operator not in ("Expand", "Loop"):
            return
        if not outermost:
            raise _UnsoundError(f"a graph inside the graph holds the operator {operator!r}")
        inputs = [bytes(value).decode("utf-8", "replace") for number, value in fields if number == 1 and isinstance(value, memoryview)]
        if operator == "Loop":
            self._loops.append(inputs[0] if inputs else "")
            if len(self._loops) > 1:
                raise _UnsoundError("it holds more than one Loop")
        else:
            self._repeats.append(inputs[1] if len(inputs) > 1 else "")

    def _tensor(self, fields: Fields) -> None:
        name = _text(fields, 8)
        shown = name[:80]
        kind, wanted = _number(fields, 2), _elements(fields)
        if kind not in _BITS:
            raise _UnsoundError(f"tensor {shown!r} has the element type {kind}")
        needed = -(-wanted * _BITS[kind] // 8)
        if needed > _LARGEST:
            raise _UnsoundError(f"tensor {shown!r} has {wanted} elements")
        raw = [value for number, value in fields if number == 9]
        if _number(fields, 14) == _EXTERNAL:
            self._external(shown, fields, needed)
        elif len(raw) != 1 or not isinstance(raw[0], memoryview) or len(raw[0]) != needed:
            raise _UnsoundError(f"tensor {shown!r} does not have the {needed} bytes of its shape")
        elif kind == _INT64 and wanted <= _MAX_DIMENSIONS:
            # Negative numbers are huge here. Where a name stands twice, the greater product counts.
            product = prod(max(1, number) for (number,) in struct.iter_unpack("<Q", raw[0]))
            self._products[name] = max(self._products.get(name, 1), product)
            return
        self._products[name] = _LARGEST

    def _external(self, name: str, fields: Fields, needed: int) -> None:
        entries: dict[str, str] = {}
        for number, value in fields:
            if number == 13 and isinstance(value, memoryview):
                entry = _few(fields_of(value), "entry")
                entries[_text(entry, 1)] = _text(entry, 2)
        location = entries.get("location", "")
        offset = _decimal(name, "offset", entries.get("offset", "0"))
        length = _decimal(name, "length", entries.get("length", str(needed)))
        size = self._size(name, location)
        if length != needed or offset + length > size:
            raise _UnsoundError(f"tensor {name!r} of {needed} bytes claims {length} bytes at {offset} of {location}, which has {size}")

    def _size(self, name: str, location: str) -> int:
        if location not in self._sizes:
            plain = location not in ("", ".", "..") and location.isprintable() and not set(location) & set('/\\:*"<>|')
            if not plain or (self._names is not None and location not in self._names):
                raise _UnsoundError(f"tensor {name!r} wants weights from {location[:80]!r}, which is no file of the bundle")
            path = self._folder / location
            try:
                inside = path.resolve().is_relative_to(self._folder.resolve())
                self._sizes[location] = path.stat().st_size
            except (OSError, ValueError) as error:
                raise _UnsoundError(f"{location[:80]!r}, from which tensor {name!r} wants weights, cannot be read") from error
            if not inside or not path.is_file():
                raise _UnsoundError(f"{location[:80]!r} is a symbolic link that leaves the bundle, or no file")
        return self._sizes[location]


def _few(fields: Iterable[Field], kind: str) -> Fields:
    """The fields of a small message, all at once."""
    few = list(islice(fields, _MAX_PARTS + 1))
    if len(few) > _MAX_PARTS:
        raise _UnsoundError(f"a {kind} has more than {_MAX_PARTS} fields")
    return few


def _elements(fields: Fields) -> int:
    sizes: list[int] = []
    for number, value in fields:
        if number == 1:
            sizes += [value] if isinstance(value, int) else islice(varints(value), _MAX_DIMENSIONS + 1)
    if len(sizes) > _MAX_DIMENSIONS or any(size > _LARGEST for size in sizes):  # negative ones are huge here
        raise _UnsoundError("a tensor has a shape that none can have")
    return prod(sizes)


def _number(fields: Fields, wanted: int) -> int:
    found = [value for number, value in fields if number == wanted]
    if not found:
        return 0
    if not isinstance(found[-1], int):
        raise _UnsoundError(f"field {wanted} holds no number")
    return found[-1]


def _text(fields: Fields, wanted: int) -> str:
    found = [value for number, value in fields if number == wanted]
    if not found:
        return ""
    if not isinstance(found[-1], memoryview):
        raise _UnsoundError(f"field {wanted} holds no text")
    return bytes(found[-1]).decode("utf-8", "replace")


def _decimal(name: str, what: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise _UnsoundError(f"the {what} of tensor {name!r} is {text[:40]!r}")
    return int(text)
