"""What a round costs on this machine: a draft step, and a verify of n rows, which on real kernels is neither linear nor monotone.

Measured once for a bundle, a machine and its threads, then kept true by the timings of real rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from edge_runtime.bundle import MAX_DRAFT_LENGTH

MAX_ROWS = MAX_DRAFT_LENGTH + 1
# Texts of up to this many tokens share a bucket; each further bucket is twice as long.
FIRST_BUCKET = 512
# How much of an observed deviation is believed at once: of a bucket's common factor, and of one number of rows.
BUCKET_SHARE, ROWS_SHARE, STEP_SHARE = 0.1, 0.05, 0.05
# One timing counts as at most this factor off: the rest is another process's doing.
MOST_OFF = 2.0


class Costs(Protocol):
    """What the profit policy asks: costs in one unit, seconds or joules."""

    def verify(self, rows: int) -> float:
        """Cost of one target forward of `rows` rows, 1 to MAX_ROWS, at the present length of the text."""

    def step(self) -> float:
        """Cost of one draft step."""

    def learn(self, *, length: int, rows: int, verify_seconds: float, drafted: int, draft_seconds: float) -> None:
        """Takes in the timings of one round: a verify of `rows` rows after `length` tokens, and `drafted` draft steps."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Seconds as measured after a short text: `verify[n - 1]` of n rows, and of one draft step."""

    verify: tuple[float, ...]
    step: float

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return {"verify_seconds": list(self.verify), "draft_step_seconds": self.step}

    @classmethod
    def from_json(cls, data: Any) -> MeasuredCosts | None:
        """Returns what `to_json` wrote, or None for anything else."""
        if not isinstance(data, Mapping):
            return None
        verify, step = data.get("verify_seconds"), data.get("draft_step_seconds")
        if not isinstance(verify, list) or len(verify) != MAX_ROWS or not all(map(_is_time, verify)):
            return None
        return cls(verify=tuple(map(float, verify)), step=float(step)) if isinstance(step, int | float) and _is_time(step) else None


class CostCurve:
    """Measured costs, corrected by what real rounds take: per number of rows, per bucket of text length, and per draft step."""

    def __init__(self, measured: MeasuredCosts) -> None:
        self._verify = list(measured.verify)
        self._step = measured.step
        self._buckets = {0: 1.0}
        self._bucket = 0

    def verify(self, rows: int) -> float:
        """Seconds of one target forward of `rows` rows at the present length."""
        return self._verify[rows - 1] * self._buckets[self._bucket]

    def step(self) -> float:
        """Seconds of one draft step."""
        return self._step

    def learn(self, *, length: int, rows: int, verify_seconds: float, drafted: int, draft_seconds: float) -> None:
        """Takes in the timings of one round: a verify of `rows` rows after `length` tokens, and `drafted` draft steps."""
        self._enter(length)
        if 1 <= rows <= MAX_ROWS and verify_seconds > 0:
            off = min(max(verify_seconds / self.verify(rows), 1 / MOST_OFF), MOST_OFF)
            self._buckets[self._bucket] *= off**BUCKET_SHARE
            self._verify[rows - 1] *= off**ROWS_SHARE
        if drafted and draft_seconds > 0:
            off = min(max(draft_seconds / drafted / self._step, 1 / MOST_OFF), MOST_OFF)
            self._step *= off**STEP_SHARE

    def _enter(self, length: int) -> None:
        bucket = max(0, math.ceil(math.log2(max(length, 1) / FIRST_BUCKET)))
        # A bucket never seen is at first what the one before it was; attention's growth shows within some rounds.
        self._buckets.setdefault(bucket, self._buckets[self._bucket])
        self._bucket = bucket


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 3600
