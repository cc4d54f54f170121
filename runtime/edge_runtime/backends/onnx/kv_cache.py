"""The K/V rows of the ONNX graphs: buffers for graphs with dynamic shapes, and arrays with masks for graphs with fixed shapes."""

from __future__ import annotations

import itertools
import struct
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.onnx.devices import Call, PlacedRows, value_over
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH, MAX_HEAD_DIM, CacheBuffer, CacheLayout, Rotation
from edge_runtime.errors import BundleError, RequestError
from edge_runtime.interfaces import KvRows

FULL, SLIDING = "full", "sliding"
BUFFER, ROWS = "buffer", "rows"
DTYPES: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "i8": np.int8}
# The angles of this many positions are computed at a time, to limit the memory of their float64 values.
_POSITIONS = 1024
# The most rows of a verify.
MAX_ROWS = MAX_DRAFT_LENGTH + 1
# A manifest is not trusted to ask for buffers of more heads.
_MAX_HEADS = 1024


class RowCount(NamedTuple):
    """OrtValues for the buffers of one kind of layer: how many rows they hold, counting those about to be written, and the last index."""

    last: Any
    rows: Any


# The four numbers of the two RowCounts, which one call writes.
_COUNTS = struct.Struct("=4i")


class LayerBuffers(ABC):
    """The buffers [1, kv_heads, rows, head_dim] of all layers that own K/V rows; saves and restores rows.

    A subclass decides which row of a buffer has which position. `kept` is how many of the newest sliding rows are always held.
    """

    kept: int

    def __init__(self, layout: CacheLayout) -> None:
        """Raises BundleError for buffers that this version cannot allocate."""
        check_buffers(layout)
        self.window = layout.sliding.window if layout.sliding else None
        self._buffers: dict[str, list[NDArray[Any]]] = {FULL: [], SLIDING: []}

    @property
    @abstractmethod
    def lost(self) -> int:
        """How many of the oldest sliding rows are no longer held."""

    @abstractmethod
    def _sliding_places(self, first: int, length: int) -> slice | NDArray[np.int64]:
        """Returns the rows of the sliding buffers for the positions from `first` to `length` - 1, as far as they are still held."""

    @abstractmethod
    def _set_held(self, length: int, held: int) -> None:
        """Notes that there are `length` rows, of which the sliding buffers hold the last `held`."""

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of one position: in all full buffers together, and in all sliding ones."""
        full, sliding = (sum(array[0, :, 0].nbytes for array in self._buffers[kind]) for kind in (FULL, SLIDING))
        return full, sliding

    @property
    def sliding_rows(self) -> int:
        """How many of the newest sliding rows the target and the drafter attend to."""
        return 0 if self.window is None else self.window + 1

    @property
    def rollback_floor(self) -> int:
        """The smallest length above 0 at which all rows are held that the target and the drafter attend to."""
        return 1 if self.window is None or not self.lost else self.lost + self.window + 1

    def rows_from(self, first: int, length: int) -> KvRows:
        """Returns the rows of the positions from `first` to `length` - 1; for sliding buffers, those of them that are still held."""
        places = self._sliding_places(first, length)
        return KvRows(
            full=joined_rows([array[:, :, first:length] for array in self._buffers[FULL]], length - first),
            sliding=joined_rows([array[:, :, places] for array in self._buffers[SLIDING]], length - first),
        )

    def put_rows(self, rows: KvRows) -> None:
        """Replaces all rows by `rows`."""
        length, held = len(rows.full), min(len(rows.sliding), self.kept)
        self._set_held(length, held)
        put_joined(rows.full, self._buffers[FULL], slice(length))
        put_joined(rows.sliding[len(rows.sliding) - held :], self._buffers[SLIDING], self._sliding_places(length - held, length))


class KeyValueCache(LayerBuffers):
    """The buffers of graphs with dynamic shapes. Row r of a full buffer has position r; of a sliding one, position `first` + r.

    When a sliding buffer is full, its newest rows are copied to its front, so its size does not grow with the context.
    """

    def __init__(self, layout: CacheLayout, context: int) -> None:
        super().__init__(layout)
        buffers = layout.buffers
        # The drafter attends to `window` + 1 rows (see the exporter's graphs), and must still do so after a rollback by the slack.
        self.kept = 0 if self.window is None else self.window + 1 + layout.rewind_slack
        spare = context + MAX_ROWS
        sliding = next((buffer.rows for buffer in buffers if buffer.kind == SLIDING), 0)
        self.capacity = {FULL: spare, SLIDING: min(sliding, spare)}
        self.first = 0
        numbers = np.zeros(4, np.int32)
        self._numbers = numbers.data
        self.counts = {
            kind: RowCount(value_over(numbers[at : at + 1]), value_over(numbers[at + 1 : at + 2].reshape(())))
            for at, kind in ((0, FULL), (2, SLIDING))
        }
        self._arrays: dict[str, NDArray[Any]] = {}
        self.values: dict[str, Any] = {}
        # Buffers that the target reads by rows, each with the graph's output for its new rows.
        self.read_by_rows: dict[str, str] = {}
        self._rows: dict[str, PlacedRows] = {}  # of the buffers that the target or the drafter reads by rows
        self._drafter_by_rows: dict[str, str] = {}
        for buffer in buffers:
            for name in (buffer.key, buffer.value):
                shape = (1, buffer.kv_heads, self.capacity[buffer.kind], buffer.head_dim)
                self._arrays[name] = np.zeros(shape, DTYPES[buffer.dtype])
                if ROWS in (buffer.read, buffer.drafter_read):
                    self._rows[name] = PlacedRows.of(self._arrays[name])
                if buffer.read == ROWS:
                    self.read_by_rows[name] = f"new_{name}"
                else:
                    self.values[name] = value_over(self._arrays[name])
                if buffer.drafter_read == ROWS:
                    self._drafter_by_rows[name] = buffer.kind
                self._buffers[buffer.kind].append(self._arrays[name])

    def place_rows(self, call: Call, length: int, new: int) -> None:
        """For buffers that the target reads by rows: binds their first `length` rows as inputs, the `new` rows after them as outputs."""
        for name, output in self.read_by_rows.items():
            rows = self._rows[name]
            call.place_input(name, rows, 0, length)
            call.place_output(output, rows, length, new)

    def place_drafter_rows(self, call: Call, names: Container[str], length: int) -> None:
        """Binds the rows that the drafter attends to after `length` rows, of the buffers among `names` that it reads by rows."""
        for name, kind in self._drafter_by_rows.items():
            if name in names:
                first, rows = self.drafter_rows(kind, length)
                call.place_input(name, self._rows[name], first, rows)

    def drafter_rows(self, kind: str, length: int) -> tuple[int, int]:
        """Returns the rows of a buffer that the drafter attends to after `length` rows: the first one, and how many."""
        end = length if kind == FULL else length - self.first
        rows = end if kind == FULL or self.window is None else min(end, self.window + 1)
        return end - rows, rows

    def array(self, name: str) -> NDArray[Any]:
        """Returns a buffer."""
        return self._arrays[name]

    @property
    def names(self) -> Iterable[str]:
        """The names of all buffers."""
        return self._arrays

    @property
    def chunk(self) -> int:
        """How many rows one forward may write, whatever the buffers hold."""
        moves = self._buffers[SLIDING] and self.capacity[SLIDING] < self.capacity[FULL]
        return self.capacity[SLIDING] - self.kept if moves else self.capacity[FULL]

    def make_room(self, length: int, rows: int) -> None:
        """Prepares for a forward of `rows` rows after the first `length`; sets the counts that the graphs read."""
        if length - self.first + rows > self.capacity[SLIDING] and self._buffers[SLIDING]:
            self._move(length)
        self.set_counts(length + rows)

    def set_counts(self, length: int) -> None:
        """Tells the graphs that the buffers hold `length` rows."""
        sliding = length - self.first
        _COUNTS.pack_into(self._numbers, 0, length - 1, length, sliding - 1, sliding)

    def restart(self) -> None:
        """Forgets all rows."""
        self.first = 0

    @property
    def lost(self) -> int:
        return self.first

    def _sliding_places(self, first: int, length: int) -> slice:
        return slice(max(first - self.first, 0), length - self.first)

    def _set_held(self, length: int, held: int) -> None:
        self.first = length - held if self._buffers[SLIDING] else 0

    def _move(self, length: int) -> None:
        held = length - self.first
        kept = min(self.kept, held)
        for array in self._buffers[SLIDING]:
            array[:, :, :kept] = array[:, :, held - kept : held]
        self.first += held - kept


def check_length(draft_length: int) -> None:
    """Raises RequestError for a draft that is longer than any pair supports."""
    if draft_length >= MAX_ROWS:
        raise RequestError(f"a draft of {draft_length} tokens is longer than the {MAX_ROWS - 1} this bundle was opened for")


def joined_rows(arrays: Sequence[NDArray[Any]], rows: int) -> NDArray[np.uint8]:
    """Joins buffers [1, kv_heads, rows, head_dim] to bytes [rows, bytes]: each row has those of all buffers, one after the other.

    Without buffers, returns `rows` rows of 0 bytes.
    """
    if not arrays:
        return np.empty((rows, 0), np.uint8)
    joined = np.empty((arrays[0].shape[2], sum(_width(array) for array in arrays)), np.uint8)
    for piece, place in zip(arrays, _columns(arrays), strict=True):
        _by_head(joined[:, place], piece)[...] = piece[0].view(np.uint8).transpose(1, 0, 2)
    return joined


def put_joined(joined: NDArray[np.uint8], arrays: Sequence[NDArray[Any]], places: slice | NDArray[np.int64]) -> None:
    """Writes rows that `joined_rows` made to the rows `places` of the buffers."""
    for array, place in zip(arrays, _columns(arrays), strict=True):
        array[0].view(np.uint8).transpose(1, 0, 2)[places] = _by_head(joined[:, place], array)


def _by_head(rows: NDArray[np.uint8], array: NDArray[Any]) -> NDArray[np.uint8]:
    return rows.reshape(len(rows), array.shape[1], array.shape[3] * array.itemsize)


def _columns(arrays: Sequence[NDArray[Any]]) -> list[slice]:
    ends = list(itertools.accumulate(_width(array) for array in arrays))
    return [slice(end - _width(array), end) for end, array in zip(ends, arrays, strict=True)]


def _width(array: NDArray[Any]) -> int:
    return int(array.shape[1] * array.shape[3] * array.itemsize)


class Rotations:
    """Cosines and sines by position and pair, float32 [context, head_dim/2], and OrtValues of them; with `halved` also in float16."""

    def __init__(self, rotations: Sequence[Rotation], context: int, *, halved: bool) -> None:
        self.tables: dict[str, NDArray[np.floating]] = dict(rotary_tables(rotations, context))
        if halved:
            self.tables |= {f"{name}_f16": table.astype(np.float16) for name, table in self.tables.items()}
        self.values: dict[str, Any] = {name: value_over(array) for name, array in self.tables.items()}


def rotary_tables(rotations: Sequence[Rotation], context: int) -> dict[str, NDArray[np.float32]]:
    """Returns cosines and sines by position and pair, float32 [context, head_dim/2], as `cosine_KIND` and `sine_KIND` by kind of layer."""
    tables: dict[str, NDArray[np.float32]] = {}
    for rotation in rotations:
        cosine, sine = (np.empty((context, rotation.head_dim // 2), np.float32) for _ in range(2))
        for first in range(0, context, _POSITIONS):
            end = min(first + _POSITIONS, context)
            angles = _rotation_angles(rotation, np.arange(first, end, dtype=np.float32))
            cosine[first:end], sine[first:end] = np.cos(angles), np.sin(angles)
        tables |= {f"cosine_{rotation.kind}": cosine, f"sine_{rotation.kind}": sine}
    return tables


def _rotation_angles(rotation: Rotation, positions: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns angles [positions, head_dim/2], rounded to float32 as in transformers; 0 for pairs that are not rotated."""
    frequencies = np.zeros(rotation.head_dim // 2, np.float32)
    exponents = np.arange(0, 2 * rotation.rotated_pairs, 2, dtype=np.float32) / np.float32(rotation.head_dim)
    frequencies[: rotation.rotated_pairs] = np.float32(1) / np.float32(rotation.base) ** exponents
    return (positions[:, None] * frequencies[None]).astype(np.float64)


def check_buffers(layout: CacheLayout) -> None:
    """Raises BundleError for buffers of an unknown format, or too small for the window and the promised rollback."""
    buffers = layout.buffers
    owners = set(layout.full.owner_layers) | set(layout.sliding.owner_layers if layout.sliding else ())
    if {buffer.layer for buffer in buffers} != owners or len({name for b in buffers for name in (b.key, b.value)}) != 2 * len(buffers):
        raise BundleError("the cache layout does not name one pair of ONNX buffers for each owner layer; export the bundle again")
    for buffer in buffers:
        sound = 0 < buffer.kv_heads <= _MAX_HEADS and 0 < buffer.head_dim <= MAX_HEAD_DIM and buffer.kind in (FULL, SLIDING)
        # Reading by rows needs contiguous rows, so a single head.
        known = {BUFFER, ROWS} if buffer.kv_heads == 1 else {BUFFER}
        sound = sound and {buffer.read, buffer.drafter_read} <= known and (buffer.read == BUFFER or buffer.kind == FULL)
        if not sound or buffer.dtype not in DTYPES:
            raise BundleError(f"the cache layout's buffer {buffer.key!r} ({_words(buffer)}) is not one this reader knows; upgrade edge-mtp")
        window = layout.sliding.window if layout.sliding else None
        if buffer.kind == SLIDING and (window is None or buffer.rows < window + 1 + layout.rewind_slack + MAX_ROWS):
            raise BundleError(
                f"the sliding buffer {buffer.key!r} of {buffer.rows} rows is too short for a window of {window}; export again"
            )


def _words(buffer: CacheBuffer) -> str:
    return f"{buffer.kind}, {buffer.kv_heads} heads of {buffer.head_dim}, {buffer.dtype}, read by {buffer.read} and {buffer.drafter_read}"


# The K/V rows of graphs with fixed shapes: the graphs read the arrays, Python writes them, and masks say which rows are visible.
#
# A sliding buffer is a ring: position p is in row p modulo its number of rows.

# Added to the scores of rows that are not visible. It is finite in float16, in which an NPU may compute, and exp of it is 0 there.
HIDDEN = np.float32(-30000)
_MAX_ROWS = 1 << 21


class StaticRows(LayerBuffers):
    """The buffers of graphs with fixed shapes, float32 [1, kv_heads, rows, head_dim], bound to every graph once."""

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
        return max(self._gone, self._written - self.rows.get(SLIDING, self._written))

    def _sliding_places(self, first: int, length: int) -> NDArray[np.int64]:
        return np.arange(max(first, self.lost), length) % self.rows.get(SLIDING, 1)

    def _set_held(self, length: int, held: int) -> None:
        self._written, self._gone = length, length - held

    def write(self, new_rows: dict[str, NDArray[np.float32]], start: int, count: int) -> None:
        """Writes the first `count` rows of new_rows[name] [1, kv_heads, rows, head_dim] to the positions from `start` on."""
        for name, rows in new_rows.items():
            held = self.rows[self._kinds[name]]
            first = max(0, count - held)
            places = np.arange(start + first, start + count) % held
            self.arrays[name][:, :, places] = rows[:, :, first:count]
        self._written = max(self._written, start + count)

    def mask(self, kind: str, out: NDArray[np.float32], start: int) -> None:
        """Fills the mask [1, 1, rows, held + rows] for queries at the positions from `start` on: buffer rows first, then new rows."""
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
        """Fills the mask [1, 1, 1, held] for a drafter's query after `length` rows; it attends to `window` + 1 sliding rows."""
        positions = self._positions(kind, length)
        first = length - 1 - self.window if kind == SLIDING and self.window is not None else 0
        out[0, 0, 0] = np.where((positions >= 0) & (positions >= first), np.float32(0), HIDDEN)

    def restart(self) -> None:
        """Forgets all rows."""
        self._written = self._gone = 0

    def _positions(self, kind: str, length: int) -> NDArray[np.int64]:
        """Returns the position of each row of a buffer after `length` rows; negative for an empty row."""
        held = self.rows[kind]
        places = np.arange(held)
        if kind == FULL:
            return np.where(places < length, places, -1)
        return length - 1 - (length - 1 - places) % held
