"""Differences between two sets of logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]
# A token counts as the reference's own choice when the reference rates it this close to its best, in standard deviations of the row.
TIE = 0.02


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Export against reference over all rows: largest absolute logit difference, mean and median KL(reference || export) in nats,
    greedy agreement.

    Greedy agreement is the share of rows whose likeliest token is the reference's own (`agrees`).
    """

    max_abs_difference: float
    mean_kl: float
    median_kl: float
    greedy_agreement: float


def divergence(reference: Rows, export: Rows) -> Divergence:
    """Compares logits [rows, vocabulary], row by row so that no float64 copy of all rows is made. A NaN or infinity gives infinity."""
    if not np.isfinite(export).all():
        return Divergence(max_abs_difference=float("inf"), mean_kl=float("inf"), median_kl=float("inf"), greedy_agreement=0.0)
    divergences = [_kl(expected, actual) for expected, actual in zip(reference, export, strict=True)]
    return Divergence(
        max_abs_difference=float(np.abs(reference - export).max()),
        mean_kl=float(np.mean(divergences)),
        median_kl=float(np.median(divergences)),
        greedy_agreement=float(np.mean([agrees(row, int(own.argmax())) for row, own in zip(reference, export, strict=True)])),
    )


def agrees(reference: Rows, token: int) -> bool:
    """Whether `token` is the greedy choice of the reference's logits [vocabulary], or within TIE of it."""
    return bool(reference.max() - reference[token] <= TIE * reference.std())


def _kl(reference: Rows, export: Rows) -> float:
    expected, actual = _log_softmax(reference), _log_softmax(export)
    return float(np.sum(np.exp(expected) * (expected - actual)))


def _log_softmax(row: Rows) -> NDArray[np.float64]:
    shifted = row.astype(np.float64) - row.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result
