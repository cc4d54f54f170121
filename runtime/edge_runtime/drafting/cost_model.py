"""Cost of a round on this machine: a draft of n tokens, and a verify of n rows, which on real kernels is neither linear nor monotone.

Costs were measured before, or else are computed from sizes and learned from the timings of real rounds, which also correct measured ones.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
# Of shared verifies: what is left of a round's weight after another, and the rounds that each other figure counts as.
SHARED_DECAY, SEED_ROUNDS = 0.995, 0.3
_GROUP = 4
# Differences of sums that are smaller, relative to them, are rounding.
_ROUNDING = 1e-9
_MAX_UNLEARNED = 32


class Costs(Protocol):
    """The costs that the profit policy needs, in one unit: seconds or joules."""

    @property
    def is_provisional(self) -> bool:
        """Whether they are computed or learned from rounds, not measured."""

    def verify(self, rows: int) -> float:
        """Cost of one target forward of `rows` rows at the current length of their texts."""

    def share(self, rows: int, requests: int) -> float:
        """What a request's `rows` rows of a verify cost it, where `requests` requests share the verify."""

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
        """Raises ValueError unless all costs are positive, finite and complete."""
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


class SharedLine:
    """Seconds of verifies that several requests share, as a line over all of their rows, fitted to the newest rounds.

    So a row costs what it adds near the rows that rounds have, whatever the others bring. Single timings of each number of rows would not
    do: there are many, the cheapest of which looks so by chance.
    """

    def __init__(self, requests: int, verify: Callable[[int], float]) -> None:
        """`verify` returns what a verify of so many rows costs by all that is known beside; it counts as a part of a round."""
        self._requests, self._verify = requests, verify
        self._sums = np.zeros(5)  # of the weights, and with them of rows, seconds, rows squared, rows times seconds

    def add(self, rows: int, seconds: float) -> None:
        """Takes the timing of a round."""
        start, each = self._fitted()
        known = start + each * rows
        self._sums = SHARED_DECAY * self._sums + _weighted(rows, known * _bounded(seconds / known), 1.0, known)

    def share(self, rows: int) -> float:
        """Seconds that a request's `rows` rows cost it: its part of a verify of one row for each, and what its drafts add."""
        start, each = self._fitted()
        return start / self._requests + each * rows

    def _fitted(self) -> tuple[float, float]:
        """The seconds of no rows, and of each."""
        sums = self._sums
        for rows in (self._requests, 2 * self._requests):
            sums = sums + _weighted(rows, self._verify(rows), SEED_ROUNDS, self._verify(rows))
        weight, of_rows, of_seconds, squares, products = sums.tolist()
        spread = weight * squares - of_rows**2
        if spread > _ROUNDING * weight * squares:
            each = max((weight * products - of_rows * of_seconds) / spread, 0.0)
        else:  # rounds of one number of rows, beside which all other figures vanish: a row costs the part that it costs in these
            one, both = self._verify(self._requests), self._verify(2 * self._requests)
            step = max(both - one, 0.0) / self._requests
            each = step * of_seconds / weight / (one + step * max(of_rows / weight - self._requests, 0.0))
        return max((of_seconds - each * of_rows) / weight, 0.0), each


def _weighted(rows: int, seconds: float, rounds: float, known: float) -> NDArray[np.float64]:
    # Deviations are in proportion to the seconds.
    return np.array([1, rows, seconds, rows**2, rows * seconds]) * (rounds / known**2)


