"""Cost of a round on this machine: a draft of n tokens, and a verify of n rows, which on real kernels is neither linear nor monotone.

Costs were measured before, or else are computed from sizes and learned from the timings of real rounds, which also correct measured ones.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.drafting.policies import Timing

MAX_ROWS = MAX_DRAFT_LENGTH + 1
# Texts of up to this many tokens share a bucket; each further bucket is twice as long.
FIRST_BUCKET = 512
# Learning rates for an observed deviation: of the common factor of a bucket, of one number of rows, and of a draft.
BUCKET_SHARE, ROWS_SHARE, DRAFT_SHARE = 0.05, 0.1, 0.2
# A deviation of a draft of one token is this much more likely due to the fixed overhead than to the cost per token.
OVERHEAD_VARIANCE = 4.0
# One timing counts as at most this factor off: the rest is the effect of other processes.
MAX_FACTOR_OFF = 2.0
MIN_SECONDS = 1e-9
_MAX_SECONDS = 3600.0
# Of provisional costs the newest so many timings of a number of rows count, and so many settle it.
WINDOW, SETTLED = 9, 3
_GROUP = 4
_MAX_UNLEARNED = 32


class Costs(Protocol):
    """The costs that the profit policy needs, in one unit: seconds or joules."""

    @property
    def is_provisional(self) -> bool:
        """Whether they are computed or learned from rounds, not measured."""

    def verify(self, rows: int) -> float:
        """Cost of one target forward of `rows` rows, of one or several requests, at the current length of their texts."""

    def draft(self, steps: int, requests: int = 1) -> float:
        """Cost of drafting `steps` tokens, for one of `requests` requests that draft together; 0 for no tokens."""

    def learn(self, timing: Timing) -> None:
        """Learns from the timing of one round."""

    def rows_to_time(self, limit: int) -> int | None:
        """Returns the number of rows, up to `limit`, that the fewest rounds timed; None where all are known well enough."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Seconds after a short text.

    `verify[n - 1]` is a verify of n rows. A draft takes a fixed `overhead` and a `step` per token: the drafter's weights and threads are
    cold after a forward of the target. `timings[n - 1]` is how many real rounds timed n rows; what none timed is computed. It is empty
    where a probe measured every number of rows.
    """

    verify: tuple[float, ...]
    step: float
    overhead: float = 0.0
    timings: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for what no measurement gives."""
        times = [*self.verify, self.step, self.overhead or MIN_SECONDS]
        if len(self.verify) != MAX_ROWS or not all(0 < seconds < _MAX_SECONDS for seconds in times):
            raise ValueError(f"{self} are not the costs of 1 to {MAX_ROWS} rows")
        if self.timings and not (len(self.timings) == MAX_ROWS and all(0 <= count <= WINDOW for count in self.timings)):
            raise ValueError(f"{self} are not costs that 0 to {WINDOW} timings of 1 to {MAX_ROWS} rows gave")

    def draft(self, steps: int) -> float:
        """Seconds of drafting `steps` tokens."""
        return self.overhead + steps * self.step if steps else 0.0

    @property
    def mean_step(self) -> float:
        """Seconds per token in a draft of 3, its share of the overhead included."""
        return self.draft(3) / 3

    def combined(self, other: MeasuredCosts) -> MeasuredCosts:
        """Returns the quicker measurement: the machine was busier in the other, and the ratios of the figures count."""
        return min(self, other, key=lambda costs: sum(costs.verify))


