"""Reads safetensors checkpoints: headers are untrusted, and no more than one piece of one tensor is in memory.

Format: 8 bytes of little-endian header length, a JSON header, then the data (github.com/huggingface/safetensors, README).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from reprlib import repr as brief
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_devices.errors import errors_as
from edge_export.checkpoint.json_file import read_json_object, refuse_pointer
from edge_export.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_LONGEST_NAME = 200
# No real tensor has more dimensions; the product of hostile sizes would take minutes.
_MAX_DIMENSIONS = 8
_LARGEST_SIZE = 1 << 40
_LARGEST_OFFSET = 1 << 60
# Elements per piece: 16 MiB once they are float32.
CHUNK_ELEMENTS = 4 << 20
# Elements per piece of complete rows.
_PIECE_ELEMENTS = 2 << 20
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
# Supported dtypes; bfloat16 is read as its bits.
READABLE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}
FloatType = Literal["f32", "f16", "bf16"]
PACKED4, PACKED_BLOCK = "PACKED4", 32
_PACKED_BITS, _BYTE = 4, 8
SOURCE_TYPE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
# The bits of infinity; those of NaNs are above, signs aside.
_INFINITY = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """The place of a tensor: `bytes` bytes of `dtype` (safetensors' name) from `offset` in `path`.

    With `scales` it is a matrix in 4 bits (PACKED4) whose blocks of 32 along a row have these factors, as compressed-tensors packs it;
    with `bits` too, codes of so many bits, the first in a byte's lowest ones, and factors [rows, n] of n equal parts of a row.
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
    """Returns all tensors of a checkpoint folder by name: shards in order of their names, names sorted inside each.

    Reads headers only. Raises CheckpointError for a missing, truncated or malformed shard, or names that occur twice.
    """
    index_path = folder / INDEX_NAME
    # As in transformers, a single file is complete: an index beside it is left from an earlier save.
    if (folder / SINGLE_NAME).is_file():
        return {tensor.name: tensor for tensor in read_header(folder / SINGLE_NAME)}
    if not index_path.is_file():
        raise CheckpointError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; give a folder with safetensors weights")
    shard_of = _weight_map(index_path)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(shard_of.values())):
        for tensor in read_header(_shard_path(folder, shard)):
            if tensor.name in tensors:
                raise CheckpointError(f"{folder / shard}: tensor {tensor.name!r} is in two shards; download the checkpoint again")
            if shard_of.get(tensor.name) != shard:
                raise CheckpointError(f"{folder / shard}: {INDEX_NAME} does not place {tensor.name!r} here; download the checkpoint again")
            tensors[tensor.name] = tensor
    for name, shard in shard_of.items():
        if name not in tensors:
            raise CheckpointError(f"{folder / shard} lacks the tensor {name!r} that {INDEX_NAME} places in it; download this file again")
    return tensors


def _weight_map(index_path: Path) -> dict[str, str]:
    shard_of = read_json_object(index_path, MAX_HEADER_BYTES).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise CheckpointError(f"{index_path} has no weight_map from tensor names to file names; download it again")
    return shard_of


def _shard_path(folder: Path, shard: str) -> Path:
    # Symbolic links are followed: the Hub's cache stores every shard as one.
    sound = Path(shard).name == shard and "\\" not in shard and shard.isprintable() and len(shard) <= _LONGEST_NAME
    if not sound or not shard.endswith(".safetensors"):
        raise CheckpointError(
            f"{folder / INDEX_NAME} names the shard {shard[:80]!r}, not a safetensors file of this folder; download the checkpoint again"
        )
    path = folder / shard
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, though {INDEX_NAME} names it; download this file")
    return path


