"""The K/V rows of graphs of fixed shapes: arrays that the graphs read and the host writes; masks define which rows are visible.

A sliding buffer is a ring: position p lies in row p modulo its rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.onnx.kv_cache import FULL, SLIDING, LayerBuffers
from edge_runtime.backends.onnx.loader import value_over
from edge_runtime.bundle.manifest import CacheLayout
from edge_runtime.errors import BundleError

# Added to what is not seen. Float16, in which an NPU may compute, holds it, and its exponential is zero there.
HIDDEN = np.float32(-30000)
_MAX_ROWS = 1 << 21


class StaticRows(LayerBuffers):
    """Buffers of all owner layers, float32 [1, kv_heads, rows, head_dim], bound once to every graph."""

    def __init__(self, layout: CacheLayout) -> None:
        super().__init__(layout)
        self.rows: dict[str, int] = {}
        self.arrays: dict[str, NDArray[np.float32]] = {}
        self.values: dict[str, Any] = {}
        self._kinds: dict[str, str] = {}
        for buffer in layout.buffers:
            if not 0 < buffer.rows <= _MAX_ROWS or self.rows.setdefault(buffer.kind, buffer.rows) != buffer.rows:
                raise BundleError(
                    f"the buffer {buffer.key!r} of {buffer.rows} rows is not as long as others of its kind, or too long; export again"
                )
            for name in (buffer.key, buffer.value):
                array = np.zeros((1, buffer.kv_heads, buffer.rows, buffer.head_dim), np.float32)
                self.arrays[name], self.values[name], self._kinds[name] = array, value_over(array), buffer.kind
                self._buffers[buffer.kind].append(array)
        self.kept = self.rows.get(SLIDING, 0)
        self._written = self._gone = 0

    @property
    def lost(self) -> int:
        """How many of the oldest sliding rows are gone."""
        return max(self._gone, self._written - self.rows.get(SLIDING, self._written))

    def _sliding_places(self, first: int, length: int) -> NDArray[np.int64]:
        return np.arange(max(first, self.lost), length) % self.rows.get(SLIDING, 1)

    def _set_held(self, length: int, held: int) -> None:
        self._written, self._gone = length, length - held

    def write(self, new_rows: dict[str, NDArray[np.float32]], start: int, count: int) -> None:
        """Writes the first `count` rows of new_rows[name] [1, kv_heads, rows, head_dim] as positions from `start` on."""
        for name, rows in new_rows.items():
            held = self.rows[self._kinds[name]]
            first = max(0, count - held)
            places = np.arange(start + first, start + count) % held
            self.arrays[name][:, :, places] = rows[:, :, first:count]
        self._written = max(self._written, start + count)

    def mask(self, kind: str, out: NDArray[np.float32], start: int) -> None:
        """Fills the mask [1, 1, rows, held + rows] of queries at positions from `start` on, behind `start` rows."""
        rows, held = out.shape[2], self.rows[kind]
        offsets = np.arange(rows)
        own = offsets[None] <= offsets[:, None]
        past = np.broadcast_to(self._positions(kind, start) >= 0, (rows, held))
        if kind == SLIDING:
            assert self.window is not None
            own = own & (offsets[:, None] - offsets[None] < self.window)
            past = past & (self._positions(kind, start)[None] > (start - self.window + offsets)[:, None])
        out[0, 0, :, :held] = np.where(past, np.float32(0), HIDDEN)
        out[0, 0, :, held:] = np.where(own, np.float32(0), HIDDEN)

    def drafter_mask(self, kind: str, out: NDArray[np.float32], length: int) -> None:
        """Fills the mask [1, 1, 1, held] of a query behind `length` rows: a drafter sees `window` + 1 of them."""
        positions = self._positions(kind, length)
        first = length - 1 - self.window if kind == SLIDING and self.window is not None else 0
        out[0, 0, 0] = np.where((positions >= 0) & (positions >= first), np.float32(0), HIDDEN)

    def restart(self) -> None:
        """Forgets everything."""
        self._written = self._gone = 0

    def _positions(self, kind: str, length: int) -> NDArray[np.int64]:
        """The position each row of a buffer holds when `length` are there, below 0 for none."""
        held = self.rows[kind]
        places = np.arange(held)
        if kind == FULL:
            return np.where(places < length, places, -1)
        return length - 1 - (length - 1 - places) % held
