"""llama.cpp's form of a sequence's K/V rows, checked before llama.cpp reads it.

llama.cpp compares types and row sizes itself, but it takes positions as they come, and a wrong one ends the process or bends the
attention. The form is what llama_kv_cache::state_write writes (src/llama-kv-cache.cpp), of the full cache and then of the sliding one.
"""

from __future__ import annotations

import struct

import numpy as np

from edge_runtime.errors import RequestError

_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
# Magic and sequence id, before the caches (src/llama-context.cpp, state_seq_get_data).
_PREFIX_BYTES = 8
_MAX_LAYERS = 4096


class _Walk:
    """Steps through the bytes; raises RequestError rather than leave them."""

    def __init__(self, state: bytes) -> None:
        self.state = state
        self.place = 0

    def skip(self, count: int) -> int:
        start = self.place
        if count < 0 or start + count > len(self.state):
            raise damaged("it ends too early")
        self.place = start + count
        return start

    def number(self, form: str) -> int:
        start = self.skip(struct.calcsize(form))
        value: int = struct.unpack_from(form, self.state, start)[0]
        return value


def damaged(what: str) -> RequestError:
    """Returns the error for a state that is not one."""
    return RequestError(f"the KV state is damaged: {what}; save it again")


def check_state(state: bytes, length: int, window: int) -> None:
    """Raises RequestError unless `state` holds rows of the positions 0..length-1, the sliding cache at least those that the next
    token attends to. `window` is 0 where there is no sliding cache."""
    walk = _Walk(state)
    walk.skip(_PREFIX_BYTES)
    _check_cache(walk, length, length)
    if window:
        _check_cache(walk, length, min(length, window - 1))
    if walk.place != len(state):
        raise damaged(f"{len(state) - walk.place} bytes are left over")


def _check_cache(walk: _Walk, length: int, min_rows: int) -> None:
    if walk.number("<I") != 1:
        raise damaged("it has more than one stream")
    count = walk.number("<I")
    if not min_rows <= count <= length:
        raise damaged(f"it holds {count} rows of {length}")
    start = walk.skip(count * _CELL.itemsize)
    cells = np.frombuffer(walk.state, _CELL, count, start)
    if (cells["sequences"] != 1).any() or (np.sort(cells["position"]) != np.arange(length - count, length)).any():
        raise damaged("its rows do not stand where they belong")
    transposed, layers = walk.number("<I"), walk.number("<I")
    if transposed or not 0 < layers <= _MAX_LAYERS:
        raise damaged(f"it has {layers} layers, transposed: {transposed}")
    for _ in range(2 * layers):  # K of each layer, then V of each
        walk.number("<i")
        walk.skip(count * walk.number("<Q"))
