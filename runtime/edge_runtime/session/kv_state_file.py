"""A file of K/V rows: a header that says what they belong to, their tokens, and the rows.

Layout: MAGIC, the header's length (uint32, little endian), the header (JSON), the tokens (int32, little endian), the rows of the full
layers, the rows of the sliding ones. The file is untrusted: every size in it is compared with what this target's rows must have, and with
the size of the file, before it is used, and tokens and rows with their SHA-256. The prompt cache is a folder of such files, each with the
rows behind another's.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edge_devices.errors import errors_as
from edge_devices.files.atomic_write import atomic_write
from edge_devices.files.limited_read import READ_FLAGS
from edge_devices.files.typed_json import StructureError, from_json, to_json
from edge_devices.files.user_cache import is_own
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import KvRows, SavableTarget

MAGIC = b"EDGEMTPS"
VERSION = 2
MAX_HEADER_BYTES = 4096
MAX_SECONDS = 1e9
TOKEN = np.dtype("<i4")
# What rows belong to, in the words of an error.
FACTS = {
    "bundle": "another bundle",
    "engine": "another engine",
    "kv_type": "another K/V type",
    "rows": "another cache layout",
    "kernels": "other kernels, another version or another processor",
}


@dataclass(frozen=True, kw_only=True)
class StateHeader:
    """What a file holds. `facts` are those of FACTS; `after` identifies the `first` tokens before these, "" where there are none.

    `tokens` and their full rows are as many, `sliding` is the number of sliding rows; `tokens_sha256` is of tokens and full rows,
    `sliding_sha256` of sliding ones. `seconds` is how long computing the rows took.
    """

    version: int
    facts: Mapping[str, str]
    context: int
    first: int
    after: str
    tokens: int
    sliding: int
    tokens_sha256: str
    sliding_sha256: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RowSegment:
    """Rows with their tokens [n], and what stands before them, as in `StateHeader`."""

    tokens: NDArray[np.int64]
    rows: KvRows
    first: int = 0
    after: str = ""
    seconds: float = 0.0


def row_facts(target: SavableTarget, bundle: str, engine: str, kernels: str) -> dict[str, str]:
    """Returns what a target's rows belong to; `bundle` and `kernels` are hashes."""
    full, sliding = target.row_bytes
    return {"bundle": bundle, "engine": engine, "kv_type": target.kv_type, "rows": f"{full}+{sliding}", "kernels": kernels}


def write_segment(path: Path, segment: RowSegment, facts: Mapping[str, str], context: int) -> int:
    """Writes a file atomically, for its owner alone; returns its bytes. Raises OSError."""
    tokens, rows = segment.tokens.astype(TOKEN), segment.rows
    full, sliding = np.ascontiguousarray(rows.full), np.ascontiguousarray(rows.sliding)
    header = StateHeader(
        version=VERSION,
        facts=facts,
        context=context,
        first=segment.first,
        after=segment.after,
        tokens=len(tokens),
        sliding=len(sliding),
        tokens_sha256=_digest(tokens, full),
        sliding_sha256=_digest(sliding),
        seconds=segment.seconds,
    )
    text = json.dumps(to_json(header)).encode()
    parts = (MAGIC, len(text).to_bytes(4, "little"), text, tokens.tobytes(), full.data, sliding.data)
    atomic_write(path, parts)  # type: ignore[arg-type]
    return sum(memoryview(part).nbytes for part in parts)


class SegmentFile:
    """An open file of rows whose header was checked. Close it, or use it as a context manager."""

    def __init__(self, path: Path, facts: Mapping[str, str], row_bytes: tuple[int, int]) -> None:
        """Raises RequestError for a file that is not a state, damaged, or of something else; OSError if it cannot be read."""
        self._path, self._row_bytes = path, row_bytes
        self._file: BinaryIO = os.fdopen(os.open(path, READ_FLAGS), "rb")
        try:
            state = os.fstat(self._file.fileno())
            self.owner_only = is_own(state) and (os.name != "posix" or not state.st_mode & 0o077)
            self.header = _read_header(path, self._file, row_bytes)
            _check_facts(path, self.header.facts, facts)
            self._start = self._file.tell()
        except BaseException:
            self._file.close()
            raise

    def read_full(self, out: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Fills `out` [tokens, bytes] with the full rows; returns the tokens. Raises as `__init__` does."""
        tokens = np.empty(self.header.tokens, TOKEN)
        self._fill(self._start, (tokens, out), self.header.tokens_sha256)
        return tokens.astype(np.int64)

    def read_sliding(self, out: NDArray[np.uint8]) -> None:
        """Fills `out` [sliding, bytes] with the sliding rows. Raises as `__init__` does."""
        header = self.header
        self._fill(self._start + header.tokens * (TOKEN.itemsize + self._row_bytes[0]), (out,), header.sliding_sha256)

    def _fill(self, place: int, arrays: Iterable[NDArray[Any]], sha256: str) -> None:
        self._file.seek(place)
        for array in arrays:
            view = array.data.cast("B") if array.size else memoryview(b"")
            if self._file.readinto(view) != len(view):  # type: ignore[attr-defined]
                raise RequestError("the state became shorter while it was read")
        if _digest(*arrays) != sha256:
            raise RequestError(f"the state {self._path} does not have the sha256 of its header; it is damaged")

    def __enter__(self) -> SegmentFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _read_header(path: Path, file: BinaryIO, row_bytes: tuple[int, int]) -> StateHeader:
    state = os.fstat(file.fileno())
    if not stat.S_ISREG(state.st_mode) or file.read(len(MAGIC)) != MAGIC:
        raise RequestError(f"{path} is not a file of a KV cache")
    length = int.from_bytes(file.read(4), "little")
    if length > min(MAX_HEADER_BYTES, state.st_size):
        raise RequestError(f"the state {path} has a header of {length} bytes, at most {MAX_HEADER_BYTES} are allowed; it is damaged")
    with errors_as(RequestError, f"the state {path} has a damaged header", "remove it", ValueError, RecursionError, StructureError):
        data = json.loads(file.read(length))
        if isinstance(data, dict) and type(version := data.get("version")) is int and version != VERSION:
            raise RequestError(f"the state {path} has version {version}, this reader supports {VERSION}")
        header = from_json(StateHeader, data, "header")
    sound = header.tokens >= 1 and 0 <= header.sliding <= header.tokens and header.first >= 0 and 0 <= header.seconds <= MAX_SECONDS
    if not sound:
        raise RequestError(
            f"the state {path} holds {header.tokens} tokens, {header.sliding} in sliding layers, and begins at {header.first};"
            " it is damaged"
        )
    expected = file.tell() + header.tokens * (TOKEN.itemsize + row_bytes[0]) + header.sliding * row_bytes[1]
    if header.facts.get("rows") == f"{row_bytes[0]}+{row_bytes[1]}" and state.st_size != expected:
        raise RequestError(f"the state {path} has {state.st_size} bytes, its header says {expected}; it is damaged")
    return header


def _check_facts(path: Path, facts: Mapping[str, str], own: Mapping[str, str]) -> None:
    for name, value in own.items():
        if facts.get(name) != value:
            raise RequestError(f"the state {path} is of {FACTS[name]}")


def _digest(*arrays: NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()
