"""llama.cpp's importance matrix files: reads both of their formats, with checks, and writes the newer.

Source of the facts: llama.cpp, common/imatrix-loader.cpp and tools/imatrix/imatrix.cpp. The newer is a GGUF with two float32 tensors per
matrix, NAME.in_sum2 (squares of the inputs, summed) and NAME.counts (over how many rows, for all experts or each). The older is
int32 count, then per entry int32 length, name, int32 calls, int32 values, float32 values; they are means times calls.
"""

from __future__ import annotations

import hashlib
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_devices.files.limited_read import read_at_most
from edge_export.checkpoint.gguf_source import read_gguf_header
from edge_export.errors import CheckpointError, ExportError
from edge_export.quantization.importance import ChannelSums
from edge_runtime.bundle.gguf_header import TensorInfo
from edge_runtime.bundle.manifest import ImportanceSource

MAX_BYTES = 256 << 20
_MAX_NAME = 1 << 10
_SUMS, _COUNTS = ".in_sum2", ".counts"
_F32 = 0
_Entries = dict[str, ChannelSums]


def read_imatrix(path: Path) -> tuple[_Entries, ImportanceSource]:
    """Returns the sums by GGUF tensor name, and the file's entry for the manifest. Raises ExportError if it is not one, or is damaged."""
    try:
        data = read_at_most(path, MAX_BYTES)
    except OSError as error:
        raise ExportError(f"{path} cannot be read ({error.strerror or error}); give an importance matrix made by llama-imatrix") from error
    entries = _read_gguf(path, data) if data[:4] == b"GGUF" else _read_older(path, data)
    digest = hashlib.sha256(data).hexdigest()
    return entries, ImportanceSource(kind="imatrix", name=path.name, bytes=len(data), sha256=digest, tokens=None)


def write_imatrix(path: Path, entries: _Entries, dataset: str, tokens: int, chunk: int) -> None:
    """Writes the newer format, which llama-imatrix and llama-quantize read too; `chunk` is the tokens per piece of text."""
    # Imported here, as only writing needs gguf.
    from edge_export.gguf.writer import array_tensor, write_raw_gguf

    tensors = []
    for name, entry in sorted(entries.items()):
        rows = entry.counts.size
        for ending, values in ((_SUMS, entry.sums), (_COUNTS, entry.counts)):
            tensors.append(array_tensor(name + ending, (rows, values.size // rows), "f32", partial(values.astype, "<f4")))
    keys: list[Any] = [
        ("general.type", "string", "imatrix"),
        ("imatrix.datasets", "array", [dataset]),
        ("imatrix.chunk_count", "uint32", max(1, tokens // chunk)),
        ("imatrix.chunk_size", "uint32", chunk),
    ]
    write_raw_gguf(path, "imatrix", keys, tensors, lambda _: None)


def _read_gguf(path: Path, data: bytes) -> _Entries:
    try:
        header = read_gguf_header(path)
    except CheckpointError as error:
        raise ExportError(f"{error} (it was given as an importance matrix)") from error
    tensors = {tensor.name: tensor for tensor in header.tensors}
    names = sorted({name.removesuffix(_SUMS) for name in tensors if name.endswith(_SUMS)})
    if not names:
        raise ExportError(f"{path} is a GGUF without importance ({_SUMS} tensors); give one made by llama-imatrix")
    entries = {}
    for name in names:
        sums, counts = tensors[name + _SUMS], tensors.get(name + _COUNTS)
        if counts is None or sums.type != _F32 or counts.type != _F32:
            raise ExportError(f"{path} is damaged: {name} has no {_COUNTS}, or values that are not float32; make the file again")
        entries[name] = ChannelSums(sums=_values(data, sums), counts=_values(data, counts))
    return entries


def _values(data: bytes, tensor: TensorInfo) -> NDArray[np.float64]:
    return np.frombuffer(data, "<f4", count=tensor.bytes // 4, offset=tensor.offset).astype(np.float64)


def _read_older(path: Path, data: bytes) -> _Entries:
    reader = _Older(path, data)
    entries: _Entries = {}
    for _ in range(reader.number("entries", len(data) // 16)):
        length = reader.number("letters of a name", _MAX_NAME)
        name = bytes(reader.take(length)).decode("utf-8", "replace")
        # Older files have 0 here.
        calls = reader.number("calls", (1 << 31) - 1, minimum=0)
        values = np.frombuffer(reader.take(4 * reader.number("values", len(data) // 4)), "<f4").astype(np.float64)
        if name in entries:
            raise ExportError(f"{path} is damaged: {name} comes twice; make the file again")
        entries[name] = ChannelSums(sums=values, counts=np.array([max(calls, 1)], np.float64))
    return entries


class _Older:
    """Reads fields of the older format, never past its end; data after the entries is ignored."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path, self._data, self._at = path, memoryview(data), 0

    def take(self, count: int) -> memoryview:
        """The next bytes."""
        if count > len(self._data) - self._at:
            raise self._wrong(f"it ends at byte {len(self._data)}, {self._at + count} are announced")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, what: str, maximum: int, minimum: int = 1) -> int:
        """The next int32, checked."""
        (value,) = struct.unpack("<i", self.take(4))
        if not minimum <= value <= maximum:
            raise self._wrong(f"it claims {value} {what}")
        return int(value)

    def _wrong(self, what: str) -> ExportError:
        return ExportError(f"{self._path} is no importance matrix of llama.cpp, or is damaged: {what}; make it again with llama-imatrix")
