"""Reads the split drafter's head file (docs/bundle.md), a safetensors file, mapped: what is never looked at is never in memory.

Format: 8 bytes of little-endian header length, a JSON header, then the data (github.com/huggingface/safetensors, README). Nothing in the
header is believed before it was checked against the file's size and the pair it is to serve.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import BackendError

HEAD_FORMAT = "edge-mtp drafter head 1"
MAX_HEADER_BYTES = 1 << 16
# bfloat16 as its bits
_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "I32": np.dtype("<i4")}


@dataclass(frozen=True, kw_only=True)
class HeadWeights:
    """What the head file holds. C centroids of K tokens each, drafter width H, target width T; all but `rows` and `token_ordering` float32.

    `rows` [C, K, H]: output rows, float32 or bfloat16 bits (uint16); `token_ordering` int32 [C, K]: whose rows they are;
    `embedding_projection`, `hidden_projection` [H, T]: the halves of the pre-projection; `feedback` [H, H]: hidden_projection after
    the post-projection; `top_centroids`: how many centroids are looked into.
    """

    rows: NDArray[Any]
    token_ordering: NDArray[np.int32]
    centroids: NDArray[np.float32]
    embedding_projection: NDArray[np.float32]
    hidden_projection: NDArray[np.float32]
    feedback: NDArray[np.float32]
    top_centroids: int


def read_head(path: Path, *, hidden_size: int, target_hidden_size: int, vocabulary: int) -> HeadWeights:
    """Maps the head of a drafter `hidden_size` wide for this target.

    Raises BackendError if the file is damaged, of another format or for another pair, or if its order does not name every token once.
    """
    header, start = _header(path)
    metadata, rows = header.pop("__metadata__", None), header.get("rows")
    if not isinstance(metadata, dict) or metadata.get("format") != HEAD_FORMAT:
        raise BackendError(f"{path} is no head file of this version ({HEAD_FORMAT!r}); export the bundle again")
    shape = rows.get("shape") if isinstance(rows, dict) else None
    if not _naturals(shape) or len(shape) != 3 or prod(shape[:2]) != vocabulary or shape[2] != hidden_size or hidden_size % 2:
        raise BackendError(f"{path}: rows have the shape {shape!r}, not [C, {vocabulary} / C, {hidden_size}]; export the bundle again")
    centroids, per_centroid, _ = shape
    wanted = {
        "rows": (("F32", "BF16"), (centroids, per_centroid, hidden_size)),
        "token_ordering": (("I32",), (centroids, per_centroid)),
        "centroids": (("F32",), (centroids, hidden_size)),
        "embedding_projection": (("F32",), (hidden_size, target_hidden_size)),
        "hidden_projection": (("F32",), (hidden_size, target_hidden_size)),
        "feedback": (("F32",), (hidden_size, hidden_size)),
    }
    arrays = {name: _mapped(path, start, name, header.get(name), types, shape) for name, (types, shape) in wanted.items()}
    weights = HeadWeights(**arrays, top_centroids=_top_centroids(path, metadata, centroids))
    _check_ordering(path, weights.token_ordering, vocabulary)
    return weights


def _header(path: Path) -> tuple[dict[str, Any], int]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise BackendError(f"{path} is no head file, or cut short ({size} bytes, header {length}); export the bundle again")
            header = json.loads(file.read(length).decode("utf-8"))
    except OSError as error:
        raise BackendError(f"{path} cannot be read ({error.strerror or error}); copy the bundle again") from error
    except (ValueError, RecursionError) as error:
        raise BackendError(f"{path} has a header that is not JSON ({error}); export the bundle again") from error
    if not isinstance(header, dict):
        raise BackendError(f"{path} has a header that is no JSON object; export the bundle again")
    return header, 8 + length


def _mapped(path: Path, start: int, name: str, entry: Any, types: tuple[str, ...], shape: tuple[int, ...]) -> NDArray[Any]:
    entry = entry if isinstance(entry, dict) else {}
    kind, offsets = entry.get("dtype"), entry.get("data_offsets")
    if not isinstance(kind, str) or kind not in types or entry.get("shape") != list(shape):
        found = f"{kind!r} {entry.get('shape')!r}"
        raise BackendError(f"{path}: {name} is {found}, not {' or '.join(types)} {list(shape)}; export the bundle again")
    dtype = _TYPES[kind]
    bytes_wanted = prod(shape) * dtype.itemsize
    if not _naturals(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != bytes_wanted or (start + offsets[0]) % dtype.itemsize:
        raise BackendError(f"{path}: {name} lies at {offsets!r}, which are not {bytes_wanted} bytes; export the bundle again")
    if start + offsets[1] > path.stat().st_size:
        raise BackendError(f"{path} is cut short: {name} ends at byte {start + offsets[1]}; copy the bundle again")
    mapped: NDArray[Any] = np.memmap(path, dtype, "r", start + offsets[0], shape)
    return mapped


def _top_centroids(path: Path, metadata: dict[str, Any], centroids: int) -> int:
    text = metadata.get("top_centroids")
    if not isinstance(text, str) or not text.isascii() or not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= centroids:
        raise BackendError(f"{path}: top_centroids is {str(text)[:40]!r}, not a number from 1 to {centroids}; export the bundle again")
    return int(text)


def _check_ordering(path: Path, ordering: NDArray[np.int32], vocabulary: int) -> None:
    if ordering.min() < 0 or ordering.max() >= vocabulary or np.bincount(ordering.ravel(), minlength=vocabulary).max() > 1:
        raise BackendError(f"{path}: token_ordering does not name each of {vocabulary} tokens once; export the bundle again")


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in value)
