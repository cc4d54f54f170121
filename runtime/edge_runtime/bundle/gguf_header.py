"""Reads the header of a GGUF file. Every length is checked against the file's size before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Tensor data are never read. Imports nothing heavy, because the exporter
uses it, and so does the runtime before it passes a file to C code.
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
from typing import IO, Any, Literal, get_args

import numpy as np

from edge_devices.errors import errors_as
from edge_runtime.bundle.manifest import CacheLayout, LayerCache
from edge_runtime.errors import RequestError

# The only table of the contents of GGUF files: ggml's tensor types, and the quantizations of whole files, which mix some of these types.
#
# To add a quantization, add an entry to `_QUANTIZATIONS`; edge-export offers it if it has a `kl_limit`. Error compensation (`--calibrate`)
# also needs a row for the type of its matrices in `BLOCK_TYPES` of edge_export/quantization/gguf_quantization.py.


@dataclass(frozen=True, kw_only=True)
class TensorType:
    """A type in ggml/include/ggml.h: its name, the number of weights in a block, and the bytes of a block.

    `copy_bytes` is the size of a block in the copy that llama.cpp repacks (ggml/src/ggml-cpu/repack.cpp) or the row kernels pack
    (backends/kernels/src/layout.h) when a model is loaded, whichever is larger; 0 if no processor makes a copy.
    """

    name: str
    weights: int
    bytes: int
    copy_bytes: int = 0

    @property
    def bits(self) -> float:
        """Bits per weight in a file."""
        return 8 * self.bytes / self.weights

    @property
    def copy_bits(self) -> float:
        """Bits per weight in the copy for the processor."""
        return 8 * self.copy_bytes / self.weights


# The types by ggml's numbers.
TENSOR_TYPES = {
    0: TensorType(name="f32", weights=1, bytes=4),
    1: TensorType(name="f16", weights=1, bytes=2),
    2: TensorType(name="q4_0", weights=32, bytes=18, copy_bytes=18),
    3: TensorType(name="q4_1", weights=32, bytes=20, copy_bytes=20),
    6: TensorType(name="q5_0", weights=32, bytes=22, copy_bytes=22),
    7: TensorType(name="q5_1", weights=32, bytes=24, copy_bytes=24),
    8: TensorType(name="q8_0", weights=32, bytes=34, copy_bytes=34),
    10: TensorType(name="q2_K", weights=256, bytes=84, copy_bytes=84),
    11: TensorType(name="q3_K", weights=256, bytes=110),
    12: TensorType(name="q4_K", weights=256, bytes=144, copy_bytes=148),
    13: TensorType(name="q5_K", weights=256, bytes=176, copy_bytes=180),
    14: TensorType(name="q6_K", weights=256, bytes=210, copy_bytes=210),
    16: TensorType(name="iq2_xxs", weights=256, bytes=66),
    17: TensorType(name="iq2_xs", weights=256, bytes=74),
    18: TensorType(name="iq3_xxs", weights=256, bytes=98),
    19: TensorType(name="iq1_s", weights=256, bytes=50),
    20: TensorType(name="iq4_nl", weights=32, bytes=18, copy_bytes=18),
    21: TensorType(name="iq3_s", weights=256, bytes=110),
    22: TensorType(name="iq2_s", weights=256, bytes=82),
    23: TensorType(name="iq4_xs", weights=256, bytes=136),
    24: TensorType(name="i8", weights=1, bytes=1),
    25: TensorType(name="i16", weights=1, bytes=2),
    26: TensorType(name="i32", weights=1, bytes=4),
    27: TensorType(name="i64", weights=1, bytes=8),
    28: TensorType(name="f64", weights=1, bytes=8),
    29: TensorType(name="iq1_m", weights=256, bytes=56),
    30: TensorType(name="bf16", weights=1, bytes=2),
    34: TensorType(name="tq1_0", weights=256, bytes=54),
    35: TensorType(name="tq2_0", weights=256, bytes=66),
    39: TensorType(name="mxfp4", weights=32, bytes=17, copy_bytes=17),
}
TYPE_NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """A quantization of a whole file: its name, its number in enum llama_ftype (llama.cpp's include/llama.h), and the types it mixes.

    - `matrices`: the types of the layers' matrices, with their shares of the weights; empty if the mix is not known here.
    - `tables`: the type of tables with one row per token, including the tied output head.
    - `kl_limit`: an export fails if the mean KL from the reference, in nats, is above this; None if no export makes such a file.
    - `weighed`: llama.cpp chooses its scales by the importance of weights.
    - `raised`: tensors whose name contains the first text get the second type in all layers; llama.cpp's own mix has it in some only.
    """

    name: str
    file_type: int
    matrices: tuple[tuple[str, float], ...] = ()
    tables: str = ""
    kl_limit: float | None = None
    weighed: bool = False
    raised: tuple[tuple[str, str], ...] = ()

    def file_bytes(self, weights: int, table_weights: int = 0) -> int:
        """Returns the approximate bytes of a file with `weights` weights, of which `table_weights` are in tables."""
        bits = sum(share * tensor_type(kind).bits for kind, share in self.matrices)
        return int(((weights - table_weights) * bits + table_weights * tensor_type(self.tables).bits) / 8)

    def copy_bytes(self, weights: int, head_weights: int) -> int:
        """Returns the approximate bytes of the copies of `weights` matrix weights and of an output head of `head_weights`."""
        bits = sum(share * tensor_type(kind).copy_bits for kind, share in self.matrices)
        return int((weights * bits + head_weights * tensor_type(self.tables).copy_bits) / 8)


def tensor_type(name: str) -> TensorType:
    """Returns the type with this name, such as "q4_K". Raises KeyError if there is none."""
    return TENSOR_TYPES[TYPE_NUMBERS[name]]


# KL limits are at least twice the KL that such files have with real matrices of 270 million weights (docs/results.md), which lose more than
# larger models. They are at most 1.0, where perplexity has doubled or tripled. q5_k_m and q6_k were not measured, and have the limits of
# their neighbours.
# In a mix named _M, a fifth of Gemma 4's weights are q6_K; if all of ffn_down is, three tenths.
# The quantizations on offer come first, from the smallest to the largest: an export that loses too much recommends the next one.
_QUANTIZATIONS = (
    Quantization(name="q4_0", file_type=2, matrices=(("q4_0", 1),), tables="q6_K", kl_limit=1.0, weighed=True),
    Quantization(
        name="q4_k_m",
        file_type=15,
        matrices=(("q4_K", 0.7), ("q6_K", 0.3)),
        tables="q6_K",
        kl_limit=0.4,
        weighed=True,
        # With real matrices, the mean KL is 0.115 with these types in all layers, and 0.199 with q4_K instead. V is small, but with 5 bits
        # in half of its layers, it alone causes a KL of 0.19.
        raised=(("ffn_down.weight", "q6_K"), ("attn_v.weight", "q6_K")),
    ),
    Quantization(name="q5_k_m", file_type=17, matrices=(("q5_K", 0.8), ("q6_K", 0.2)), tables="q6_K", kl_limit=0.4, weighed=True),
    Quantization(name="q6_k", file_type=18, matrices=(("q6_K", 1),), tables="q6_K", kl_limit=0.2, weighed=True),
    Quantization(name="q8_0", file_type=7, matrices=(("q8_0", 1),), tables="q8_0", kl_limit=0.08),
    Quantization(name="f16", file_type=1, matrices=(("f16", 1),), tables="f16", kl_limit=0.02),
    Quantization(name="bf16", file_type=32, matrices=(("bf16", 1),), tables="bf16", kl_limit=0.05),
    Quantization(name="f32", file_type=0, matrices=(("f32", 1),), tables="f32"),
    Quantization(name="q4_1", file_type=3, matrices=(("q4_1", 1),), tables="q6_K"),
    Quantization(name="q5_0", file_type=8, matrices=(("q5_0", 1),), tables="q6_K"),
    Quantization(name="q5_1", file_type=9, matrices=(("q5_1", 1),), tables="q6_K"),
    Quantization(name="q2_k", file_type=10),
    Quantization(name="q3_k_s", file_type=11),
    Quantization(name="q3_k_m", file_type=12),
    Quantization(name="q3_k_l", file_type=13),
    Quantization(name="q4_k_s", file_type=14),
    Quantization(name="q5_k_s", file_type=16),
    Quantization(name="iq4_nl", file_type=25),
    Quantization(name="iq4_xs", file_type=30),
)
QUANTIZATIONS = {kind.name: kind for kind in _QUANTIZATIONS}
OFFERED = tuple(kind.name for kind in _QUANTIZATIONS if kind.kl_limit is not None)
MIXED = "mixed"


def quantization_name(file_type: object) -> str:
    """Returns the name of the quantization with this number in enum llama_ftype; MIXED if it is not in the table."""
    return next((kind.name for kind in _QUANTIZATIONS if kind.file_type == file_type), MIXED)


KvType = Literal["f16", "q8_0", "q4_0"]
KV_TYPES: tuple[KvType, ...] = get_args(KvType)
DEFAULT_KV_TYPE: KvType = "f16"
# Quantized K/V types have one scale for this many values of a head.
BLOCK = 32


def row_bytes(cache: LayerCache, kv_type: KvType) -> int:
    """Returns the bytes of one row of one layer, K and V together."""
    stored = tensor_type(kv_type)
    return 2 * cache.kv_heads * cache.head_dim * stored.bytes // stored.weights


def check_kv_type(layout: CacheLayout, kv_type: str) -> KvType:
    """Returns the type. Raises RequestError if it is unknown, or if its blocks do not divide the heads of this layout."""
    if kv_type not in KV_TYPES:
        raise RequestError(f"KV type {kv_type!r} is unknown; choose one of {', '.join(KV_TYPES)}")
    for name, cache in (("sliding", layout.sliding), ("full", layout.full)):
        if kv_type != "f16" and cache is not None and cache.head_dim % BLOCK:
            raise RequestError(
                f"KV type {kv_type} stores {BLOCK} values together, but the {name} heads have {cache.head_dim}, not a multiple; choose f16"
            )
    return kv_type


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# For comparison, Gemma 4's files have some 50 keys, fewer than 2000 tensors, and half a million merges.
_MAX_KEYS, _MAX_TENSORS, _MAX_STRINGS = 1 << 10, 1 << 13, 1 << 22
# The longest strings known are chat templates; a name may have 65535 bytes (ggml's docs/gguf.md).
_MAX_STRING_BYTES, _MAX_NAME_BYTES = 1 << 20, (1 << 16) - 1
ARCHITECTURE_KEY, VOCABULARY_KEY = "general.architecture", "tokenizer.ggml.tokens"
# Arrays up to this length are kept, for keys with one value per layer. Longer ones, and all arrays of strings (vocabulary, merges), are
# reduced to a length and a hash.
_MAX_KEPT = 512
_PIECE_BYTES = 1 << 20
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """The file is not a valid GGUF. The message is one sentence that names the file and says what to do."""


@dataclass(frozen=True, kw_only=True)
class LongArray:
    """An array that is reduced to its length and the SHA-256 of its bytes.

    For a vocabulary, `doubles` is the number of texts that repeat an earlier one, by llama.cpp's reading.
    """

    length: int
    sha256: str
    doubles: int = field(default=0, compare=False)


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor: its dimensions in GGUF's order (length of a row first), ggml's type number, its size in bytes and its file offset."""

    name: str
    shape: tuple[int, ...]
    type: int
    bytes: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """The keys and tensors of a file. Values are int, float, bool, str, a list of numbers, or a LongArray.

    `types` has GGUF's type number of each value; for an array also that of its elements.
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
    """Reads keys and tensor infos. Every length is checked against the file's size before memory is allocated.

    Raises GgufError if the file is not a GGUF of a known version, or is truncated or corrupt.
    """
    with errors_as(GgufError, f"{path} cannot be read", "check the path"), path.open("rb") as file:
        return _Reader(path, file, path.stat().st_size).header()


def read_architecture(path: Path) -> str:
    """Returns `general.architecture`, or "" without that key, and reads no further. Raises GgufError as `read_gguf_header` does."""
    with errors_as(GgufError, f"{path} cannot be read", "check the path"), path.open("rb") as file:
        return _Reader(path, file, path.stat().st_size).architecture()


def parse_gguf_header(path: Path, data: bytes, size: int) -> GgufHeader:
    """Parses the header of a file that is not written yet: it begins with `data`, and will have `size` bytes. Raises GgufError."""
    return _Reader(path, io.BytesIO(data), size).header()


def string_array(texts: Iterable[str]) -> LongArray:
    """Returns the LongArray of these strings, which equals the one that is read from a file with them."""
    digest, length = hashlib.sha256(), 0
    for text in texts:
        digest.update(_counted(text.encode()))
        length += 1
    return LongArray(length=length, sha256=digest.hexdigest())


def _shown(name: str) -> str:
    """Returns a name for a message: quoted, on one line, cut to 80 characters."""
    return repr(name[:80])


def _counted(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


class _Texts:
    """Counts repeated texts of a vocabulary, with 8 bytes of memory per text."""

    def __init__(self) -> None:
        self._hashes = array("q")

    def add(self, text: bytes) -> None:
        """Adds a text. llama.cpp cuts it at a NUL, and gives an empty one a name (src/llama-vocab.cpp)."""
        # Python's 64-bit hashes have a secret per process. Equal texts have equal hashes; among 262144 different texts, the probability of
        # a collision is 1 in 5e8.
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
        self._place = 0  # position in the file
        self._element = _STRING  # element type of the array that was read last

    def architecture(self) -> str:
        """Reads keys up to the one that names the architecture, usually the first."""
        for name, value, _ in self._keys(self._counts()[1]):
            if name == ARCHITECTURE_KEY:
                return value if isinstance(value, str) else ""
        return ""

    def _counts(self) -> tuple[int, int]:
        """Reads the beginning of the file; returns the numbers of tensors and of keys."""
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
        """Reads past `count` strings, many at a time, since a vocabulary has hundreds of thousands. Returns the SHA-256 of their bytes."""
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
            if not passed:  # the next string is longer than a piece, or goes past the end of the file
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