class CostCurve:
    """Costs, corrected by the timings of real rounds: per number of rows, per bucket of text length, and per draft.

    Batches of several requests are not measured: they are extrapolated, and the first real round of a size corrects them most.
    Provisional costs, which no probe measured, follow the rounds: a number of rows takes the median of its timings as far as there are
    many, and one without timings keeps its proportion to its neighbours.
    """

    def __init__(self, start: MeasuredCosts, kept: MeasuredCosts | None = None) -> None:
        """`start` are measured costs, or computed ones; then `kept` is what earlier rounds made of these, as so many timings more."""
        self._verify = list(start.verify)
        self._drafts = {1: (start.overhead, start.step)}  # by requests that draft together
        # Of provisional costs: those at the start, and the newest timings by rows, as after texts of the first bucket.
        self._start = start.verify
        self._timed: dict[int, deque[float]] | None = {} if start.timings else None
        if kept is not None and any(kept.timings):
            self._timed = _seeded(kept)
            self._verify = _in_proportion(self._start, self._timed)
            self._drafts[1] = _drafts_in_proportion(start, kept, self._verify[0] / self._start[0])
        self._learned = False
        self._stale = False  # timings were added since `_verify` was computed
        self._timings: dict[tuple[str, int], int] = {}
        self._buckets = {0: 1.0}
        self._bucket = 0
        self._unlearned: list[Timing] = []  # of the newest rounds, until somebody reads

    def verify(self, rows: int) -> float:
        """Seconds of one target forward of `rows` rows at the current length."""
        self._bring_up_to_date()
        while rows > len(self._verify):
            self._verify.append(extrapolated(self._verify))
        return self._verify[rows - 1] * self._buckets[self._bucket]

    def draft(self, steps: int, requests: int = 1) -> float:
        """Seconds of drafting `steps` tokens where `requests` requests draft together; until observed, the same as for one."""
        self._bring_up_to_date()
        overhead, step = self._drafts.get(requests, self._drafts[1])
        return overhead + steps * step if steps else 0.0

    def learn(self, timing: Timing) -> None:
        """Learns from the timing of one round."""
        self._unlearned.append(timing)
        if len(self._unlearned) >= _MAX_UNLEARNED:
            self._bring_up_to_date()

    def _learn(self, timing: Timing) -> None:
        self._enter(timing.length)
        if timing.rows >= 1 and timing.verify_seconds > 0:
            if self._timed is not None and timing.rows <= MAX_ROWS:
                self._time_rows(self._timed, timing.rows, timing.verify_seconds)
                off = 1.0
            else:
                off = _bounded(timing.verify_seconds / self.verify(timing.rows))
            share = self._share("rows", timing.rows, ROWS_SHARE, measured=timing.rows <= MAX_ROWS)
            if timing.rows <= MAX_ROWS:  # an extrapolated figure tells nothing about the length
                self._buckets[self._bucket] *= off**BUCKET_SHARE
            self._verify[timing.rows - 1] *= off**share
        if timing.steps and timing.draft_seconds > 0:
            self._learn_draft(timing.requests, timing.steps, timing.draft_seconds)

    @property
    def is_provisional(self) -> bool:
        """Whether no probe measured these costs, however many rounds taught them."""
        return self._timed is not None

    def rows_to_time(self, limit: int) -> int | None:
        """Returns the number of rows, up to `limit`, that the fewest rounds timed; None where each has SETTLED, or a probe measured."""
        if self._timed is None:
            return None
        self._bring_up_to_date()
        counts = [len(self._timed.get(rows, ())) for rows in range(1, min(limit, MAX_ROWS) + 1)]
        return counts.index(min(counts)) + 1 if min(counts) < SETTLED else None

    def learned(self) -> MeasuredCosts | None:
        """Returns what rounds made of provisional costs; None for measured ones, and before the first round."""
        self._bring_up_to_date()
        if self._timed is None or not self._learned:
            return None
        overhead, step = self._drafts[1]
        counts = tuple(len(self._timed.get(rows, ())) for rows in range(1, MAX_ROWS + 1))
        return MeasuredCosts(verify=tuple(self._verify[:MAX_ROWS]), step=step, overhead=overhead, timings=counts)

    def _time_rows(self, timed: dict[int, deque[float]], rows: int, seconds: float) -> None:
        """Adds a timing; the speed of the machine at the moment, which all numbers of rows share, is taken out of it."""
        if rows in timed:
            off = seconds / (statistics.median(timed[rows]) * self._buckets[self._bucket])
            self._buckets[self._bucket] *= _bounded(off) ** BUCKET_SHARE
        timed.setdefault(rows, deque(maxlen=WINDOW)).append(seconds / self._buckets[self._bucket])
        self._learned = self._stale = True

    def _bring_up_to_date(self) -> None:
        """Learns from the newest rounds, and computes provisional costs from their timings, when somebody reads them: that takes long."""
        while self._unlearned:  # each may read what was learned before it
            timings, self._unlearned = self._unlearned, []
            for timing in timings:
                self._learn(timing)
        if self._timed is None or not self._stale:
            return
        self._stale = False
        single = _in_proportion(self._start, self._timed)
        factor = single[-1] / self._verify[MAX_ROWS - 1]
        self._verify = [*single, *(several * factor for several in self._verify[MAX_ROWS:])]

    def _learn_draft(self, requests: int, steps: int, seconds: float) -> None:
        """Corrects overhead and step by the time of a draft, each by its part in it (normalised least mean squares)."""
        overhead, step = self._drafts.get(requests, self._drafts[1])
        extrapolated = requests * overhead + steps * step
        share = self._share("draft", requests, DRAFT_SHARE, measured=requests == 1 and self._timed is None)
        error = extrapolated * (_bounded(seconds / extrapolated) ** share - 1)
        weight = OVERHEAD_VARIANCE * requests**2 + steps**2
        self._drafts[requests] = (
            max(overhead + error * OVERHEAD_VARIANCE * requests / weight, 0.0),
            max(step + error * steps / weight, MIN_SECONDS),
        )

    def _share(self, kind: str, number: int, minimum: float, *, measured: bool) -> float:
        count = self._timings[kind, number] = self._timings.get((kind, number), 0) + 1
        return minimum if measured else max(minimum, 1 / count)

    def _enter(self, length: int) -> None:
        bucket = max(0, math.ceil(math.log2(max(length, 1) / FIRST_BUCKET)))
        # A new bucket starts with the factor of the one before it; the growth of attention shows within some rounds.
        self._buckets.setdefault(bucket, self._buckets[self._bucket])
        self._bucket = bucket


