"""Matrices in 4 or 8 bits, in the layout of ONNX Runtime's MatMulNBits and GatherBlockQuantized.

Layout (onnxruntime, docs/ContribOperators.md, com.microsoft.MatMulNBits): each row of [N, K] is cut into blocks along K, and the last
block is padded. Two 4-bit levels share a byte, the first in the low half. Levels are integers from 0 to 2^bits - 1, and a weight is
scale * (level - 2^(bits - 1)).

Scales are found by a search. Inside this module, blocks are columns, [block, blocks], because sums over a block then run along memory,
which is several times faster than over short rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.weight_formats import BLOCK, find_grid
from edge_export.errors import ExportError
from edge_export.quantization.importance import MIN_IMPORTANCE, Factor, Floats, Rounded, compensated, inverses

BITS, BLOCKS = (4, 8), (32, 64, 128)
# Weights per piece of work. Computation is several times faster if a piece and all its intermediates fit into a core's cache.
_PIECE = 1 << 16
_TOP_OF_4_BITS = 15
# Ranges to try, by bits, as fractions of the block's full range. Clipping the largest weights often costs less than a coarser step for
# all other weights. With 256 levels, strong clipping gains nothing.
_PARTS = {4: (0.96, 0.92, 0.88, 0.84, 0.8, 0.75), 8: (0.995, 0.985)}
# The same with the scale's sign reversed: the weight that is farthest from 0 gets the highest level instead of the lowest.
_TURNED_PARTS = {4: (1.0, 0.92, 0.84), 8: (1.0,)}
# How often, after the best range is found, the levels are recomputed for the scale and then the scale for the levels.
_REFINEMENTS = 2
# The factor by which a block's error may grow when its scale is rounded to float16. On average it hardly grows. But where the error was
# 0, weights lie on a grid, and subnormal float16 scales are too coarse for that grid.
_HALVES_LOSE = 1.25


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """How to quantize: 4 or 8 bits, blocks of 32, 64 or 128."""

    bits: int
    block: int

    def __post_init__(self) -> None:
        # Nothing is quantized to 2 bits here; such weights are copied from checkpoints that have them.
        if self.bits not in (2, *BITS) or self.block not in BLOCKS:
            bits, blocks = (" or ".join(map(str, values)) for values in (BITS, BLOCKS))
            raise ExportError(f"{self.bits} bits in blocks of {self.block} is no weight format; bits are {bits}, blocks {blocks}")


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """A quantized matrix [N, K]; `columns` is K. `packed` is uint8 [N, blocks, block * bits / 8], `scales` float32 [N, blocks]."""

    packed: NDArray[np.uint8]
    scales: Floats
    spec: WeightSpec
    columns: int

    def levels(self) -> NDArray[np.uint8]:
        """The levels [N, K], one per byte."""
        return np.ascontiguousarray(_unpack(self.packed, self.spec.bits).reshape(len(self.packed), -1)[:, : self.columns])


def quantize_matrix(weight: Floats, spec: WeightSpec, importance: Floats | None = None, factor: Factor | None = None) -> PackedMatrix:
    """Quantizes weight [N, K]. `importance` [K] weights the errors of each column; it is the mean square of the column's input.

    With `factor`, which describes the second moments of the inputs, 4-bit levels are chosen so that they compensate each other's errors;
    with 8 bits there is little to gain. Rows are independent, so a large matrix may be quantized in pieces of rows.
    Raises ExportError if a weight is not finite, or an importance is negative, not finite, or not one per column.
    """
    if weight.ndim != 2 or not weight.size:
        raise ExportError(f"a weight of shape {list(weight.shape)} is not a matrix; quantize matrices of rows and columns only")
    rows, columns = weight.shape
    blocks = -(-columns // spec.block)
    step = max(1, _PIECE // (blocks * spec.block))
    of_row = _block_importance(importance, columns, spec.block)
    counts = np.tile(of_row, min(step, rows))
    packed = np.empty((rows, blocks, spec.block * spec.bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    for first in range(0, rows, step):
        piece = np.zeros((min(step, rows - first), blocks * spec.block), np.float32)
        piece[:, :columns] = weight[first : first + step]
        _check_finite(piece, first)
        quantized = _quantized(piece, spec, counts)
        here = slice(first, first + len(piece))
        packed[here] = _pack(quantized.levels.T, spec.bits).reshape(len(piece), blocks, -1)
        scales[here] = quantized.scales.reshape(-1, blocks)
    made = PackedMatrix(packed=packed, scales=scales, spec=spec, columns=columns)
    return made if factor is None or spec.bits != 4 else _compensated(weight, made, of_row, factor)


def _compensated(weight: Floats, plain: PackedMatrix, importance: Floats, factor: Factor) -> PackedMatrix:
    """Returns a 4-bit matrix whose products have less error. `importance` [block, blocks] weights errors in the choice of scales."""
    zero = np.float32(8)

    def grid_of(block: int, weights: Floats) -> tuple[Floats, Floats]:
        scales = search(weights, np.broadcast_to(importance[: len(weights), block, None], weights.shape), 4).scales
        return scales, zero * -scales

    levels = _unpack(plain.packed, 4)
    flat = levels.reshape(len(levels), -1)
    inside = flat[:, : plain.columns]
    rounded = Rounded(levels=inside, scales=plain.scales, offsets=zero * -plain.scales, group=plain.spec.block, top=_TOP_OF_4_BITS)
    made = compensated(weight, rounded, factor, grid_of)
    flat[:, : plain.columns] = made.levels
    return replace(plain, packed=_pack(flat.reshape(levels.shape), 4), scales=np.ascontiguousarray(made.scales))


def dequantize(matrix: PackedMatrix) -> Floats:
    """Returns the weights [N, K] as float32."""
    weights = _unpack(matrix.packed, matrix.spec.bits).astype(np.float32)
    weights -= _half(matrix.spec.bits)
    weights *= matrix.scales[:, :, None]
    return np.ascontiguousarray(weights.reshape(len(weights), -1)[:, : matrix.columns])


def round_rows(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Rounds rows [N, K] symmetrically to int8 levels [N, K] from -127 to 127, with one float32 scale for each row [N].

    Raises ExportError if a weight is not finite.
    """
    _check_finite(weight, 0)
    scales = np.abs(weight).max(axis=1) / np.float32(127)
    return np.rint(weight / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8), scales


