"""Finds the scale and zero point of every block of weights: round to nearest, and a search that loses less.

Works on blocks alone, without files or packing. A weight is scale * (level - zero), levels are integers from 0 to 2^bits - 1. Blocks are
columns here, [block, blocks]: sums over a block then run along memory, which is several times faster than short rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
# Ranges to try, as fractions of the block's own: clipping the largest weights often costs less than coarser steps for all others.
_PARTS = (0.96, 0.92, 0.88, 0.84, 0.8, 0.75)
# Mirrored, a symmetric block's farthest weight gets the highest level instead of the lowest.
_TURNED_PARTS = (1.0, 0.92, 0.84)
# In an asymmetric block only the upper or only the lower end is cut off.
_END_PARTS = (0.85, 0.7)
# With 256 levels, clipping much gains nothing.
_PARTS_8_BITS = (0.995, 0.985)
# After the best range is known: levels for the scale, then the scale for the levels, in turn.
_REFINEMENTS = 2


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Blocks in integers: levels uint8 [block, blocks], scales float32 [blocks], zeros uint8 [blocks]."""

    levels: NDArray[np.uint8]
    scales: Floats
    zeros: NDArray[np.uint8]


def round_to_nearest(weights: Floats, bits: int, symmetric: bool) -> Levels:
    """Quantizes [block, blocks]: the extreme weights of a block get the outermost levels, the rest the nearest.

    Symmetric: the zero point is 2^(bits - 1) and the weight farthest from 0 gets level 0 (as in llama.cpp's Q4_0), which leaves no
    level unused. Asymmetric: the lowest weight, the highest and 0 are in range.
    """
    return _rounded(weights, *_plain_range(weights, bits, symmetric), bits)


def search(weights: Floats, importance: Floats, bits: int, symmetric: bool) -> Levels:
    """Quantizes [block, blocks] with the least sum of importance * error^2 among the ranges tried; importance has the weights' shape.

    For given levels the best scale is a weighted least squares (llama.cpp's k-quants look for theirs that way). No block is worse than
    round_to_nearest leaves it.
    """
    # Within a block only ratios count: one that is scaled to 1 overflows and underflows nowhere.
    largest = np.maximum(weights.max(axis=0), -weights.min(axis=0))
    unit = np.divide(weights, largest, out=np.zeros_like(weights), where=largest > 0)
    fit = _Fit(unit, importance, bits)
    scales, zeros = plain_scales, plain_zeros = _plain_range(unit, bits, symmetric)
    best = fit.scales(plain_scales, plain_zeros)[1]
    for tried_scales, tried_zeros in _ranges(unit, plain_scales, plain_zeros, bits, symmetric):
        fitted, gain = fit.scales(tried_scales, tried_zeros)
        better = gain > best
        scales, zeros = np.where(better, fitted, scales), np.where(better, tried_zeros, zeros)
        best = np.where(better, gain, best)
    for _ in range(_REFINEMENTS):
        scales = fit.scales(scales, zeros)[0]
    # The stored levels are the nearest under the final scale, in the weights' own unit, so the error is measured on them.
    searched = _rounded(weights, (scales * largest).astype(np.float32), zeros, bits)
    plain = round_to_nearest(weights, bits, symmetric)
    keep = _error(weights, importance, plain) <= _error(weights, importance, searched)
    return Levels(
        levels=np.where(keep, plain.levels, searched.levels),
        scales=np.where(keep, plain.scales, searched.scales),
        zeros=np.where(keep, plain.zeros, searched.zeros),
    )


class _Fit:
    """Fits scales to blocks [block, blocks]; its scratch arrays are reused."""

    def __init__(self, unit: Floats, importance: Floats, bits: int) -> None:
        self._unit, self._importance, self._bits = unit, importance, bits
        self._weighted = unit * importance
        self._steps, self._products = np.empty_like(unit), np.empty_like(unit)

    def scales(self, scales: Floats, zeros: Floats) -> tuple[Floats, Floats]:
        """Returns the best scales [blocks] for the levels that `scales` gives, and by how much they lower the error from that of zeros."""
        steps = _steps(self._unit, scales, zeros, self._bits, self._steps)
        matched = np.multiply(self._weighted, steps, out=self._products).sum(axis=0)
        np.multiply(steps, steps, out=self._products)
        power = np.multiply(self._products, self._importance, out=self._products).sum(axis=0)
        fitted = np.divide(matched, power, out=scales.copy(), where=power > 0)
        return fitted, np.where(power > 0, matched * fitted, 0)


