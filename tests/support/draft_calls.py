"""A draft of the kernels written down for an emulated processor: all that it reads and its description, in one piece of memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.backends.kernels.draft import DraftWeights, NativeDraft, _described
from fuzzing.random_drafter import RandomDrafters, Rows, Sizes
from row_calls import Call

STEPS = 3
_LINE, _PIECE_BYTES = 64, 1 << 20


class _Piece:
    """Memory in which arrays and structures lie one behind the other."""

    def __init__(self) -> None:
        self._whole = np.zeros(_PIECE_BYTES + _LINE, np.uint8)
        self.bytes = self._whole[-self._whole.ctypes.data % _LINE :][:_PIECE_BYTES]
        self.base = self.bytes.ctypes.data
        self._end = 0
        self.structures: list[slice] = []

    def take(self, size: int) -> slice:
        """The next bytes, from a line on."""
        start = self._end
        self._end = start + -(-size // _LINE) * _LINE
        assert self._end <= _PIECE_BYTES
        return slice(start, start + size)

    def place(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy in it."""
        copy = self.bytes[self.take(array.nbytes)].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def structure(self, of: Any) -> int:
        """Copies a structure; returns where it lies."""
        at = self.take(ctypes.sizeof(of))
        self.bytes[at] = np.frombuffer(bytes(of), np.uint8)
        self.structures.append(at)
        return at.start

    def addresses(self) -> NDArray[np.int64]:
        """Where addresses stand, which then count from the beginning."""
        places = []
        for at in self.structures:
            words = self.bytes[at].view(np.int64)
            inside = np.flatnonzero((words >= self.base) & (words < self.base + _PIECE_BYTES))
            words[inside] -= self.base
            places += [at.start + 8 * int(place) for place in inside]
        return np.array(places, np.int64)


@dataclass(frozen=True)
class DraftCall(Call):
    """A draft; its result float32 [2, STEPS] are tokens and their probabilities."""

    weights: DraftWeights
    rows: tuple[Rows, ...]
    hidden: NDArray[np.float32]

    def here(self, variant: str) -> NDArray[np.float32]:
        draft, shares = NativeDraft(self.weights, longest=STEPS, name=variant), list[float]()
        for place, rows in enumerate(self.rows):
            rows.describe(draft, place)
        tokens = draft.run(1, STEPS, self.hidden, None, lambda share: shares.append(share) or True)  # type: ignore[func-returns-value]
        draft.close()
        return np.array([tokens, shares], np.float32)


def one_draft(kind: str, type_: int, sizes: Sizes) -> DraftCall:
    """A draft with random weights of this kind, on K/V rows of that type."""

    def made(makes: RandomDrafters) -> tuple[DraftWeights, tuple[Rows, ...], NDArray[np.float32]]:
        weights = makes.weights(sizes, kind)
        rows = tuple(makes.rows(type_, heads, dim, 140, listed=True) for heads, dim in zip(sizes.kv_heads, sizes.dims, strict=True))
        return weights, rows, makes.place(makes.random.standard_normal(sizes.target).astype(np.float32))

    piece = _Piece()
    shape_place = piece.take(4096)
    weights, rows, hidden = made(RandomDrafters(np.random.default_rng(type_), piece.place))
    draft = NativeDraft(weights, longest=STEPS)
    for place, source in enumerate(rows):
        source.describe(draft, place)
    shape = _described(weights, len(rows))
    shape.layer = piece.base + piece.structure(shape._layers)
    piece.bytes[shape_place][: ctypes.sizeof(shape)] = np.frombuffer(bytes(shape), np.uint8)
    piece.structures.append(slice(shape_place.start, shape_place.start + ctypes.sizeof(shape)))
    tokens, probabilities = piece.take(8 * STEPS).start, piece.take(4 * STEPS).start
    call = draft._call
    call.token, call.steps, call.hidden = 1, STEPS, hidden.ctypes.data
    call.sources = piece.base + piece.structure(draft.sources)
    call.tokens, call.probabilities = piece.base + tokens, piece.base + probabilities
    call_place = piece.structure(call)
    addresses = piece.addresses()
    draft.close()
    numbers = call_place, tokens, probabilities, len(addresses), STEPS
    return DraftCall("draft", numbers, (piece.bytes.copy(), addresses), (2, STEPS), *made(RandomDrafters(np.random.default_rng(type_))))
