"""Matrices in 4 or 8 bits, in the layout of ONNX Runtime's MatMulNBits and GatherBlockQuantized.

Layout (onnxruntime, docs/ContribOperators.md, com.microsoft.MatMulNBits): each row of [N, K] is cut into blocks of K, the last one
filled up; two 4-bit levels share a byte, the first in the low half; zero points are packed the same way, each row on its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.published.grid import BLOCK, find_grid
from edge_export.errors import ExportError
from edge_export.onnx.block_search import Levels, round_to_nearest, search
from edge_export.quantization.compensation import Factor, Rounded, compensated
from edge_export.quantization.importance import MIN_IMPORTANCE

Method = Literal["rtn", "search"]
BITS, BLOCKS, METHODS = (4, 8), (32, 64, 128), get_args(Method)
# Weights per piece of work: a piece that stays in a core's cache with all its intermediates is several times faster.
_PIECE = 1 << 16
_TOP_OF_4_BITS = 15


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """How to quantize: 4 or 8 bits, blocks of 32, 64 or 128, round to nearest or search; symmetric ones have no zero points."""

    bits: int
    block: int
    method: Method = "search"
    symmetric: bool = True

    def __post_init__(self) -> None:
        # 2 bits are only taken over from checkpoints.
        if self.bits not in (2, *BITS) or self.block not in BLOCKS or self.method not in METHODS:
            raise ExportError(
                f"{self.bits} bits in blocks of {self.block} by {self.method!r} is no weight format;"
                f" bits are {_either(BITS)}, blocks {_either(BLOCKS)}, methods {_either(METHODS)}"
            )


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """A quantized matrix [N, K]; `columns` is K.

    packed uint8 [N, blocks, block * bits / 8], scales float32 [N, blocks], zero_points uint8 [N, ceil(blocks * bits / 8)] or None, which
    means 2^(bits - 1) everywhere, as for MatMulNBits.
    """

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8] | None
    spec: WeightSpec
    columns: int


def quantize_matrix(
    weight: NDArray[np.float32], spec: WeightSpec, importance: NDArray[np.float32] | None = None, factor: Factor | None = None
) -> PackedMatrix:
    """Quantizes weight [N, K]; `importance` [K] says how much an error in each column counts (the mean square of its input).

    With `factor`, the second moments of the inputs, levels of 4 bits compensate each other's errors; with 8 bits little is left to gain.
    Rows do not depend on each other, so a large matrix may come in pieces. Round to nearest takes no account of importance.
    Raises ExportError if a weight is not finite, or an importance is negative, not finite, or not one per column.
    """
    if weight.ndim != 2 or not weight.size:
        raise ExportError(f"a weight of shape {list(weight.shape)} is not a matrix; quantize matrices of rows and columns only")
    rows, columns = weight.shape
    blocks = -(-columns // spec.block)
    step = max(1, _PIECE // (blocks * spec.block))
    counts = np.tile(_block_importance(importance, columns, spec.block), min(step, rows))
    packed = np.empty((rows, blocks, spec.block * spec.bits // 8), np.uint8)
    scales = np.empty((rows, blocks), np.float32)
    zeros = np.empty((rows, blocks), np.uint8)
    for first in range(0, rows, step):
        piece = np.zeros((min(step, rows - first), blocks * spec.block), np.float32)
        piece[:, :columns] = weight[first : first + step]
        _check_finite(piece, first)
        quantized = _quantized(piece, spec, counts)
        here = slice(first, first + len(piece))
        packed[here] = _pack(quantized.levels.T, spec.bits).reshape(len(piece), blocks, -1)
        scales[here], zeros[here] = quantized.scales.reshape(-1, blocks), quantized.zeros.reshape(-1, blocks)
    zero_points = None if spec.symmetric else _pack(_even(zeros, spec.bits), spec.bits)
    made = PackedMatrix(packed=packed, scales=scales, zero_points=zero_points, spec=spec, columns=columns)
    if factor is None or spec.bits != 4:
        return made
    return _compensated(weight, made, _block_importance(importance, columns, spec.block), factor)


def _compensated(weight: NDArray[np.float32], plain: PackedMatrix, importance: NDArray[np.float32], factor: Factor) -> PackedMatrix:
    """A matrix in 4 bits that loses less; `importance` [block, blocks] weighs the errors of a block for its scale."""
    spec, (rows, blocks) = plain.spec, plain.scales.shape
    levels = _unpack(plain.packed, 4)
    zeros = np.full((rows, blocks), 8, np.uint8) if plain.zero_points is None else _unpack(plain.zero_points, 4)[:, :blocks]

    def grid_of(block: int, weights: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        counts = np.broadcast_to(importance[: len(weights), block, None], weights.shape)
        searched = search(weights, counts, 4, spec.symmetric)
        return searched.scales, searched.zeros * -searched.scales

    flat = levels.reshape(rows, -1)
    rounded = Rounded(
        levels=flat[:, : plain.columns], scales=plain.scales, offsets=zeros * -plain.scales, group=spec.block, top=_TOP_OF_4_BITS
    )
    made = compensated(weight, rounded, factor, grid_of)
    flat[:, : plain.columns] = made.levels
    if plain.zero_points is not None:
        ratios = np.divide(-made.offsets, made.scales, out=np.zeros_like(made.scales), where=made.scales != 0)
        zeros = np.rint(ratios).astype(np.uint8)
    return replace(
        plain,
        packed=_pack(flat.reshape(levels.shape), 4),
        scales=np.ascontiguousarray(made.scales),
        zero_points=None if plain.zero_points is None else _pack(_even(zeros, 4), 4),
    )


def dequantize(matrix: PackedMatrix) -> NDArray[np.float32]:
    """Returns the weights [N, K] as float32."""
    bits, (rows, blocks) = matrix.spec.bits, matrix.scales.shape
    zeros: NDArray[np.float32] | np.float32 = np.float32(1 << (bits - 1))
    if matrix.zero_points is not None:
        zeros = _unpack(matrix.zero_points, bits)[:, :blocks, None].astype(np.float32)
    weights = _unpack(matrix.packed, bits).astype(np.float32)
    weights -= zeros
    weights *= matrix.scales[:, :, None]
    return np.ascontiguousarray(weights.reshape(rows, -1)[:, : matrix.columns])


def round_rows(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Rounds rows [N, K] to signed levels int8 [N, K] from -127 to 127, symmetric, with one scale for each row, float32 [N].

    Raises ExportError if a weight is not finite.
    """
    _check_finite(weight, 0)
    scales = np.abs(weight).max(axis=1) / np.float32(127)
    return np.rint(weight / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8), scales


