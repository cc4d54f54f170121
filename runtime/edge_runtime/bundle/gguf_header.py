"""Reads the header of a GGUF file. Every length is checked against the file's size before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Tensor data is never read. Imports nothing heavy, because both the
exporter and the runtime (before it passes a file to C code) use it.
"""

from __future__ import annotations

import hashlib
import io
import struct
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from edge_devices.errors import errors_as
from edge_runtime.bundle.gguf_types import TENSOR_TYPES

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# Gemma 4's files have some 50 keys, less than 2000 tensors, and half a million merges.
_MAX_KEYS, _MAX_TENSORS, _MAX_STRINGS = 1 << 10, 1 << 13, 1 << 22
# The longest strings known are chat templates; a name may have 65535 bytes (ggml's docs/gguf.md).
_MAX_STRING_BYTES, _MAX_NAME_BYTES = 1 << 20, (1 << 16) - 1
ARCHITECTURE_KEY, VOCABULARY_KEY = "general.architecture", "tokenizer.ggml.tokens"
# One value per layer. Longer arrays, and all arrays of strings (vocabulary, scores, merges), are kept as a length and a hash.
_MAX_KEPT = 512
_PIECE_BYTES = 1 << 20
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """The file is no sound GGUF; the message is one sentence that names it and says what to do."""