def _block_importance(importance: Floats | None, columns: int, block: int) -> Floats:
    """The importance of one row's weights [block, blocks]. The mean of each block is 1; the padding of the last block has importance 0."""
    flat = np.zeros(-(-columns // block) * block)
    flat[:columns] = 1.0
    used = (flat > 0).reshape(-1, block)
    if importance is not None:
        if importance.shape != (columns,):
            raise ExportError(f"importance has shape {list(importance.shape)}, the matrix {columns} columns; give one number per column")
        if not np.isfinite(importance).all() or (importance < 0).any():
            raise ExportError("importance holds numbers that are negative or not finite; make it again from other text")
        flat[:columns] = importance
    counts = flat.reshape(-1, block)
    means = counts.sum(axis=1, keepdims=True) / used.sum(axis=1, keepdims=True)
    counts = np.where(means > 0, counts / np.where(means > 0, means, 1), 1.0)
    result: Floats = (np.maximum(counts, MIN_IMPORTANCE) * used).T.astype(np.float32)
    return result


def _check_finite(piece: Floats, first: int) -> None:
    finite = np.isfinite(piece)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise ExportError(f"row {first + row}, column {column} of a matrix is {piece[row, column]}; such weights cannot be quantized")


def _pack(levels: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return levels
    return np.bitwise_or(levels[..., 0::2], np.left_shift(levels[..., 1::2], np.uint8(4)), dtype=np.uint8)


def _unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Quantized blocks: levels uint8 [block, blocks], scales float32 [blocks]."""

    levels: NDArray[np.uint8]
    scales: Floats


def _quantized(piece: Floats, spec: WeightSpec, counts: Floats) -> Levels:
    """Quantizes rows of complete blocks. `counts` [block, n] is the importance, where n is at least the number of blocks."""
    weights = np.ascontiguousarray(piece.reshape(-1, spec.block).T)
    if spec.bits == 4 and spec.block == BLOCK:
        # Weights that were trained for this grid are reproduced exactly. For others, scales are searched.
        grid = find_grid(np.ascontiguousarray(weights.T), half_scales=False)
        if grid.on_grid.all():
            return Levels(levels=np.ascontiguousarray((grid.levels.T + np.int8(8)).astype(np.uint8)), scales=grid.scales)
    return search(weights, counts[:, : weights.shape[1]], spec.bits)


def search(weights: Floats, importance: Floats, bits: int) -> Levels:
    """Quantizes [block, blocks]. Of the ranges tried, it takes the one with the least sum of importance * error^2.

    `importance` has the weights' shape. For given levels, the best scale is a weighted least-squares solution, as in llama.cpp's k-quants.
    No block is worse than with plain rounding to nearest, apart from the effect of rounding its scale to float16.
    """
    # Only ratios within a block matter. Scaling its largest weight to 1 avoids overflow and underflow.
    largest = np.maximum(weights.max(axis=0), -weights.min(axis=0))
    unit = np.divide(weights, largest, out=np.zeros_like(weights), where=largest > 0)
    fit = _Fit(unit, importance, bits)
    scales = plain_scales = _plain_scales(unit, bits)
    best = fit.scales(plain_scales)[1]
    for tried in _ranges(plain_scales, bits):
        fitted, gain = fit.scales(tried)
        better = gain > best
        scales, best = np.where(better, fitted, scales), np.where(better, gain, best)
    for _ in range(_REFINEMENTS):
        scales = fit.scales(scales)[0]
    # Stored levels are the nearest ones for the final scale in the weights' own unit, so errors are measured on these.
    searched = _rounded(weights, (scales * largest).astype(np.float32), bits)
    plain = _rounded(weights, _plain_scales(weights, bits), bits)
    errors = [_error(weights, importance, levels, bits) for levels in (plain, searched)]
    keep = errors[0] <= errors[1]
    made = Levels(levels=np.where(keep, plain.levels, searched.levels), scales=np.where(keep, plain.scales, searched.scales))
    halves = replace(made, scales=_halves(made.scales))
    as_good = _error(weights, importance, halves, bits) <= _HALVES_LOSE * np.minimum(*errors)
    return replace(made, scales=np.where(as_good, halves.scales, made.scales))


class _Fit:
    """Fits scales to blocks [block, blocks], and reuses its scratch arrays between calls."""

    def __init__(self, unit: Floats, importance: Floats, bits: int) -> None:
        self._unit, self._importance, self._bits = unit, importance, bits
        self._weighted = unit * importance
        self._steps, self._products = np.empty_like(unit), np.empty_like(unit)

    def scales(self, scales: Floats) -> tuple[Floats, Floats]:
        """Returns the best scales [blocks] for the levels that `scales` yields, and how much less the error is than with all weights 0."""
        steps = _steps(self._unit, scales, self._bits, self._steps)
        matched = np.multiply(self._weighted, steps, out=self._products).sum(axis=0)
        np.multiply(steps, steps, out=self._products)
        power = np.multiply(self._products, self._importance, out=self._products).sum(axis=0)
        fitted = np.divide(matched, power, out=scales.copy(), where=power > 0)
        return fitted, np.where(power > 0, matched * fitted, 0)


def _half(bits: int) -> np.float32:
    """The level that represents 0."""
    return np.float32(1 << (bits - 1))


def _plain_scales(weights: Floats, bits: int) -> Floats:
    """Scales [blocks] for rounding to nearest. The weight farthest from 0 gets level 0, as in llama.cpp's Q4_0, so no level is unused."""
    low, high = weights.min(axis=0), weights.max(axis=0)
    farthest: Floats = np.where(-low >= high, low, high)
    return -farthest / _half(bits)


def _halves(scales: Floats) -> Floats:
    """Rounds scales to float16, unless that gives infinity or 0. If all fit into float16, the row kernels read them in half the bytes."""
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16).astype(np.float32)
    rounded: Floats = np.where(np.isfinite(halves) & (halves != 0), halves, scales)
    return rounded


def _ranges(scales: Floats, bits: int) -> Iterator[Floats]:
    """Yields scales [blocks] to try. `scales` are those of the full range."""
    for part in _PARTS[bits]:
        yield scales * np.float32(part)
    half = 1 << (bits - 1)
    for part in _TURNED_PARTS[bits]:
        yield scales * np.float32(-part * half / (half - 1))


def _rounded(weights: Floats, scales: Floats, bits: int) -> Levels:
    levels = _steps(weights, scales, bits, np.empty_like(weights))
    levels += _half(bits)
    return Levels(levels=levels.astype(np.uint8), scales=scales)


def _steps(weights: Floats, scales: Floats, bits: int, out: Floats) -> Floats:
    """Writes the nearest level of each weight into `out`, counted in steps from 0."""
    np.multiply(weights, inverses(scales), out=out)
    np.rint(out, out=out)
    half = _half(bits)
    return np.clip(out, -half, half - 1, out=out)


def _error(weights: Floats, importance: Floats, rounded: Levels, bits: int) -> NDArray[np.float64]:
    """The sum of importance * error^2 for each block [blocks]; errors are relative to the block's largest weight."""
    errors = rounded.levels.astype(np.float32)
    errors -= _half(bits)
    errors *= rounded.scales
    errors -= weights
    largest = np.abs(weights).max(axis=0).astype(np.float64)
    relative = errors / np.where(largest > 0, largest, 1)
    relative *= relative
    relative *= importance
    total: NDArray[np.float64] = relative.sum(axis=0)
    return total