def extrapolated(known: Sequence[float]) -> float:
    """Extrapolates the cost of n + 1 rows from those of 1 to n rows; the result is at least the cost of four rows fewer.

    Kernels process rows in groups of four, so the curve continues with that period and the growth between the last two groups.
    """
    if len(known) < 2 * _GROUP:
        return known[-1] + max(known[-1] - known[0], 0.0) / max(1, len(known) - 1)
    growth = sum(known[-_GROUP:]) - sum(known[-2 * _GROUP : -_GROUP])
    return known[-_GROUP] + max(growth, 0.0) / _GROUP


def _seeded(costs: MeasuredCosts) -> dict[int, deque[float]]:
    counted = zip(range(1, MAX_ROWS + 1), costs.verify, costs.timings, strict=True)
    return {rows: deque([seconds] * count, maxlen=WINDOW) for rows, seconds, count in counted if count}


def _drafts_in_proportion(start: MeasuredCosts, kept: MeasuredCosts, speed: float) -> tuple[float, float]:
    """Returns overhead and step: those of `start` at the `speed` of verifies, drawn to the kept ones as rows are to their timings."""
    counts = max(kept.timings[1:])
    share = counts / (counts + SETTLED)
    factor = speed * (kept.draft(3) / (start.draft(3) * speed)) ** share
    return start.overhead * factor, start.step * factor


def _in_proportion(start: Sequence[float], timed: Mapping[int, Sequence[float]]) -> list[float]:
    """Returns the seconds of 1 to MAX_ROWS rows: `start` times a factor for each, whose logarithm is interpolated between timed rows.

    A factor is the median of its rows' timings, drawn to that of all timings, which counts as SETTLED more: few timings on a busy machine
    tell more about the moment than about the number of rows.
    """
    known = sorted(timed)
    off = {rows: [math.log(seconds / start[rows - 1]) for seconds in timed[rows]] for rows in known}
    common = SETTLED * statistics.median(factor for factors in off.values() for factor in factors)
    factors = [(len(off[rows]) * statistics.median(off[rows]) + common) / (len(off[rows]) + SETTLED) for rows in known]
    between: Iterable[float] = np.interp(range(1, MAX_ROWS + 1), known, factors).tolist()
    return [seconds * math.exp(factor) for seconds, factor in zip(start, between, strict=True)]


def _bounded(off: float) -> float:
    return min(max(off, 1 / MAX_FACTOR_OFF), MAX_FACTOR_OFF)