def unpacked_levels(matrix: PackedMatrix) -> NDArray[np.uint8]:
    """Returns the levels [N, K], one to a byte."""
    return np.ascontiguousarray(_unpack(matrix.packed, matrix.spec.bits).reshape(len(matrix.packed), -1)[:, : matrix.columns])


def _quantized(piece: NDArray[np.float32], spec: WeightSpec, counts: NDArray[np.float32]) -> Levels:
    """Quantizes rows of complete blocks; `counts` [block, at least as many blocks] is their importance, as for block_search."""
    weights = np.ascontiguousarray(piece.reshape(-1, spec.block).T)
    if spec.bits == 4 and spec.block == BLOCK and spec.symmetric and spec.method == "search":
        # Weights that were trained for this grid come back exactly; others are searched.
        grid = find_grid(np.ascontiguousarray(weights.T), half_scales=False)
        if grid.on_grid.all():
            levels = np.ascontiguousarray((grid.levels.T + np.int8(8)).astype(np.uint8))
            return Levels(levels=levels, scales=grid.scales, zeros=np.full(len(grid.scales), 8, np.uint8))
    if spec.method == "rtn":
        return round_to_nearest(weights, spec.bits, spec.symmetric)
    importance = counts[:, : weights.shape[1]]
    return search(weights, importance, spec.bits, spec.symmetric)


def _block_importance(importance: NDArray[np.float32] | None, columns: int, block: int) -> NDArray[np.float32]:
    """Importance of one row's blocks [block, blocks], 1 on average in each; the padding of the last block has importance 0."""
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
    result: NDArray[np.float32] = (np.maximum(counts, MIN_IMPORTANCE) * used).T.astype(np.float32)
    return result


def _check_finite(piece: NDArray[np.float32], first: int) -> None:
    finite = np.isfinite(piece)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise ExportError(f"row {first + row}, column {column} of a matrix is {piece[row, column]}; such weights cannot be quantized")


def _even(zeros: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    return np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2))) if bits == 4 else zeros


def _pack(levels: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return levels
    return np.bitwise_or(levels[..., 0::2], np.left_shift(levels[..., 1::2], np.uint8(4)), dtype=np.uint8)


def _unpack(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _either(values: tuple[object, ...]) -> str:
    return " or ".join(map(str, values))