class CostCurve:
    """Costs, corrected by the timings of real rounds: per number of rows, per bucket of text length, and per draft.

    Batches of several requests are not measured: they are extrapolated, and corrected by their own rounds (`SharedLine`).
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
        self._shared: dict[int, SharedLine] = {}  # by requests
        self._learned = False
        self._stale = False  # timings were added since `_verify` was computed
        self._draft_timings: dict[int, int] = {}  # by requests
        self._buckets = {0: 1.0}
        self._bucket = 0
        self._unlearned: list[Timing] = []  # of the newest rounds, until somebody reads
        self._counts = list(kept.timings) if kept is not None and any(kept.timings) else [0] * MAX_ROWS  # of timings by rows

    def verify(self, rows: int) -> float:
        """Seconds of one target forward of `rows` rows at the current length."""
        self._bring_up_to_date()
        known = self._verify if rows <= MAX_ROWS else list(self._verify)
        while rows > len(known):
            known.append(extrapolated(known))
        return known[rows - 1] * self._buckets[self._bucket]

    def share(self, rows: int, requests: int) -> float:
        """Seconds that a request's `rows` rows cost it, where `requests` requests share the verify."""
        return self._line(requests).share(rows) if requests > 1 else self.verify(rows)

    def _line(self, requests: int) -> SharedLine:
        self._bring_up_to_date()
        if requests not in self._shared:
            self._shared[requests] = SharedLine(requests, self.verify)
        return self._shared[requests]

    def draft(self, steps: int, requests: int = 1) -> float:
        """Seconds of drafting `steps` tokens where `requests` requests draft together; until observed, the same as for one."""
        self._bring_up_to_date()
        overhead, step = self._drafts.get(requests, self._drafts[1])
        return overhead + steps * step if steps else 0.0

    def learn(self, timing: Timing) -> None:
        """Learns from the timing of one round."""
        self._unlearned.append(timing)
        if 1 <= timing.rows <= MAX_ROWS:
            self._counts[timing.rows - 1] += 1
        if len(self._unlearned) >= _MAX_UNLEARNED:
            self._bring_up_to_date()

    def _learn(self, timing: Timing) -> None:
        self._enter(timing.length)
        if timing.requests > 1 and timing.verify_seconds > 0:
            self._line(timing.requests).add(timing.rows, timing.verify_seconds)
        if 1 <= timing.rows <= MAX_ROWS and timing.verify_seconds > 0:
            if self._timed is not None:
                self._time_rows(self._timed, timing.rows, timing.verify_seconds)
            else:
                off = _bounded(timing.verify_seconds / self.verify(timing.rows))
                self._buckets[self._bucket] *= off**BUCKET_SHARE
                self._verify[timing.rows - 1] *= off**ROWS_SHARE
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
        counts = self._counts[:limit]  # which need none of the curve: trials are asked for often
        return counts.index(min(counts)) + 1 if min(counts) < SETTLED else None

    def learned(self) -> MeasuredCosts | None:
        """Returns what rounds made of provisional costs; None for measured ones, and before the first round."""
        self._bring_up_to_date()
        if self._timed is None or not self._learned:
            return None
        overhead, step = self._drafts[1]
        counts = tuple(len(self._timed.get(rows, ())) for rows in range(1, MAX_ROWS + 1))
        return MeasuredCosts(verify=tuple(self._verify), step=step, overhead=overhead, timings=counts)

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
        self._verify = _in_proportion(self._start, self._timed)

    def _learn_draft(self, requests: int, steps: int, seconds: float) -> None:
        """Corrects overhead and step by the time of a draft, each by its part in it (normalised least mean squares)."""
        overhead, step = self._drafts.get(requests, self._drafts[1])
        extrapolated = requests * overhead + steps * step
        count = self._draft_timings[requests] = self._draft_timings.get(requests, 0) + 1
        share = DRAFT_SHARE if requests == 1 and self._timed is None else max(DRAFT_SHARE, 1 / count)
        off = seconds / extrapolated
        if off > 1 or self._timed is None:  # other processes make a draft slower, but none makes it faster than was computed
            off = _bounded(off)
        error = extrapolated * (off**share - 1)
        weight = OVERHEAD_VARIANCE * requests**2 + steps**2
        self._drafts[requests] = (
            max(overhead + error * OVERHEAD_VARIANCE * requests / weight, 0.0),
            max(step + error * steps / weight, MIN_SECONDS),
        )

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
    counts = [len(timed[rows]) for rows in known]
    off = [math.log(statistics.median(timed[rows]) / start[rows - 1]) for rows in known]
    common = SETTLED * statistics.median(factor for count, factor in zip(counts, off, strict=True) for _ in range(count))
    factors = [(count * factor + common) / (count + SETTLED) for count, factor in zip(counts, off, strict=True)]
    between: Iterable[float] = np.interp(range(1, MAX_ROWS + 1), known, factors).tolist()
    return [seconds * math.exp(factor) for seconds, factor in zip(start, between, strict=True)]


def _bounded(off: float) -> float:
    return min(max(off, 1 / MAX_FACTOR_OFF), MAX_FACTOR_OFF)
