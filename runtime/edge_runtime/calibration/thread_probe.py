"""How many threads, and on machines with fast and slow cores which of them, each phase runs fastest on: measured once, then remembered.

More threads are not always faster: batches of one row wait for memory, a drafter's steps are shorter than a thread takes to wake up, and
the slowest core of a team holds up the others.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal

from edge_runtime.interfaces import Drafter, Target

CACHE_NAME = "threads.json"
MAX_SECONDS = 2.0
MIN_ROUNDS, MAX_ROUNDS = 2, 9
# What is timed: a prefill of so many tokens, verifies of these numbers of rows, a draft of so many tokens.
PREFILL, VERIFIES, DRAFTS = 16, (1, 4), 3
# Fewer threads are taken where more are not faster by this: they leave the rest of the machine alone, and draw less power.
WORTH = 0.97
MOST_SECONDS = 3600.0
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
    def most(self) -> int:
        """The largest of them."""
        return max(self.prefill, self.verify, self.draft)

    def to_json(self) -> dict[str, int]:
        """Plain values under stable keys."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ThreadTimes:
    """Seconds of each phase by number of threads, and how many times they were measured."""

    seconds: Mapping[Phase, Mapping[int, float]]
    times: int = 1

    def best(self) -> ThreadCounts:
        """Of each phase the fewest threads that are about as fast as the fastest number."""
        prefill, verify, draft = (_fewest(self.seconds[phase]) for phase in PHASES)
        return ThreadCounts(prefill=prefill, verify=verify, draft=draft)

    def combined(self, other: ThreadTimes) -> ThreadTimes:
        """The smaller of each figure: what kept the machine busy in one measurement was probably not there in another."""
        seconds = {
            phase: {n: min(taken, other.seconds[phase].get(n, taken)) for n, taken in self.seconds[phase].items()} for phase in PHASES
        }
        return ThreadTimes(seconds=seconds, times=self.times + other.times)

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return {"times": self.times, "seconds": {phase: {str(n): s for n, s in taken.items()} for phase, taken in self.seconds.items()}}

    @classmethod
    def from_json(cls, data: Any, tries: Mapping[Phase, Sequence[int]]) -> ThreadTimes | None:
        """Returns what `to_json` wrote about exactly these `tries`, or None for anything else."""
        times, seconds = (data.get("times"), data.get("seconds")) if isinstance(data, Mapping) else (None, None)
        if not isinstance(times, int) or times < 1 or not isinstance(seconds, Mapping):
            return None
        read: dict[Phase, dict[int, float]] = {}
        for phase in PHASES:
            taken = seconds.get(phase)
            if not isinstance(taken, Mapping) or set(taken) != {str(n) for n in tries[phase]}:
                return None
            if not all(isinstance(s, float) and 0 <= s < MOST_SECONDS for s in taken.values()):
                return None
            read[phase] = {n: taken[str(n)] for n in tries[phase]}
        return cls(seconds=read, times=times)


def candidates(groups: Sequence[Sequence[int]]) -> dict[Phase, list[int]]:
    """Returns the numbers worth trying on processors grouped by speed: whole clusters, half of all and all; for drafts 1, 2 and 4 too."""
    sums = list(accumulate(map(len, groups)))
    total = sums[-1]
    forwards = sorted({max(1, total // 2), *sums})
    return {"prefill": forwards, "verify": forwards, "draft": sorted({n for n in (1, 2, 4) if n <= total} | set(forwards))}


def measure_threads(
    target: Target,
    drafter: Drafter | None,
    use: Callable[[ThreadCounts], None],
    tries: Mapping[Phase, Sequence[int]],
    token: int,
    *,
    max_seconds: float = MAX_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> ThreadTimes:
    """Times each phase with each number of `tries`, in turn; leaves the cache empty. `use` makes the pair run on so many threads.

    The first round warms up; of the others, at least MIN_ROUNDS, the lower quartile counts: what other processes do only adds time.
    """
    counts = sorted({n for numbers in tries.values() for n in numbers})
    taken: dict[tuple[Phase, int], list[float]] = {}
    begin = clock()
    for number in range(MAX_ROUNDS + 1):
        if number > MIN_ROUNDS and clock() - begin > max_seconds:
            break
        for count in counts if number % 2 else counts[::-1]:
            use(ThreadCounts.same(count))
            for phase, seconds in _timed(target, drafter, token, clock, [phase for phase in PHASES if count in tries[phase]]):
                if number:
                    taken.setdefault((phase, count), []).append(seconds)
    target.rollback(0)
    return ThreadTimes(seconds={phase: {n: lower_quartile(taken[phase, n]) for n in tries[phase]} for phase in PHASES})


def _timed(
    target: Target, drafter: Drafter | None, token: int, clock: Callable[[], float], phases: Sequence[Phase]
) -> list[tuple[Phase, float]]:
    times: list[tuple[Phase, float]] = []
    target.rollback(0)
    start = clock()
    target.prefill([token] * PREFILL)
    if "prefill" in phases:
        times.append(("prefill", clock() - start))
    if "verify" in phases:
        start = clock()
        for rows in VERIFIES:
            target.verify([token] * rows)
        times.append(("verify", clock() - start))
    if "draft" in phases:
        target.verify([token])  # a draft follows a row of the newest forward
        start = clock()
        if drafter is not None:
            drafter.draft(token, DRAFTS)
        times.append(("draft", clock() - start))
    return times


def _fewest(seconds: Mapping[int, float]) -> int:
    least = min(seconds.values())
    return min(count for count, taken in seconds.items() if taken * WORTH <= least)


def lower_quartile(taken: Sequence[float]) -> float:
    """Returns what a quarter of at least one timing stays below: other processes only ever add time."""
    return statistics.quantiles(taken, n=4, method="inclusive")[0] if len(taken) > 1 else taken[0]
