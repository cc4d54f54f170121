"""Reads a checkpoint's files, which are not trusted: values of JSON files, with checks of type and range, and safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from edge_devices.files.limited_read import FileTooLarge, read_at_most
from edge_export.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20
MAX_SIZE = 1 << 24
# The largest accepted number. It fits into float32, which is the type of numbers in GGUF and ONNX.
MAX_NUMBER = 1e30
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Raises CheckpointError for a git-lfs pointer, which is in place of the file in a clone that was made without git-lfs."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(f"{path} is a git-lfs pointer, not the file itself; run git lfs pull in its folder, or download it again")


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Returns the JSON object in `path`. Raises CheckpointError if it is missing, larger than `max_bytes`, or not a JSON object."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; download the checkpoint again, with all its files")
    try:
        data = json.loads(read_at_most(path, max_bytes).decode())
    except FileTooLarge as error:
        raise CheckpointError(f"{path} has more than the {max_bytes} bytes such a file may have; check where it came from") from error
    except (ValueError, RecursionError) as error:
        refuse_pointer(path)
        raise CheckpointError(f"{path} is not JSON ({error}); download the checkpoint again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} contains a JSON {type(data).__name__}, not an object; download the checkpoint again")
    return data


def read_optional_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """As read_json_object, but returns an empty object if the file is missing."""
    return read_json_object(path, max_bytes) if path.is_file() else {}


class CheckedValues:
    """Returns checked values of a mapping. An error names the file and the key, with `where` in front, and ends with `advice`."""

    def __init__(self, values: Mapping[str, Any], path: Path, where: str, advice: str) -> None:
        self.values, self.path = values, path
        self.where, self._advice = where, advice

    def get(self, key: str) -> Any:
        """Returns the value unchecked; None if the key is missing."""
        return self.values.get(key)

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """Returns an error for a wrong value; `expected` describes the right one."""
        return CheckpointError(f"{self.path}: {self.where}{key} is {repr(self.get(key))[:200]}, not {expected}; {self._advice}")

    def integer(self, key: str, low: int = 1, high: int = MAX_SIZE, default: int | None = None) -> int:
        """Returns an integer from `low` to `high`."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
            raise self.wrong(key, f"a positive number of at most {MAX_NUMBER:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def array(self, key: str, length: int) -> list[Any]:
        """Returns a list of this length."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != length:
            raise self.wrong(key, f"an array of {length} values")
        return value

    def section(self, key: str) -> CheckedValues:
        """Returns the values of an object."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return CheckedValues(value, self.path, f"{self.where}{key}.", self._advice)

    def over(self, defaults: Mapping[str, Any]) -> CheckedValues:
        """Returns these values, with `defaults` for keys that are missing."""
        return CheckedValues({**defaults, **self.values}, self.path, self.where, self._advice)

    def demand(self, key: str, *allowed: Any) -> None:
        """Raises CheckpointError unless the value is one of `allowed`. The first of these is the default."""
        if self.values.get(key, allowed[0]) not in allowed:
            raise self.wrong(key, " or ".join(repr(value) for value in allowed))


# Tensors of safetensors checkpoints. The library checks each file. No more than a piece of one tensor is in memory.

MAX_INDEX_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_LONGEST_NAME = 200
# Values per piece of whole rows, which are 8 MiB as float32. A longer row is a piece by itself.
PIECE_VALUES = 2 << 20
_BYTE = 8
# The dtypes that can be read, by their names in safetensors.
READABLE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
}
FloatType = Literal["f32", "f16", "bf16"]
SOURCE_TYPE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor is stored: `bytes` bytes of `dtype` (safetensors' name) from `offset` in `path`.

    If `scales` is given, the tensor is a matrix of codes of `bits` bits, and the first code of a byte is in its lowest bits. `scales`
    [rows, n] has one factor for each of n equal parts of a row.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    scales: StoredTensor | None = None
    bits: int = 0


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns all tensors of a checkpoint folder by name. They are sorted by their shard's name, and then by their own name.

    Reads headers only. Raises CheckpointError for a missing, truncated or malformed shard, or an index that does not fit its shards.
    """
    # As in transformers, a single file is the complete model. An index beside it is left from an earlier save and ignored.
    if (folder / SINGLE_NAME).is_file():
        return read_header(folder / SINGLE_NAME)
    index = folder / INDEX_NAME
    if not index.is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; give a folder with safetensors weights")
    shard_of = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names; download it again")
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(shard_of.values())):
        for name, tensor in read_header(_shard_path(folder, shard)).items():
            if shard_of.get(name) != shard:
                raise CheckpointError(f"{folder / shard}: {INDEX_NAME} does not place {name!r} here; download the checkpoint again")
            tensors[name] = tensor
    for name, shard in shard_of.items():
        if name not in tensors:
            raise CheckpointError(f"{folder / shard} lacks the tensor {name!r} that {INDEX_NAME} places in it; download this file again")
    return tensors


def _shard_path(folder: Path, shard: str) -> Path:
    # Symbolic links are followed, because the hub's cache stores every shard as a link.
    sound = Path(shard).name == shard and "\\" not in shard and shard.isprintable() and len(shard) <= _LONGEST_NAME
    if not sound or not shard.endswith(".safetensors"):
        raise CheckpointError(
            f"{folder / INDEX_NAME} names the shard {shard[:80]!r}, not a safetensors file of this folder; download the checkpoint again"
        )
    path = folder / shard
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {INDEX_NAME} names it as a shard, so download the checkpoint again")
    return path


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file by name, sorted. Raises CheckpointError if it is truncated or malformed."""
    refuse_pointer(path)
    try:
        with safe_open(path, framework="np"):
            pass  # opening checks that every tensor lies inside the file and has the size that its dtype and shape require
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no sound safetensors file or is truncated ({str(error)[:200]}); download it again") from error
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    return {name: _stored(name, path, start, header[name]) for name in sorted(header)}


def _stored(name: str, path: Path, start: int, entry: dict[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    return StoredTensor(name=name, path=path, dtype=entry["dtype"], shape=tuple(entry["shape"]), offset=start + begin, bytes=end - begin)


def mapped(tensor: StoredTensor) -> NDArray[Any]:
    """Maps the stored values into memory, for reading rows in any order. The page cache keeps as many as fit."""
    return np.memmap(tensor.path, READABLE[tensor.dtype], "r", tensor.offset, tensor.shape)


def read_stored(tensor: StoredTensor) -> Iterator[NDArray[Any]]:
    """Yields the values in their stored dtype, in pieces of whole rows [n, ...].

    Raises CheckpointError if the file got shorter, the dtype is not READABLE, or a value is NaN or infinite. Only a tensor of a single
    value may be infinite, because the towers' bounds are.
    """
    kind = _numpy_type(tensor)
    for piece in _row_bytes(tensor):
        values = piece.view(kind).reshape(len(piece), *tensor.shape[1:])
        if tensor.dtype in SOURCE_TYPE:
            _refuse_nan(values, tensor)
        yield values


def _numpy_type(tensor: StoredTensor) -> np.dtype[Any]:
    if tensor.dtype not in READABLE:
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name!r} is {tensor.dtype}; only {', '.join(READABLE)} checkpoints are read")
    return READABLE[tensor.dtype]


def _refuse_nan(values: NDArray[Any], tensor: StoredTensor) -> None:
    # Compares bit patterns without the sign, which is several times faster than isfinite.
    bits = values.view(f"<u{values.itemsize}")
    largest = int((bits & np.iinfo(bits.dtype).max // 2).max(initial=0))
    infinity = int(np.array(np.inf, values.dtype).view(bits.dtype))
    if largest > infinity or (largest == infinity and prod(tensor.shape) > 1):
        word = "NaN" if largest > infinity else "infinity"
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name!r} holds {word}; download the file again, or train it anew")


def _row_bytes(tensor: StoredTensor) -> Iterator[NDArray[np.uint8]]:
    """Yields the bytes of a tensor in pieces of whole rows [n, bytes of a row]. Raises CheckpointError if the file got shorter."""
    rows, values = tensor.shape[0] if tensor.shape else 1, prod(tensor.shape[1:])
    step = max(1, PIECE_VALUES // max(1, values))
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        for first in range(0, rows, step):
            shape = min(step, rows - first), tensor.bytes // rows
            piece = np.fromfile(file, np.uint8, prod(shape))
            if len(piece) != prod(shape):
                raise CheckpointError(f"{tensor.path} ended inside {tensor.name!r} while it was read; keep the checkpoint unchanged")
            yield piece.reshape(shape)


def read_rows(tensor: StoredTensor, float_type: FloatType = "f32") -> Iterator[NDArray[Any]]:
    """Yields the values as float32, float16 or bfloat16, in pieces of whole rows [n, ...].

    Raises CheckpointError if the tensor is not floating point, if a finite value is beyond float16 where that is requested, and as
    `read_stored` does.
    """
    if tensor.scales is None and tensor.dtype not in SOURCE_TYPE:
        raise CheckpointError(f"{tensor.path}: {tensor.name!r} is {tensor.dtype}, not F32, F16 or BF16; use an unquantized checkpoint")
    for piece in read_stored(tensor) if tensor.scales is None else _decoded(tensor, tensor.scales):
        with np.errstate(over="ignore"):
            values = piece.astype(READABLE[float_type.upper()], copy=False)
        if float_type == "f16" and piece is not values and np.isinf(values).any() and not np.isinf(piece).any():
            largest = float(np.abs(piece).max())
            raise CheckpointError(
                f"{tensor.path}: tensor {tensor.name!r} holds {largest:g}, beyond float16; export with bf16 or f32 weights"
            )
        yield values


def read_codes(tensor: StoredTensor) -> Iterator[NDArray[np.uint8]]:
    """Yields the bytes of a matrix of codes in pieces of whole rows. int8 codes are converted to unsigned levels, like all others."""
    for piece in _row_bytes(tensor):
        yield piece ^ np.uint8(128) if tensor.bits == _BYTE else piece


def _decoded(tensor: StoredTensor, scales: StoredTensor) -> Iterator[NDArray[np.float32]]:
    """Yields the values of codes, (code - 2^(bits-1)) * scale (transformers, gemma_quant.py; compressed-tensors, pack-quantized)."""
    factors, at, bits = read_values(scales), 0, tensor.bits
    shifts = np.arange(0, _BYTE, bits, dtype=np.uint8)
    for piece in read_codes(tensor):
        levels = ((piece[..., None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(piece), factors.shape[1], -1)
        values = (levels.astype(np.float32) - np.float32(1 << (bits - 1))) * factors[at : at + len(piece), :, None]
        at += len(piece)
        yield values.reshape(len(piece), -1)


def read_values(tensor: StoredTensor) -> NDArray[Any]:
    """Returns all values in the tensor's shape: floats as float32, integers unchanged. Raises CheckpointError as `read_stored` does."""
    floating = tensor.dtype in SOURCE_TYPE or tensor.scales is not None
    pieces = read_rows(tensor) if floating else read_stored(tensor)
    values, at = np.empty(tensor.shape or 1, np.float32 if floating else _numpy_type(tensor)), 0
    for piece in pieces:
        values[at : at + len(piece)] = piece
        at += len(piece)
    return values.reshape(tensor.shape)


def same_values(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two float tensors have the same shape and values. Reads both until they differ. Raises CheckpointError."""
    return first.shape == second.shape and all(
        np.array_equal(one, other) for one, other in zip(read_rows(first), read_rows(second), strict=True)
    )
