"""Error compensation: a matrix's columns are rounded in order, and what is still to come takes up the error of what was rounded.

Works on one matrix, its levels on a given grid, and the second moments H of its inputs, without files. The error of row w that is
rounded to q is (w - q) H (w - q)^T, the mean square of the difference in its output. Source of the method: Frantar, Ashkboos, Hoefler,
Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
# Columns that are rounded one by one before all later ones take up their errors at once.
_STEP = 64
# Triangles of at most this many rows are inverted directly.
_SMALL_TRIANGLE = 256


# From the number of a group of columns and its weights [group, N]: the group's scales and offsets, float32 [N].
GridOf = Callable[[int, Floats], tuple[Floats, Floats]]


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """A matrix in integers: a weight is scale * level + offset.

    `levels` uint8 [N, K], from 0 to `top`; `scales` and `offsets` float32 [N, groups], each for `group` columns.
    """

    levels: NDArray[np.uint8]
    scales: Floats
    offsets: Floats
    group: int
    top: int

    def values(self) -> Floats:
        """The weights [N, K]."""
        columns = self.levels.shape[1]
        scales, offsets = (np.repeat(part, self.group, axis=1)[:, :columns] for part in (self.scales, self.offsets))
        values: Floats = self.levels.astype(np.float32) * scales + offsets
        return values


@dataclass(frozen=True, kw_only=True)
class Factor:
    """The damped second moments H [K, K] as upper triangles, float32: root @ root.T = H, and inverse = root^-1."""

    root: Floats
    inverse: Floats


def factor_of(moments: Floats, damping: float) -> Factor | None:
    """Factors second moments [K, K] after adding `damping` times their mean diagonal to it, or more where they do not factor so.

    None if they are all zero or not finite.
    """
    damped = moments.astype(np.float64)
    mean = float(np.trace(damped)) / len(damped)
    if not (mean > 0 and np.isfinite(damped).all()):
        return None
    damped[np.diag_indices_from(damped)] += damping * mean
    try:
        # Reversed, the lower triangle of Cholesky's method is the upper one of H.
        root = np.ascontiguousarray(np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1])
    except np.linalg.LinAlgError:
        return factor_of(moments, 10 * damping)
    return Factor(root=root.astype(np.float32), inverse=_inverted(root).astype(np.float32))


def compensated(weights: Floats, plain: Rounded, factor: Factor, grid_of: GridOf | None = None) -> Rounded:
    """Returns weights [N, K], rounded as in `plain` or so that they lose less under the moments: the better of both in every row.

    `grid_of` chooses scales for what the weights have become by then; without it those of `plain` stay.
    """
    # Weights near the ends of float32 overflow; such rows stay, as nothing is less than NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = _rounded_in_order(weights, plain, factor.inverse, grid_of)
        better = _errors(weights - rounded.values(), factor) < _errors(weights - plain.values(), factor)
    parts = {name: np.where(better[:, None], getattr(rounded, name), getattr(plain, name)) for name in ("levels", "scales", "offsets")}
    return replace(plain, **parts)


def _rounded_in_order(weights: Floats, plain: Rounded, inverse: Floats, grid_of: GridOf | None) -> Rounded:
    columns, rows = weights.shape[1], weights.shape[0]
    # Columns are contiguous here, as they are rounded one after another.
    left, scales, offsets = (np.array(part.T, order="C") for part in (weights, plain.scales, plain.offsets))
    levels = np.empty((columns, rows), np.uint8)
    errors = np.empty((_STEP, rows), np.float32)
    for first in range(0, columns, _STEP):
        last = min(first + _STEP, columns)
        for column in range(first, last):
            group = column // plain.group
            if grid_of is not None and column % plain.group == 0:
                scales[group], offsets[group] = grid_of(group, left[column : column + plain.group])
            level = np.clip(np.rint((left[column] - offsets[group]) * _steps(scales[group])), 0, plain.top)
            levels[column] = level
            error = errors[column - first]
            np.divide(left[column] - (level * scales[group] + offsets[group]), inverse[column, column], out=error)
            left[column + 1 : last] -= inverse[column, column + 1 : last, None] * error
        left[last:] -= inverse[first:last, last:].T @ errors[: last - first]
    return replace(plain, levels=np.ascontiguousarray(levels.T), scales=scales.T, offsets=offsets.T)


def _steps(scales: Floats) -> Floats:
    """1 / scales, and 0 where that is beyond float32."""
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=np.abs(scales) >= np.finfo(np.float32).tiny)


def _errors(differences: Floats, factor: Factor) -> Floats:
    """The error [N] of each row's differences [N, K]."""
    weighted = differences @ factor.root
    errors: Floats = np.einsum("nk,nk->n", weighted, weighted)
    return errors


def _inverted(upper: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse of an upper triangle [K, K], by halves."""
    size = len(upper)
    if size <= _SMALL_TRIANGLE:
        return np.triu(np.linalg.inv(upper))
    half = size // 2
    result = np.zeros_like(upper)
    result[:half, :half], result[half:, half:] = _inverted(upper[:half, :half]), _inverted(upper[half:, half:])
    result[:half, half:] = -(result[:half, :half] @ upper[:half, half:]) @ result[half:, half:]
    return result
