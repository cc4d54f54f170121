"""Looks through an ONNX file before onnxruntime opens it: sound protobuf, known operators, weights inside the files it may read.

Only what names files, code or sizes is looked at; field numbers: onnx/onnx.proto. No library is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from math import prod
from pathlib import Path

from edge_runtime.errors import BundleError

# Weights lie in a file beside the graph, so that a graph itself is small.
MAX_GRAPH_BYTES = 256 << 20
# Operators beyond ONNX's own that our graphs may hold; others can name further files (EPContext) or code (custom operators).
CONTRIB = "com.microsoft"
CONTRIB_OPS = frozenset(["FusedMatMul", "GatherBlockQuantized", "GroupQueryAttention", "MatMulNBits", "RotaryEmbedding"])
_ONNX_DOMAINS = ("", "ai.onnx")
_MAX_DEPTH, _MAX_DIMENSIONS = 16, 16
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_EXTERNAL = 1
# Bits of an element by TensorProto.DataType; strings (8) have no size and no place in weights.
_BITS = {
    1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128, 16: 16, 17: 8, 18: 8, 19: 8,
    20: 8, 21: 4, 22: 4, 23: 4, 24: 8,
}  # fmt: skip
_LARGEST = 1 << 62
# Which fields of a message hold which messages.
_GRAPH = {1: "node", 5: "tensor", 15: "sparse"}
_CHILDREN = {
    "model": {7: "graph", 25: "function"}, "function": {7: "node"}, "graph": _GRAPH, "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"}, "sparse": {1: "tensor", 2: "tensor"},
}  # fmt: skip

Fields = list[tuple[int, int | memoryview]]


def check_onnx(path: Path, names: Set[str] | None = None) -> None:
    """Raises BundleError unless the graph at `path` is sound and takes weights only from files beside it, of `names` if they are given."""
    try:
        size = path.stat().st_size
        if size > MAX_GRAPH_BYTES:
            raise BundleError(f"{path} has {size} bytes, more than any graph; export the bundle again")
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror or error}); copy the bundle again") from error
    try:
        _Graph(path, names).check("model", memoryview(data), 0)
    except _UnsoundError as error:
        raise BundleError(f"{path} is no sound ONNX graph ({error}); copy the bundle again, or do not use it") from error


class _UnsoundError(ValueError):
    """What is wrong, without the file's name."""


class _Graph:
    """Walks through the messages of one file."""

    def __init__(self, path: Path, names: Set[str] | None) -> None:
        self._folder = path.parent
        self._names = names
        self._sizes: dict[str, int] = {}

    def check(self, kind: str, message: memoryview, depth: int) -> None:
        """Checks a message of this kind and all below it."""
        if depth > _MAX_DEPTH:
            raise _UnsoundError(f"graphs are nested more than {_MAX_DEPTH} deep")
        fields = list(_fields(message))
        if kind == "tensor":
            self._tensor(fields)
        elif kind == "node":
            _check_operator(fields)
        children = _CHILDREN.get(kind, {})
        if kind == "model" and not any(number == 7 for number, _ in fields):
            raise _UnsoundError("it holds no graph")
        for number, value in fields:
            if number in children:
                if not isinstance(value, memoryview):
                    raise _UnsoundError(f"field {number} of a {kind} is a number")
                self.check(children[number], value, depth + (kind == "graph"))

    def _tensor(self, fields: Fields) -> None:
        name = _text(fields, 8)
        kind, wanted = _number(fields, 2), _elements(fields)
        if kind not in _BITS:
            raise _UnsoundError(f"tensor {name!r} has the element type {kind}")
        needed = -(-wanted * _BITS[kind] // 8)
        if needed > _LARGEST:
            raise _UnsoundError(f"tensor {name!r} has {wanted} elements")
        raw = [value for number, value in fields if number == 9]
        if _number(fields, 14) == _EXTERNAL:
            self._external(name, fields, needed)
        elif raw and (not isinstance(raw[-1], memoryview) or len(raw[-1]) != needed):
            raise _UnsoundError(f"tensor {name!r} does not have the {needed} bytes of its shape")

    def _external(self, name: str, fields: Fields, needed: int) -> None:
        said: dict[str, str] = {}
        for number, value in fields:
            if number == 13 and isinstance(value, memoryview):
                entry = list(_fields(value))
                said[_text(entry, 1)] = _text(entry, 2)
        location = said.get("location", "")
        offset = _decimal(name, "offset", said.get("offset", "0"))
        length = _decimal(name, "length", said.get("length", str(needed)))
        size = self._size(name, location)
        if length != needed or offset + length > size:
            raise _UnsoundError(
                f"tensor {name!r} of {needed} bytes is said to be {length} bytes at {offset} of {location}, which has {size}"
            )

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
                raise _UnsoundError(f"{location[:80]!r} is a link that leaves the bundle, or no file")
        return self._sizes[location]


def _check_operator(fields: Fields) -> None:
    domain, operator = _text(fields, 7), _text(fields, 4)
    if domain in _ONNX_DOMAINS or (domain == CONTRIB and operator in CONTRIB_OPS):
        return
    raise _UnsoundError(f"the operator {operator[:40]!r} of {domain[:40]!r} is none that this runtime writes or trusts")


def _elements(fields: Fields) -> int:
    sizes = []
    for number, value in fields:
        if number == 1:
            sizes += [value] if isinstance(value, int) else list(_varints(value))
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


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields (field number, value): whole numbers, or the bytes of strings, messages and packed lists."""
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            size, at = _varint(message, at)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise _UnsoundError(f"wire type {wire}")
        if size > end - at:
            raise _UnsoundError(f"it is cut off: {size} bytes are announced, {end - at} there")
        yield key >> 3, message[at : at + size]
        at += size


def _varints(message: memoryview) -> Iterator[int]:
    at = 0
    while at < len(message):
        value, at = _varint(message, at)
        yield value


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise _UnsoundError("a number does not end")
