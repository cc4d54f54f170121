"""The cost of a round on this machine: drafting n tokens, and verifying n rows.

The cost of a verify is neither linear nor monotone in n on real kernels, so there is a figure for each n. A probe measures the costs; or
they are computed from sizes at first and learned from the timings of real rounds, which also correct measured costs.
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
# Costs are corrected by buckets of text length. The first bucket goes up to this many tokens, each further one up to twice as many.
FIRST_BUCKET = 512
# Learning rates: of a bucket's factor, of the cost of one number of rows, and of the cost of a draft.
BUCKET_SHARE, ROWS_SHARE, DRAFT_SHARE = 0.05, 0.1, 0.2
# The variance of a draft's fixed overhead, relative to that of its cost per token: the overhead takes this much more of a deviation.
OVERHEAD_VARIANCE = 4.0
# A timing that is off by more than this factor is clipped: the rest is the effect of other processes.
MAX_FACTOR_OFF = 2.0
MIN_SECONDS = 1e-9
_MAX_SECONDS = 3600.0
# Provisional costs: for each number of rows, how many of the newest timings count, and how many are enough.
WINDOW, SETTLED = 9, 3
# Shared verifies: a round's weight is multiplied by this at each further round; and how many rounds a figure of `verify` counts as.
SHARED_DECAY, SEED_ROUNDS = 0.995, 0.3
_GROUP = 4
# Relative differences of sums below this are rounding errors.
_ROUNDING = 1e-9
_MAX_UNLEARNED = 32


class Costs(Protocol):
    """The costs that the profit policy needs, in one unit: seconds or joules."""

    @property
    def is_provisional(self) -> bool:
        """Whether they were computed or learned from rounds rather than measured by a probe."""

    def verify(self, rows: int) -> float:
        """Cost of one target forward of `rows` rows at the current length of their texts."""

    def share(self, rows: int, requests: int) -> float:
        """Cost of a request's `rows` rows in a verify that `requests` requests share."""

    def draft(self, steps: int, requests: int = 1) -> float:
        """Cost of drafting `steps` tokens, for one of `requests` requests that draft together; 0 for no tokens."""

    def learn(self, timing: Timing) -> None:
        """Learns from the timing of one round."""

    def rows_to_time(self, limit: int) -> Sequence[int]:
        """Returns the numbers of rows, up to `limit`, that have too few timings, those with the fewest first."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Costs in seconds, after a short text.

    `verify[n - 1]` is the cost of verifying n rows. A draft costs a fixed `overhead`, because the drafter's weights and threads are cold
    after a forward of the target, and `step` per token. `timings[n - 1]` is how many real rounds timed n rows; if 0, the cost is computed.
    `timings` is empty if a probe measured all costs.
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
        """Seconds per token in a draft of 3 tokens, including its share of the overhead."""
        return self.draft(3) / 3

    def combined(self, other: MeasuredCosts) -> MeasuredCosts:
        """Returns the faster of two measurements; the machine was busier in the other. They are not mixed: ratios of the figures matter."""
        return min(self, other, key=lambda costs: sum(costs.verify))


class SharedLine:
    """The seconds of verifies that several requests share: a straight line over the total number of rows, fitted to the newest rounds.

    With a line, the cost of a request's row does not depend on the rows of the others. A figure for each total would not work: there are
    many, with few timings each, so the cheapest would be cheap by chance.
    """

    def __init__(self, requests: int, verify: Callable[[int], float]) -> None:
        """`verify` returns the cost of a verify from other knowledge; each of two such points counts as SEED_ROUNDS rounds."""
        self._requests, self._verify = requests, verify
        self._sums = np.zeros(5)  # weighted sums of 1, rows, seconds, rows squared, rows times seconds

    def add(self, rows: int, seconds: float) -> None:
        """Adds the timing of a round."""
        start, each = self._fitted()
        known = start + each * rows
        self._sums = SHARED_DECAY * self._sums + _weighted(rows, known * _bounded(seconds / known), 1.0, known)

    def share(self, rows: int) -> float:
        """Returns the seconds of a request's `rows` rows: its share of the fixed cost, and the cost of each row."""
        start, each = self._fitted()
        return start / self._requests + each * rows

    def _fitted(self) -> tuple[float, float]:
        """Returns the fitted line: its fixed seconds, and the seconds per row."""
        sums = self._sums
        for rows in (self._requests, 2 * self._requests):
            sums = sums + _weighted(rows, self._verify(rows), SEED_ROUNDS, self._verify(rows))
        weight, of_rows, of_seconds, squares, products = sums.tolist()
        spread = weight * squares - of_rows**2
        if spread > _ROUNDING * weight * squares:
            each = max((weight * products - of_rows * of_seconds) / spread, 0.0)
        else:  # all rounds have the same number of rows: the seconds per row are the same part of the total as in `verify`
            one, both = self._verify(self._requests), self._verify(2 * self._requests)
            step = max(both - one, 0.0) / self._requests
            each = step * of_seconds / weight / (one + step * max(of_rows / weight - self._requests, 0.0))
        return max((of_seconds - each * of_rows) / weight, 0.0), each