@dataclass(frozen=True, kw_only=True)
class LongArray:
    """An array of which only the length and the sha256 of its bytes are kept.

    `doubles` of a vocabulary is the number of its texts that repeat an earlier one, as llama.cpp reads them.
    """

    length: int
    sha256: str
    doubles: int = field(default=0, compare=False)


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor: dimensions as GGUF orders them (rows' length first), ggml type number, its bytes and their offset in the file."""

    name: str
    shape: tuple[int, ...]
    type: int
    bytes: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """Keys and tensors of one file. Values are int, float, bool, str, a list of numbers, or a LongArray.

    `types` are GGUF's numbers of the values' types; of an array also that of its elements.
    """

    path: Path
    keys: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    types: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False)

    @property
    def architecture(self) -> str:
        """`general.architecture`, or "" if the key is missing."""
        value = self.keys.get(ARCHITECTURE_KEY)
        return value if isinstance(value, str) else ""


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads keys and tensor infos; every length is checked against the file's size before memory is allocated.

    Raises GgufError if it is no GGUF file of a known version, or is truncated or corrupt.
    """
    with errors_as(GgufError, f"{path} cannot be read", "check the path"), path.open("rb") as file:
        return _Reader(path, file, path.stat().st_size).header()


def read_architecture(path: Path) -> str:
    """Returns `general.architecture`, "" without that key; reads no further than to it. Raises GgufError as `read_gguf_header` does."""
    with errors_as(GgufError, f"{path} cannot be read", "check the path"), path.open("rb") as file:
        return _Reader(path, file, path.stat().st_size).architecture()


def parse_gguf_header(path: Path, data: bytes, size: int) -> GgufHeader:
    """Returns the header of a file of `size` bytes that begins with `data` and is not written yet. Raises as `read_gguf_header` does."""
    return _Reader(path, io.BytesIO(data), size).header()


def string_array(texts: Iterable[str]) -> LongArray:
    """Returns the LongArray of these strings, equal to the one read from a file."""
    digest, length = hashlib.sha256(), 0
    for text in texts:
        digest.update(_counted(text.encode()))
        length += 1
    return LongArray(length=length, sha256=digest.hexdigest())


def _shown(name: str) -> str:
    """Returns a name as a message quotes it: on one line, at most 80 characters of it."""
    return repr(name[:80])


def _counted(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


class _Texts:
    """Counts repeated texts of a vocabulary, with 8 bytes of memory for each text."""

    def __init__(self) -> None:
        self._hashes = array("q")

    def add(self, text: bytes) -> None:
        """Adds a text. For llama.cpp it ends at a NUL, and an empty one gets a name (src/llama-vocab.cpp)."""
        # 64-bit hashes with a secret of the process: 262144 different texts collide once in 5e8 times; repeated texts always do.
        self._hashes.append(hash(text.partition(b"\0")[0] or b"[EMPTY_%d]" % len(self._hashes)))

    def doubles(self) -> int:
        """Returns how many texts repeat an earlier one."""
        ordered = np.sort(np.frombuffer(self._hashes, np.int64))
        return int(np.count_nonzero(ordered[1:] == ordered[:-1]))


class _Reader:
    """Reads little-endian values, never past the end of the file."""

    def __init__(self, path: Path, file: IO[bytes], size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._place = 0  # in the file
        self._element = _STRING  # of the array that was read last

    def architecture(self) -> str:
        """Reads keys until the one that names the architecture, which writers write first."""
        for name, value, _ in self._keys(self._counts()[1]):
            if name == ARCHITECTURE_KEY:
                return value if isinstance(value, str) else ""
        return ""

    def _counts(self) -> tuple[int, int]:
        """Reads the beginning; returns how many tensors and keys follow."""
        if self._take(4) != _MAGIC:
            raise GgufError(
                f"{self._path} is not a GGUF file: it does not begin with {_MAGIC.decode()}; give a GGUF or a checkpoint folder"
            )
        version = self._number("I")
        if version not in _VERSIONS:
            raise GgufError(f"{self._path} has GGUF version {version}, supported are {_VERSIONS[0]} and {_VERSIONS[-1]}; convert it again")
        tensor_count, key_count = self._number("Q"), self._number("Q")
        if tensor_count > _MAX_TENSORS or key_count > _MAX_KEYS:
            raise self._corrupt(f"it claims {tensor_count} tensors and {key_count} keys")
        return tensor_count, key_count

    def _keys(self, count: int) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Reads keys; yields their names, values and types."""
        for _ in range(count):
            name = self._string(_MAX_NAME_BYTES)
            kind = self._number("I")
            value = self._value(kind, vocabulary=name == VOCABULARY_KEY)
            yield name, value, (kind, self._element) if kind == _ARRAY else (kind,)

    def header(self) -> GgufHeader:
        """Reads everything before the tensor data."""
        tensor_count, key_count = self._counts()
        keys: dict[str, Any] = {}
        types: dict[str, tuple[int, ...]] = {}
        for name, value, kinds in self._keys(key_count):
            keys[name], types[name] = value, kinds
        alignment = keys.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment % 8:
            raise self._corrupt(f"its alignment is {alignment!r}")
        infos = [self._tensor(alignment) for _ in range(tensor_count)]
        start = -(-self._place // alignment) * alignment
        tensors = tuple(replace(info, offset=start + info.offset) for info in infos)
        for info in tensors:
            if info.offset + info.bytes > self._size:
                end = info.offset + info.bytes
                raise GgufError(f"{self._path} is truncated: {_shown(info.name)} ends at byte {end} of {self._size}; fetch the file again")
        if len({info.name for info in tensors}) != len(tensors):
            raise self._corrupt("a tensor name occurs twice")
        return GgufHeader(path=self._path, keys=keys, tensors=tensors, types=types)

    def _tensor(self, alignment: int) -> TensorInfo:
        """Reads one tensor info; its offset is relative to the beginning of the tensor data."""
        name, dimensions = self._string(_MAX_NAME_BYTES), self._number("I")
        if not 1 <= dimensions <= 4:
            raise self._corrupt(f"tensor {_shown(name)} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))
        kind, offset = self._number("I"), self._number("Q")
        stored = TENSOR_TYPES.get(kind)
        if stored is None:
            raise GgufError(
                f"{self._path}: tensor {_shown(name)} has the unknown type {kind}; convert the model again with a current llama.cpp"
            )
        weights = prod(shape)
        if not weights or shape[0] % stored.weights or offset % alignment:
            raise self._corrupt(f"tensor {_shown(name)} has shape {list(shape)} of type {kind} at offset {offset}")
        return TensorInfo(name=name, shape=shape, type=kind, bytes=weights // stored.weights * stored.bytes, offset=offset)

    def _value(self, kind: int, *, vocabulary: bool) -> Any:
        if kind == _STRING:
            return self._string(_MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(_Texts() if vocabulary else None)
        if kind not in _SCALARS:
            raise self._corrupt(f"a key has the unknown type {kind}")
        return self._number(_SCALARS[kind])

    def _array(self, texts: _Texts | None) -> Any:
        kind, length = self._number("I"), self._number("Q")
        self._element = kind
        if kind != _STRING and kind not in _SCALARS:
            raise self._corrupt(f"an array holds the unknown type {kind}")
        width = 8 if kind == _STRING else struct.calcsize("<" + _SCALARS[kind])
        if kind == _STRING and length > _MAX_STRINGS:
            raise self._corrupt(f"an array claims {length} strings")
        self._room(length * width)
        if kind == _STRING:
            sha256 = self._skip_strings(length, texts)
            return LongArray(length=length, sha256=sha256, doubles=0 if texts is None else texts.doubles())
        if length <= _MAX_KEPT:
            return list(struct.unpack(f"<{length}{_SCALARS[kind]}", self._take(length * width)))
        digest = hashlib.sha256()
        for first in range(0, length * width, _PIECE_BYTES):
            digest.update(self._take(min(_PIECE_BYTES, length * width - first)))
        return LongArray(length=length, sha256=digest.hexdigest())

    def _skip_strings(self, count: int, texts: _Texts | None) -> str:
        """Reads past `count` strings, many at a time, since a vocabulary has hundreds of thousands; returns the sha256 of their bytes."""
        digest = hashlib.sha256()
        while count:
            piece = self._file.read(_PIECE_BYTES)
            passed, at = 0, 0
            while passed < count and at + 8 <= len(piece):
                end = at + 8 + int.from_bytes(piece[at : at + 8], "little")
                if end > len(piece):
                    break
                if texts is not None:
                    texts.add(piece[at + 8 : end])
                passed, at = passed + 1, end
            digest.update(memoryview(piece)[:at])
            self._place += at
            self._file.seek(self._place)
            if not passed:  # longer than a piece, or past the end of the file
                text = self._take(self._number("Q", maximum=_MAX_STRING_BYTES))
                digest.update(_counted(text))
                if texts is not None:
                    texts.add(text)
                passed = 1
            count -= passed
        return digest.hexdigest()

    def _string(self, max_bytes: int) -> str:
        return self._take(self._number("Q", maximum=max_bytes)).decode("utf-8", "replace")

    def _number(self, code: str, maximum: int | None = None) -> Any:
        (value,) = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))
        if maximum is not None and value > maximum:
            raise self._corrupt(f"a string claims {value} bytes")
        return value

    def _room(self, count: int) -> None:
        if count > self._size - self._place:
            raise GgufError(f"{self._path} is truncated or corrupt: its header ends after the end of the file; fetch it again")

    def _take(self, count: int) -> bytes:
        self._room(count)
        data = self._file.read(count)
        if len(data) != count:
            raise GgufError(f"{self._path} became shorter while it was read; fetch it again")
        self._place += count
        return data

    def _corrupt(self, what: str) -> GgufError:
        return GgufError(f"{self._path} is corrupt: {what}; fetch the file again")