def read_header(path: Path) -> list[StoredTensor]:
    """Returns the tensors of one file, sorted by name; every range is inside the file and fits its dtype and shape."""
    refuse_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} is not a safetensors file or is truncated ({size} bytes, header {length}); download it again")
        text = file.read(length)
    with errors_as(CheckpointError, f"{path} has a header that is not valid JSON", "download it again", ValueError, RecursionError):
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a header that is not a JSON object; download it again")
    start = 8 + length
    entries = sorted((name, entry) for name, entry in header.items() if name != "__metadata__")
    return [_stored(path, name, entry, start, size) for name, entry in entries]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _stored(path: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}; download the file again")
    if not _naturals(shape, _MAX_DIMENSIONS, _LARGEST_SIZE) or not _naturals(offsets, 2, _LARGEST_OFFSET) or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name!r} has shape {brief(shape)} and offsets {brief(offsets)}; download the file again")
    begin, end = offsets
    if begin > end or start + end > size:
        raise CheckpointError(f"{path} is truncated: {name!r} ends at byte {start + end}, the file has {size}; download this file again")
    if end - begin != prod(shape) * ITEM_BYTES[dtype]:
        raise CheckpointError(f"{path}: tensor {name!r} has {end - begin} bytes, not those of {dtype} {shape}; download the file again")
    return StoredTensor(name=name, path=path, dtype=dtype, shape=tuple(shape), offset=start + begin, bytes=end - begin)


def _naturals(value: Any, max_items: int, largest: int) -> bool:
    return isinstance(value, list) and len(value) <= max_items and all(type(item) is int and 0 <= item <= largest for item in value)


def read_chunks(tensor: StoredTensor) -> Iterator[NDArray[Any]]:
    """Yields the flat values in order, at most CHUNK_ELEMENTS at a time; bfloat16 as uint16 bits.

    Each array is a view that the next one overwrites. Raises CheckpointError if the file got shorter, the dtype is not READABLE, or a
    value is not a number; a single value may be infinite, as the towers' bounds are.
    """
    if tensor.dtype not in READABLE:
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name!r} is {tensor.dtype}; only {', '.join(READABLE)} checkpoints are read")
    dtype = np.dtype(READABLE[tensor.dtype])
    left = tensor.bytes // dtype.itemsize
    buffer = np.empty(min(left, CHUNK_ELEMENTS), dtype)
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        while left:
            piece = buffer[: min(left, len(buffer))]
            if file.readinto(piece.data.cast("B")) != piece.nbytes:
                raise CheckpointError(f"{tensor.path} ended inside {tensor.name!r} while it was read; keep the checkpoint unchanged")
            left -= len(piece)
            if tensor.dtype in SOURCE_TYPE:
                _refuse_nan(piece, tensor)
            yield piece


def _refuse_nan(piece: NDArray[Any], tensor: StoredTensor) -> None:
    bits = piece.view(f"<u{piece.itemsize}")
    largest = int((bits & bits.dtype.type(np.iinfo(bits.dtype).max >> 1)).max())
    infinity = _INFINITY[tensor.dtype]
    if largest > infinity or (largest == infinity and prod(tensor.shape) > 1):
        word = "NaN" if largest > infinity else "infinity"
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name!r} holds {word}; download the file again, or train it anew")


def read_float_chunks(tensor: StoredTensor, float_type: FloatType) -> Iterator[NDArray[Any]]:
    """Yields the flat values as float32, float16 or bfloat16 bits (uint16); values of that type already are passed through.

    Raises CheckpointError if the tensor is not floating point, or holds a finite value that float16 cannot.
    """
    if tensor.scales is not None:
        yield from _decoded(tensor, tensor.scales, float_type)
        return
    if tensor.dtype not in SOURCE_TYPE:
        raise CheckpointError(f"{tensor.path}: {tensor.name!r} is {tensor.dtype}, not F32, F16 or BF16; use an unquantized checkpoint")
    for piece in read_chunks(tensor):
        if SOURCE_TYPE[tensor.dtype] == float_type:
            yield piece
        else:
            yield _narrowed(widen(piece, tensor.dtype), tensor, float_type)


def _narrowed(values: NDArray[np.float32], tensor: StoredTensor, float_type: FloatType) -> NDArray[Any]:
    if float_type == "f32":
        return values
    return to_bfloat16(values) if float_type == "bf16" else _to_float16(values, tensor)