def _weighted(rows: int, seconds: float, rounds: float, known: float) -> NDArray[np.float64]:
    # The errors of timings are assumed to be proportional to the seconds, hence the squared weight.
    return np.array([1, rows, seconds, rows**2, rows * seconds]) * (rounds / known**2)


class CostCurve:
    """Costs that the timings of real rounds correct: by number of rows, by bucket of text length, and for drafts. Implements `Costs`.

    Verifies of several requests are not measured: they are extrapolated, and corrected by their own rounds (`SharedLine`). Provisional
    costs, which no probe measured, follow the rounds. The more timings a number of rows has, the closer its cost is to their median; one
    without timings keeps its proportion to its neighbours.
    """

    def __init__(self, start: MeasuredCosts, kept: MeasuredCosts | None = None) -> None:
        """`start` has measured or computed costs. `kept` has costs that earlier rounds taught, if `start` was computed."""
        self._verify = list(start.verify)
        self._drafts = {1: (start.overhead, start.step)}  # by number of requests that draft together
        # Provisional costs: the initial ones; and by rows the newest timings, divided by the factor of their bucket.
        self._start = start.verify
        self._timed: dict[int, deque[float]] | None = {} if start.timings else None
        if kept is not None and any(kept.timings):
            self._timed = _seeded(kept)
            self._verify = _in_proportion(self._start, self._timed)
            self._drafts[1] = _drafts_in_proportion(start, kept, self._verify[0] / self._start[0])
        self._shared: dict[int, SharedLine] = {}  # by number of requests
        self._learned = False
        self._stale = False  # timings were added since `_verify` was computed
        self._draft_timings: dict[int, int] = {}  # how many, by number of requests
        self._buckets = {0: 1.0}  # factor of costs by bucket
        self._bucket = 0
        self._unlearned: list[Timing] = []  # not learned yet
        self._counts = list(kept.timings) if kept is not None and any(kept.timings) else [0] * MAX_ROWS  # timings by rows

    def verify(self, rows: int) -> float:
        """Seconds of one target forward of `rows` rows at the current length."""
        self._bring_up_to_date()
        known = self._verify if rows <= MAX_ROWS else list(self._verify)
        while rows > len(known):
            known.append(extrapolated(known))
        return known[rows - 1] * self._buckets[self._bucket]

    def share(self, rows: int, requests: int) -> float:
        """Seconds of a request's `rows` rows in a verify that `requests` requests share."""
        return self._line(requests).share(rows) if requests > 1 else self.verify(rows)

    def _line(self, requests: int) -> SharedLine:
        self._bring_up_to_date()
        if requests not in self._shared:
            self._shared[requests] = SharedLine(requests, self.verify)
        return self._shared[requests]

    def draft(self, steps: int, requests: int = 1) -> float:
        """Seconds of drafting `steps` tokens where `requests` requests draft together; until one is timed, as for a single request."""
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
        """Whether no probe measured these costs, no matter how many rounds corrected them."""
        return self._timed is not None

    def rows_to_time(self, limit: int) -> list[int]:
        """Returns the numbers of rows, up to `limit`, with fewer than SETTLED timings, the fewest first; none for measured costs."""
        if self._timed is None:
            return []
        counts = self._counts[:limit]  # needs no `_bring_up_to_date`, since this is called often
        return [rows for _, rows in sorted((count, rows) for rows, count in enumerate(counts, 1) if count < SETTLED)]

    def learned(self) -> MeasuredCosts | None:
        """Returns provisional costs as corrected by rounds; None for measured costs, and before the first round."""
        self._bring_up_to_date()
        if self._timed is None or not self._learned:
            return None
        overhead, step = self._drafts[1]
        counts = tuple(len(self._timed.get(rows, ())) for rows in range(1, MAX_ROWS + 1))
        return MeasuredCosts(verify=tuple(self._verify), step=step, overhead=overhead, timings=counts)

    def _time_rows(self, timed: dict[int, deque[float]], rows: int, seconds: float) -> None:
        """Adds a timing, divided by the bucket's factor: the speed of the machine at the moment, which all numbers of rows share."""
        if rows in timed:
            off = seconds / (statistics.median(timed[rows]) * self._buckets[self._bucket])
            self._buckets[self._bucket] *= _bounded(off) ** BUCKET_SHARE
        timed.setdefault(rows, deque(maxlen=WINDOW)).append(seconds / self._buckets[self._bucket])
        self._learned = self._stale = True

    def _bring_up_to_date(self) -> None:
        """Learns from the newest rounds and computes provisional costs again. That takes long, so it is done only before costs are read."""
        while self._unlearned:  # learning from one may read the costs, and so get here again
            timings, self._unlearned = self._unlearned, []
            for timing in timings:
                self._learn(timing)
        if self._timed is None or not self._stale:
            return
        self._stale = False
        self._verify = _in_proportion(self._start, self._timed)

    def _learn_draft(self, requests: int, steps: int, seconds: float) -> None:
        """Corrects overhead and step by the time of a draft, each in proportion to its part of it (normalised least mean squares)."""
        overhead, step = self._drafts.get(requests, self._drafts[1])
        expected = requests * overhead + steps * step
        count = self._draft_timings[requests] = self._draft_timings.get(requests, 0) + 1
        share = DRAFT_SHARE if requests == 1 and self._timed is None else max(DRAFT_SHARE, 1 / count)
        off = seconds / expected
        if off > 1 or self._timed is None:  # a draft faster than computed is not clipped: other processes only make it slower
            off = _bounded(off)
        error = expected * (off**share - 1)
        weight = OVERHEAD_VARIANCE * requests**2 + steps**2
        self._drafts[requests] = (
            max(overhead + error * OVERHEAD_VARIANCE * requests / weight, 0.0),
            max(step + error * steps / weight, MIN_SECONDS),
        )

    def _enter(self, length: int) -> None:
        bucket = max(0, math.ceil(math.log2(max(length, 1) / FIRST_BUCKET)))
        # A new bucket starts with the factor of the previous one; a few rounds teach how much slower attention has become.
        self._buckets.setdefault(bucket, self._buckets[self._bucket])
        self._bucket = bucket


