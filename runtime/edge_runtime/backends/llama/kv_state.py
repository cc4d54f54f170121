"""llama.cpp's form of a sequence's K/V rows, taken apart into plain rows and put together from them.

The form is what llama_kv_cache::state_write writes (src/llama-kv-cache.cpp), of the full cache and then of the sliding one. What llama.cpp
reads is always made here, of counts and sizes that this process computed: rows from a file are numbers in it and nothing else, since
llama.cpp takes positions as they come, and a wrong one ends the process or bends the attention.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_runtime.bundle.gguf_gemma4 import owned_rows
from edge_runtime.bundle.gguf_header import GgufHeader
from edge_runtime.bundle.gguf_types import TENSOR_TYPES, TYPE_NUMBERS
from edge_runtime.bundle.kv_types import KvType
from edge_runtime.errors import BackendError
from edge_runtime.interfaces import KvRows

_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
# Before the caches: magic and sequence id (src/llama-context.cpp, io_magic and state_seq_get_data).
_PREFIX = struct.Struct("<Ii")
_MAGIC = 0xAF143CD8
# Before the cells: streams and cells; before the layers: whether V is transposed, and how many layers; before each layer's rows.
_CELLS, _LAYERS, _ROWS = struct.Struct("<II"), struct.Struct("<II"), struct.Struct("<iQ")


@dataclass(frozen=True, kw_only=True)
class CacheForm:
    """One of llama.cpp's two caches: its GGML type, and the bytes of a row of K, or of V, in each of its layers."""

    type: int
    layers: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in all layers, K and V."""
        return 2 * sum(self.layers)


def cache_forms(header: GgufHeader, kv_type: KvType) -> tuple[CacheForm, CacheForm]:
    """Returns the forms of the full and of the sliding cache of a target."""
    number = TYPE_NUMBERS[kv_type]
    stored = TENSOR_TYPES[number]
    rows = owned_rows(header)
    full, sliding = (
        CacheForm(
            type=number, layers=tuple(heads * width * stored.bytes // stored.weights for slides, heads, width in rows if slides == kind)
        )
        for kind in (False, True)
    )
    return full, sliding


def rows_of(state: NDArray[np.uint8], forms: tuple[CacheForm, CacheForm], length: int, first: int) -> KvRows:
    """Takes apart the state of a sequence of `length` rows: those from `first` on, of the sliding layers as far as it has them.

    Raises BackendError if it is not of these forms.
    """
    try:
        if _PREFIX.unpack_from(state.data)[0] != _MAGIC:
            raise ValueError("another magic")
        full, place = _cache_rows(state, _PREFIX.size, forms[0], length, first)
        sliding, place = _cache_rows(state, place, forms[1], length, first)
        if place != len(state) or len(full) != length - first:
            raise ValueError(f"{len(full)} rows from {first} to {length}, {len(state) - place} bytes left over")
    except (ValueError, struct.error) as error:
        raise BackendError(f"llama.cpp's state is not of the form that this version reads ({error}); install a release") from error
    return KvRows(full=full, sliding=sliding)


def _cache_rows(state: NDArray[np.uint8], place: int, form: CacheForm, length: int, first: int) -> tuple[NDArray[np.uint8], int]:
    """Returns the rows [rows, bytes] of one cache from position `first` on, by position, and where the next one begins."""
    streams, count = _CELLS.unpack_from(state.data, place)
    cells = np.frombuffer(state, _CELL, count, place + _CELLS.size)
    order = np.argsort(cells["position"])
    if streams != 1 or not count or (cells["position"][order] != np.arange(length - count, length)).any():
        raise ValueError(f"{count} cells in {streams} streams")
    place += _CELLS.size + cells.nbytes
    if _LAYERS.unpack_from(state.data, place) != (0, len(form.layers)):
        raise ValueError(f"transposed and layers are {_LAYERS.unpack_from(state.data, place)}")
    place += _LAYERS.size
    in_order, order = bool((order[1:] > order[:-1]).all()), order[max(0, count - (length - first)) :]
    rows, column = np.empty((len(order), form.row_bytes), np.uint8), 0
    for width in form.layers * 2:  # K of each layer, then V of each
        if _ROWS.unpack_from(state.data, place) != (form.type, width):
            raise ValueError(f"a row's type and bytes are {_ROWS.unpack_from(state.data, place)}")
        place += _ROWS.size
        layer = state[place : place + count * width].reshape(count, width)
        rows[:, column : column + width] = layer[count - len(order) :] if in_order else layer[order]
        place, column = place + count * width, column + width
    return rows, place


def state_of(rows: KvRows, forms: tuple[CacheForm, CacheForm]) -> NDArray[np.uint8]:
    """Puts together the state of one sequence whose newest rows these are, those of the full layers from position 0 on."""
    length = len(rows.full)
    parts = [np.frombuffer(_PREFIX.pack(_MAGIC, 0), np.uint8)]
    for form, own in zip(forms, (rows.full, rows.sliding), strict=True):
        cells = np.zeros(len(own), _CELL)
        cells["position"], cells["sequences"] = np.arange(length - len(own), length), 1
        parts += [np.frombuffer(_CELLS.pack(1, len(own)), np.uint8), cells.view(np.uint8)]
        parts.append(np.frombuffer(_LAYERS.pack(0, len(form.layers)), np.uint8))
        column = 0
        for width in form.layers * 2:
            parts.append(np.frombuffer(_ROWS.pack(form.type, width), np.uint8))
            parts.append(own[:, column : column + width])
            column += width
    state, place = np.empty(sum(part.size for part in parts), np.uint8), 0
    for part in parts:
        state[place : place + part.size].reshape(part.shape)[...] = part
        place += part.size
    return state