def read_codes(tensor: StoredTensor) -> Iterator[NDArray[np.uint8]]:
    """Yields the bytes of a matrix of codes in order, in pieces of whole rows; int8 as levels from 0 too. See `read_chunks`."""
    rows, row = tensor.shape[0], tensor.bytes // tensor.shape[0]
    step = max(1, CHUNK_ELEMENTS // tensor.shape[1])
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            piece = np.frombuffer(file.read(count * row), np.uint8)
            if len(piece) != count * row:
                raise CheckpointError(f"{tensor.path} ended inside {tensor.name!r} while it was read; keep the checkpoint unchanged")
            yield (piece ^ np.uint8(128) if tensor.bits == _BYTE else piece).reshape(count, row)


def _decoded(tensor: StoredTensor, scales: StoredTensor, float_type: FloatType) -> Iterator[NDArray[Any]]:
    """Values of codes: (code - 2^(bits-1)) * scale (transformers, integrations/gemma_quant.py; compressed-tensors, pack-quantized)."""
    factors, at, bits = read_values(scales), 0, tensor.bits or _PACKED_BITS
    shifts = np.arange(0, _BYTE, bits, dtype=np.uint8)
    for piece in read_codes(tensor):
        levels = ((piece[..., None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(piece), factors.shape[1], -1)
        values = (levels.astype(np.float32) - np.float32(1 << (bits - 1))) * factors[at : at + len(piece), :, None]
        at += len(piece)
        yield _narrowed(values.reshape(-1), tensor, float_type)


def read_values(tensor: StoredTensor) -> NDArray[Any]:
    """Returns all values of a tensor in its shape: float32, or the integers as they are. Raises CheckpointError as `read_chunks` does."""
    floating = tensor.dtype in SOURCE_TYPE or tensor.scales is not None
    pieces = read_float_chunks(tensor, "f32") if floating else read_chunks(tensor)
    kind = np.float32 if floating else np.dtype(READABLE[tensor.dtype])
    values, at = np.empty(prod(tensor.shape), kind), 0
    for piece in pieces:
        values[at : at + len(piece)] = piece
        at += len(piece)
    return values.reshape(tensor.shape)


def same_values(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two float matrices hold the same values in the same shape. Reads both, until they differ. Raises CheckpointError."""
    if first.shape != second.shape or (first.scales is None) != (second.scales is None):
        return False
    pieces = zip(read_float_chunks(first, "f32"), read_float_chunks(second, "f32"), strict=True)
    return all(np.array_equal(one, other) for one, other in pieces)


def widen(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """F32, F16 or BF16 (bits) values as float32, exactly."""
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; NaNs stay NaNs."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(64)
    return rounded.astype(np.uint16)


def _to_float16(values: NDArray[np.float32], tensor: StoredTensor) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if np.isinf(halves).any() and not np.isinf(values).any():
        largest = float(np.abs(values).max())
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name!r} holds {largest:g}, beyond float16; export with bf16 or f32 weights")
    return halves


def row_pieces(chunks: Iterable[NDArray[np.float32]], columns: int) -> Iterator[NDArray[np.float32]]:
    """Regroups flat chunks, which end anywhere, into pieces of complete rows [n, columns]."""
    rows = max(1, _PIECE_ELEMENTS // columns)
    left = np.empty(0, np.float32)
    for chunk in chunks:
        left = np.concatenate([left, chunk])
        complete = len(left) // columns * columns
        for begin in range(0, complete, rows * columns):
            yield left[begin : min(begin + rows * columns, complete)].reshape(-1, columns)
        left = left[complete:]


def read_rows(tensor: StoredTensor) -> Iterator[NDArray[np.float32]]:
    """Yields a matrix as float32 in pieces of complete rows [n, columns]; see `read_float_chunks`."""
    return row_pieces(read_float_chunks(tensor, "f32"), tensor.shape[1])