def _ranges(unit: Floats, scales: Floats, zeros: Floats, bits: int, symmetric: bool) -> Iterator[tuple[Floats, Floats]]:
    """Yields scales and zeros [blocks] to try; the given ones are those of the full range."""
    parts = _PARTS if bits == 4 else _PARTS_8_BITS
    top = (1 << bits) - 1
    if symmetric:
        for part in parts:
            yield scales * np.float32(part), zeros
        half = 1 << (bits - 1)
        for part in _TURNED_PARTS if bits == 4 else (1.0,):
            yield scales * np.float32(-part * half / (half - 1)), zeros
        return
    low, high = np.minimum(unit.min(axis=0), 0), np.maximum(unit.max(axis=0), 0)
    ends = [(part, part) for part in parts]
    if bits == 4:
        ends += [(1.0, part) for part in _END_PARTS] + [(part, 1.0) for part in _END_PARTS]
    for lower, upper in ends:
        scale: Floats = (high * np.float32(upper) - low * np.float32(lower)) / np.float32(top)
        yield scale, _zeros(low * np.float32(lower), scale, bits)


def _plain_range(weights: Floats, bits: int, symmetric: bool) -> tuple[Floats, Floats]:
    """Scales and zeros [blocks] of round_to_nearest."""
    low, high = weights.min(axis=0), weights.max(axis=0)
    if symmetric:
        half = np.float32(1 << (bits - 1))
        farthest = np.where(-low >= high, low, high)
        return -farthest / half, np.full_like(farthest, half)
    top = np.float32((1 << bits) - 1)
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scale = high / top - low / top  # (high - low) / top may overflow
    return scale, _zeros(low, scale, bits)


def _zeros(low: Floats, scale: Floats, bits: int) -> Floats:
    """The level [blocks] that stands for 0 where `low` gets level 0."""
    zeros: Floats = np.clip(np.rint(-low * _inverse(scale)), 0, (1 << bits) - 1)
    return zeros


def _rounded(weights: Floats, scales: Floats, zeros: Floats, bits: int) -> Levels:
    levels = _steps(weights, scales, zeros, bits, np.empty_like(weights))
    levels += zeros
    return Levels(levels=levels.astype(np.uint8), scales=scales, zeros=zeros.astype(np.uint8))


def _steps(weights: Floats, scales: Floats, zeros: Floats, bits: int, out: Floats) -> Floats:
    """Puts into `out` how many steps from 0 each weight's nearest level is."""
    np.multiply(weights, _inverse(scales), out=out)
    np.rint(out, out=out)
    np.maximum(out, -zeros, out=out)
    np.minimum(out, np.float32((1 << bits) - 1) - zeros, out=out)
    return out


def _inverse(scales: Floats) -> Floats:
    """1 / scales, and 0 where the scale is 0 (an empty block) or its inverse is beyond float32."""
    inverse = np.zeros_like(scales)
    np.divide(np.float32(1), scales, out=inverse, where=np.abs(scales) >= np.finfo(np.float32).tiny)
    return inverse


def _error(weights: Floats, importance: Floats, rounded: Levels) -> NDArray[np.float64]:
    """Sum of importance * error^2 [blocks], each in units of the block's largest weight."""
    errors = rounded.levels.astype(np.float32)
    errors -= rounded.zeros
    errors *= rounded.scales
    errors -= weights
    largest = np.abs(weights).max(axis=0).astype(np.float64)
    relative = errors / np.where(largest > 0, largest, 1)
    relative *= relative
    relative *= importance
    total: NDArray[np.float64] = relative.sum(axis=0)
    return total
