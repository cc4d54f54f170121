"""Weights of quantization-aware training: each 32 along a row are q * s with q from -8 to 7, which q4_0 and int4 can hold exactly.

They are stored as bfloat16. llama.cpp's rule s = extremum / -8 finds few of these grids again, as the greatest level of a block need not
be -8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from edge_export.checkpoint.safetensors import StoredTensor, read_rows

BLOCK = 32
_LEVELS = 8
# A stored value is off its grid by half a unit in the last place of bfloat16; a step is at least 16 times this.
_TOLERANCE = 2.0**-7
_EXACT_TOLERANCE = 2.0**-20
# Blocks of a tensor that are tried before all of it counts as lying on a grid.
_SAMPLE_BLOCKS = 4096
# Blocks at once: they stay in a core's cache with what is computed of them.
_PIECE_BLOCKS = 1 << 13


@dataclass(frozen=True)
class Grid:
    """Levels int8 [n, 32], scales float32 [n], which blocks lie on a grid, bool [n], and which come back bit for bit, bool [n]."""

    levels: NDArray[np.int8]
    scales: NDArray[np.float32]
    on_grid: NDArray[np.bool_]
    exact: NDArray[np.bool_]


def find_grid(weights: NDArray[np.float32], *, half_scales: bool) -> Grid:
    """Finds the grid of blocks [n, 32]; `half_scales` rounds scales to float16, as q4_0 stores them.

    Blocks on no grid get the levels of llama.cpp's rule for q4_0.
    """
    parts = [_find(weights[first : first + _PIECE_BLOCKS], half_scales) for first in range(0, len(weights), _PIECE_BLOCKS)]
    if not parts:
        return Grid(np.empty((0, BLOCK), np.int8), np.empty(0, np.float32), np.empty(0, bool), np.empty(0, bool))
    return Grid(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("levels", "scales", "on_grid", "exact")))


def lies_on_grid(tensor: StoredTensor) -> bool:
    """Whether a matrix lies on a grid, as far as a sample of its rows shows. Raises CheckpointError."""
    if len(tensor.shape) < 2 or tensor.shape[-1] % BLOCK:
        return False
    for piece in read_rows(tensor):
        blocks = piece.reshape(-1, BLOCK)[:_SAMPLE_BLOCKS]
        return bool(blocks.any()) and bool(find_grid(blocks, half_scales=False).on_grid.all())
    return False


def _find(weights: NDArray[np.float32], half_scales: bool) -> Grid:
    rounded = not (weights.view(np.uint32) & np.uint32(0xFFFF)).any()
    largest = np.abs(weights).max(axis=1)
    extremum = np.take_along_axis(weights, np.abs(weights).argmax(axis=1)[:, None], axis=1)[:, 0]
    scales = extremum / np.float32(-_LEVELS)
    on_grid: NDArray[np.bool_] = largest == np.float32(0)
    for level in range(1, _LEVELS + 1):
        left = np.flatnonzero(~on_grid)
        if not len(left):
            break
        step = largest[left] / np.float32(level) if level < _LEVELS else extremum[left] / np.float32(-_LEVELS)
        part = weights[left]
        # A subnormal block has no step that float32 can hold.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            off = np.abs(part - np.rint(part / step[:, None]) * step[:, None]).max(axis=1)
        fits = off <= largest[left] * np.float32(_TOLERANCE if rounded else _EXACT_TOLERANCE)
        scales[left[fits]] = step[fits]
        on_grid[left[fits]] = True
    safe = np.where(scales == 0, np.float32(1), scales)[:, None]
    levels = np.clip(np.rint(weights / safe), -_LEVELS, _LEVELS - 1).astype(np.int8)
    scales = _refined(weights, levels, scales, on_grid) if rounded else scales
    if half_scales:
        scales = _nearest_half(weights, levels, scales, rounded)
    exact: NDArray[np.bool_] = np.all(_equal(weights, levels, scales, rounded), axis=1)
    return Grid(levels, scales, on_grid, exact)


def _refined(
    weights: NDArray[np.float32], levels: NDArray[np.int8], scales: NDArray[np.float32], on_grid: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """The middle of the scales with which every level of a block rounds to its bfloat16; the old scale where there is none."""
    size = np.abs(weights).astype(np.float64)
    count = np.abs(levels).astype(np.float64)
    # bfloat16 has 8 significant bits: half a unit in the last place of a value in 2^e..2^(e+1) is 2^(e-8).
    mantissa, exponent = np.frexp(size)
    half = np.ldexp(1.0, exponent - 9)
    # Below a power of two, values are twice as dense.
    below = np.where(mantissa == 0.5, half / 2, half)
    with np.errstate(divide="ignore", invalid="ignore"):
        low = np.where(count > 0, (size - below) / count, 0.0).max(axis=1)
        high = np.where(count > 0, (size + half) / count, np.inf).min(axis=1)
    fits = on_grid & (low <= high) & np.isfinite(high)
    middle = np.where(fits, (low + np.where(np.isfinite(high), high, 0.0)) / 2, 0.0) * np.where(scales < 0, -1.0, 1.0)
    return np.where(fits, middle, scales).astype(np.float32)


def _nearest_half(
    weights: NDArray[np.float32], levels: NDArray[np.int8], scales: NDArray[np.float32], rounded: bool
) -> NDArray[np.float32]:
    """The float16 near each scale that brings most values back."""
    with np.errstate(over="ignore"):
        nearest = scales.astype(np.float16)
    best, matches = nearest, _equal(weights, levels, nearest.astype(np.float32), rounded).sum(axis=1)
    for direction in (-np.inf, np.inf):
        other = np.nextafter(nearest, np.float16(direction))
        count = _equal(weights, levels, other.astype(np.float32), rounded).sum(axis=1)
        best, matches = np.where(count > matches, other, best), np.maximum(count, matches)
    return best.astype(np.float32)


def _equal(weights: NDArray[np.float32], levels: NDArray[np.int8], scales: NDArray[np.float32], rounded: bool) -> NDArray[np.bool_]:
    """Which values [n, 32] come back: as stored, in bfloat16 where they are."""
    with np.errstate(invalid="ignore"):
        back = levels.astype(np.float32) * scales[:, None]
    if rounded:
        back = back.astype(bfloat16).astype(np.float32)
    equal: NDArray[np.bool_] = back == weights
    return equal