def extrapolated(known: Sequence[float]) -> float:
    """Extrapolates the cost of n + 1 rows from those of 1 to n rows. The result is at least the cost of four rows fewer.

    Kernels process rows in groups of four. So it is the cost of four rows fewer plus the mean growth from the group before to the last one.
    """
    if len(known) < 2 * _GROUP:
        return known[-1] + max(known[-1] - known[0], 0.0) / max(1, len(known) - 1)
    growth = sum(known[-_GROUP:]) - sum(known[-2 * _GROUP : -_GROUP])
    return known[-_GROUP] + max(growth, 0.0) / _GROUP


def _seeded(costs: MeasuredCosts) -> dict[int, deque[float]]:
    counted = zip(range(1, MAX_ROWS + 1), costs.verify, costs.timings, strict=True)
    return {rows: deque([seconds] * count, maxlen=WINDOW) for rows, seconds, count in counted if count}


def _drafts_in_proportion(start: MeasuredCosts, kept: MeasuredCosts, speed: float) -> tuple[float, float]:
    """Returns overhead and step: those of `start` times `speed`, the factor of verifies, pulled to the kept ones by their timings."""
    counts = max(kept.timings[1:])
    share = counts / (counts + SETTLED)
    factor = speed * (kept.draft(3) / (start.draft(3) * speed)) ** share
    return start.overhead * factor, start.step * factor


def _in_proportion(start: Sequence[float], timed: Mapping[int, Sequence[float]]) -> list[float]:
    """Returns the seconds of 1 to MAX_ROWS rows: `start` times a factor, whose logarithm is interpolated between the timed rows.

    The factor of a timed number of rows is the median over its timings, pulled to the median of all timings, which counts as SETTLED more
    timings: on a busy machine, a few timings say more about the moment than about the number of rows. For the same reason n timings may
    deviate from the common factor by at most MAX_FACTOR_OFF ** n.
    """
    known = sorted(timed)
    counts = [len(timed[rows]) for rows in known]
    off = [math.log(statistics.median(timed[rows]) / start[rows - 1]) for rows in known]
    common = statistics.median(factor for count, factor in zip(counts, off, strict=True) for _ in range(count))
    most = [count * math.log(MAX_FACTOR_OFF) for count in counts]
    beside = [min(max(factor - common, -bound), bound) for factor, bound in zip(off, most, strict=True)]
    factors = [common + count * factor / (count + SETTLED) for count, factor in zip(counts, beside, strict=True)]
    between: Iterable[float] = np.interp(range(1, MAX_ROWS + 1), known, factors).tolist()
    return [seconds * math.exp(factor) for seconds, factor in zip(start, between, strict=True)]


def _bounded(off: float) -> float:
    return min(max(off, 1 / MAX_FACTOR_OFF), MAX_FACTOR_OFF)
