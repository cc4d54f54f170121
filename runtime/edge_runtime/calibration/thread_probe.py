"""The number of threads that each phase runs fastest on, and which cores where fast and slow ones differ; measured on request.

More threads are not always faster: batches of one row wait for memory, a draft step is shorter than the wake-up time of a thread, and the
slowest core of a team delays the others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from edge_devices.waiting import Report, no_report
from edge_runtime.calibration.cost_probe import timed_rounds
from edge_runtime.calibration.measured import MeasuredValue
from edge_runtime.interfaces import Drafter, Target

MAX_SECONDS = 2.0
MIN_ROUNDS, MAX_ROUNDS = 2, 9
# Timed work: tokens of the prefill, rows of each verify, tokens of the draft.
PREFILL, VERIFIES, DRAFTS = 16, (1, 4), 3
# More threads are used only if the time falls below this share: fewer leave the machine to other programs and draw less power.
WORTH = 0.97
MAX_PHASE_SECONDS = 3600.0
# Threads of a draft where none was measured: its steps are short.
USUAL_DRAFT = 2
Phase = Literal["prefill", "verify", "draft"]
PHASES: tuple[Phase, ...] = ("prefill", "verify", "draft")


@dataclass(frozen=True, kw_only=True)
class ThreadCounts:
    """Threads of each phase, each at least 1; plain decoding runs on those of verify."""

    prefill: int
    verify: int
    draft: int

    @classmethod
    def same(cls, threads: int) -> ThreadCounts:
        """The same number for all phases."""
        return cls(prefill=threads, verify=threads, draft=threads)

    @property
    def largest(self) -> int:
        return max(self.prefill, self.verify, self.draft)


@dataclass(frozen=True, kw_only=True)
class ThreadTimes:
    """Seconds of each phase by number of threads. Raises ValueError for times that are negative or longer than MAX_PHASE_SECONDS."""

    seconds: Mapping[Phase, Mapping[int, float]]

    def __post_init__(self) -> None:
        if not all(0 <= seconds < MAX_PHASE_SECONDS for times in self.seconds.values() for seconds in times.values()):
            raise ValueError(f"{self.seconds!r} are not the seconds of phases")

    def best(self) -> ThreadCounts:
        """Returns for each phase the fewest threads that are about as fast as the fastest number."""
        prefill, verify, draft = (_fewest(self.seconds[phase]) for phase in PHASES)
        return ThreadCounts(prefill=prefill, verify=verify, draft=draft)

    def combined(self, other: ThreadTimes) -> ThreadTimes:
        """Returns the smaller of each figure: other processes disturb a measurement only now and then."""
        seconds = {
            phase: {n: min(seconds, other.seconds[phase].get(n, seconds)) for n, seconds in self.seconds[phase].items()} for phase in PHASES
        }
        return ThreadTimes(seconds=seconds)

    def are_of(self, candidates: Mapping[Phase, Sequence[int]]) -> bool:
        """Whether exactly these numbers were timed."""
        return {phase: [*times] for phase, times in self.seconds.items()} == {phase: [*numbers] for phase, numbers in candidates.items()}


THREADS = MeasuredValue(kind="threads", value_class=ThreadTimes, doing="finding the fastest numbers of threads")


def candidates(groups: Sequence[Sequence[int]]) -> dict[Phase, list[int]]:
    """Returns the thread counts to try on cores grouped by speed: complete clusters, half of all and all; for drafts also 1, 2 and 4."""
    sums = list(accumulate(map(len, groups)))
    total = sums[-1]
    forwards = sorted({max(1, total // 2), *sums})
    return {"prefill": forwards, "verify": forwards, "draft": sorted({n for n in (1, 2, 4) if n <= total} | set(forwards))}


def usual_threads(groups: Sequence[Sequence[int]]) -> ThreadCounts:
    """Returns the default counts where none was measured: all cores but the slowest cluster, if that leaves two; few for a draft."""
    sums = list(accumulate(map(len, groups)))
    forward = sums[-2] if len(sums) > 1 and sums[-2] > 1 else sums[-1]
    return ThreadCounts(prefill=forward, verify=forward, draft=min(USUAL_DRAFT, forward))


def measure_threads(
    target: Target,
    drafter: Drafter | None,
    use: Callable[[ThreadCounts], None],
    candidates: Mapping[Phase, Sequence[int]],
    token: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    report: Report = no_report,
) -> ThreadTimes:
    """Times each phase with each number of `candidates`, in turn; leaves the cache empty. `use` sets the thread counts of the pair.

    The first round warms up; of the others, at least MIN_ROUNDS, the lower quartile counts: other processes only add time. `report` gets
    the share of the work that is done.
    """
    counts = sorted({n for numbers in candidates.values() for n in numbers})
    timings: dict[tuple[Phase, int], list[float]] = {}
    for number in timed_rounds(MIN_ROUNDS, MAX_ROUNDS, MAX_SECONDS, clock=clock, report=report):
        for count in counts if number % 2 else counts[::-1]:
            use(ThreadCounts.same(count))
            for phase, seconds in _timed(target, drafter, token, clock, {phase for phase in PHASES if count in candidates[phase]}):
                if number:
                    timings.setdefault((phase, count), []).append(seconds)
    target.rollback(0)
    return ThreadTimes(seconds={phase: {n: lower_quartile(timings[phase, n]) for n in candidates[phase]} for phase in PHASES})


def _timed(
    target: Target, drafter: Drafter | None, token: int, clock: Callable[[], float], phases: Collection[Phase]
) -> Iterator[tuple[Phase, float]]:
    """Yields the seconds of each of these phases after an empty cache."""
    target.rollback(0)
    start = clock()
    target.prefill([token] * PREFILL)
    if "prefill" in phases:
        yield "prefill", clock() - start
    if "verify" in phases:
        start = clock()
        for rows in VERIFIES:
            target.verify([token] * rows)
        yield "verify", clock() - start
    if "draft" in phases:
        target.verify([token])  # a draft follows a row of the newest forward
        start = clock()
        if drafter is not None:
            drafter.draft(token, DRAFTS)
        yield "draft", clock() - start


def _fewest(seconds: Mapping[int, float]) -> int:
    shortest = min(seconds.values())
    return min(count for count, time_s in seconds.items() if time_s * WORTH <= shortest)


def lower_quartile(timings: Sequence[float]) -> float:
    """Returns the lower quartile of at least one timing: other processes only add time."""
    return statistics.quantiles(timings, n=4, method="inclusive")[0] if len(timings) > 1 else timings[0]
