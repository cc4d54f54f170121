"""What a round costs on this machine: a draft step, and a verify of n rows, which on real kernels is neither linear nor monotone.

Measured once for a bundle, a machine and its threads, then kept true by the timings of real rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edge_runtime.bundle import MAX_DRAFT_LENGTH
from edge_runtime.policies import Timing

MAX_ROWS = MAX_DRAFT_LENGTH + 1
# Texts of up to this many tokens share a bucket; each further bucket is twice as long.
FIRST_BUCKET = 512
# How much of an observed deviation is believed at once: of a bucket's common factor, and of one number of rows.
BUCKET_SHARE, ROWS_SHARE, STEP_SHARE = 0.1, 0.05, 0.05
# One timing counts as at most this factor off: the rest is another process's doing.
MOST_OFF = 2.0
_GROUP = 4


class Costs(Protocol):
    """What the profit policy asks: costs in one unit, seconds or joules."""

    def verify(self, rows: int) -> float:
        """Cost of one target forward of `rows` rows, of one or several requests, at the present length of their texts."""

    def step(self, requests: int = 1) -> float:
        """Cost of one drafted token where so many requests draft together."""

    def learn(self, timing: Timing) -> None:
        """Takes in the timings of one round."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Seconds as measured after a short text: `verify[n - 1]` of n rows, and of one draft step; and how many times it was measured."""

    verify: tuple[float, ...]
    step: float
    times: int = 1

    def combined(self, other: MeasuredCosts) -> MeasuredCosts:
        """The quicker measurement, whole: the machine was busier in the other, and what counts is how the figures stand to each other."""
        quicker = min(self, other, key=lambda costs: sum(costs.verify))
        return MeasuredCosts(verify=quicker.verify, step=quicker.step, times=self.times + other.times)

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return {"verify_seconds": list(self.verify), "draft_step_seconds": self.step, "times": self.times}

    @classmethod
    def from_json(cls, data: Any) -> MeasuredCosts | None:
        """Returns what `to_json` wrote, or None for anything else."""
        if not isinstance(data, Mapping):
            return None
        verify, step = data.get("verify_seconds"), data.get("draft_step_seconds")
        if not isinstance(verify, list) or len(verify) != MAX_ROWS or not all(map(_is_time, verify)):
            return None
        times = data.get("times")
        if not isinstance(times, int) or times < 1 or not isinstance(step, int | float) or not _is_time(step):
            return None
        return cls(verify=tuple(map(float, verify)), step=float(step), times=times)


class CostCurve:
    """Measured costs, corrected by what real rounds take: per number of rows, per bucket of text length, and per draft step.

    What was not measured, batches of several requests, is foreseen from what was, and the first real round of a kind is believed most.
    """

    def __init__(self, measured: MeasuredCosts) -> None:
        self._verify = list(measured.verify)
        self._steps = {1: measured.step}
        self._seen: dict[tuple[str, int], int] = {}
        self._buckets = {0: 1.0}
        self._bucket = 0

    def verify(self, rows: int) -> float:
        """Seconds of one target forward of `rows` rows at the present length."""
        while rows > len(self._verify):
            self._verify.append(foreseen(self._verify))
        return self._verify[rows - 1] * self._buckets[self._bucket]

    def step(self, requests: int = 1) -> float:
        """Seconds of one drafted token where so many requests draft together; as good as alone until it was seen."""
        return self._steps.get(requests, self._steps[1])

    def learn(self, timing: Timing) -> None:
        """Takes in the timings of one round."""
        self._enter(timing.length)
        if timing.rows >= 1 and timing.verify_seconds > 0:
            off = _bounded(timing.verify_seconds / self.verify(timing.rows))
            share = self._share("rows", timing.rows, ROWS_SHARE, measured=timing.rows <= MAX_ROWS)
            if timing.rows <= MAX_ROWS:  # what is only foreseen says nothing about the length
                self._buckets[self._bucket] *= off**BUCKET_SHARE
            self._verify[timing.rows - 1] *= off**share
        if timing.steps and timing.draft_seconds > 0:
            off = _bounded(timing.draft_seconds / timing.steps / self.step(timing.requests))
            share = self._share("steps", timing.requests, STEP_SHARE, measured=timing.requests == 1)
            self._steps[timing.requests] = self.step(timing.requests) * off**share

    def _share(self, kind: str, number: int, least: float, *, measured: bool) -> float:
        seen = self._seen[kind, number] = self._seen.get((kind, number), 0) + 1
        return least if measured else max(least, 1 / seen)

    def _enter(self, length: int) -> None:
        bucket = max(0, math.ceil(math.log2(max(length, 1) / FIRST_BUCKET)))
        # A bucket never seen is at first what the one before it was; attention's growth shows within some rounds.
        self._buckets.setdefault(bucket, self._buckets[self._bucket])
        self._bucket = bucket


def foreseen(known: Sequence[float]) -> float:
    """Returns what one row more than the known ones, 1 to n, is likely to cost, at least as much as four rows less.

    Kernels work on rows in groups of four, so the shape goes on with that period and the growth of the newest two of them.
    """
    if len(known) < 2 * _GROUP:
        return known[-1] + max(known[-1] - known[0], 0.0) / max(1, len(known) - 1)
    growth = sum(known[-_GROUP:]) - sum(known[-2 * _GROUP : -_GROUP])
    return known[-_GROUP] + max(growth, 0.0) / _GROUP


def _bounded(off: float) -> float:
    return min(max(off, 1 / MOST_OFF), MOST_OFF)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 3600
