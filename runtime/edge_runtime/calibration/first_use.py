"""What a session starts with on this machine: the costs of drafts and verifies, in seconds or joules, and the thread counts.

A session measures nothing before its first token: it takes cached values, or else computed ones, and corrects them by its rounds. Commands
can ask for measurements at once. Costs in joules need that, because the watts of a meter cannot be computed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import numpy as np

from edge_devices.files.user_cache import entry_key
from edge_devices.machine.processors import LoadWatch, cpu_identity, keep_to_fastest, processor_groups
from edge_devices.waiting import Report, Waiting, no_report, silent_wait
from edge_runtime.calibration.measured import Known, MeasuredValue, Notify
from edge_runtime.drafting.cost_model import MAX_ROWS, MIN_SECONDS, SETTLED, CostCurve, Costs, MeasuredCosts, extrapolated
from edge_runtime.drafting.energy_objective import EnergyCosts, PhasePower, PowerSource
from edge_runtime.interfaces import Drafter, Target

COSTS = MeasuredValue(kind="costs", value_class=MeasuredCosts, doing="measuring what drafts cost on this machine")
MAX_SECONDS = 2.0
MIN_ROUNDS, MAX_ROUNDS = 3, 15
# Tokens of the text after which rows are verified.
TEXT = 32


def measure_costs(
    target: Target,
    drafter: Drafter | None,
    token: int,
    *,
    max_rows: int = MAX_ROWS,
    max_seconds: float = MAX_SECONDS,
    report: Report = no_report,
) -> MeasuredCosts:
    """Times rounds, a draft and then a verify, of 1 to `max_rows` rows after a short text that repeats `token`.

    A first pass warms up. Then all numbers of rows are timed at least MIN_ROUNDS times, and again until `max_seconds` are over; `steady`
    combines the timings. Without a drafter, or with one that drafts nothing here, drafts get a negligible cost. Leaves the cache empty.
    `report` gets the share of the work that is done.
    """
    longest = min(max_rows, target.context - 2, target.rewind_slack)
    begin_text(target, token, longest)
    rounds: list[list[float]] = []
    drafted = [0] * longest
    for number in timed_rounds(MIN_ROUNDS, MAX_ROUNDS, max_seconds, clock=time.perf_counter, report=report):
        verified, drafts = [0.0] * longest, [0.0] * longest
        # The order alternates, so that its effect on the CPU's caches is the same for all numbers of rows.
        for rows in range(1, longest + 1) if number % 2 else range(longest, 0, -1):
            if target.length + longest > target.context:
                begin_text(target, token, longest)
            start = time.perf_counter()
            if drafter is not None and rows > 1:
                drafted[rows - 1] = len(drafter.draft(token, rows - 1))
            middle = time.perf_counter()
            target.verify([token] * rows)
            verified[rows - 1], drafts[rows - 1] = time.perf_counter() - middle, middle - start
            # One token is kept, as in a round, because a draft needs the hidden row of a token of the newest forward.
            target.rollback(target.length - rows + 1)
        rounds.append([*verified, *drafts])
    target.rollback(0)
    figures = steady(rounds[1:])
    verify = figures[:longest]
    while len(verify) < MAX_ROWS:  # one request cannot have more rows here, but several requests together may
        verify.append(extrapolated(verify))
    overhead, step = overhead_and_step(drafted, figures[longest:])
    return MeasuredCosts(verify=tuple(verify), step=step, overhead=overhead)


def timed_rounds(min_rounds: int, max_rounds: int, max_seconds: float, *, clock: Callable[[], float], report: Report) -> Iterator[int]:
    """Yields the numbers of rounds, until `max_seconds` are over. `report` gets the share that is done.

    Round 0 warms up; at least `min_rounds` and at most `max_rounds` rounds follow.
    """
    begin = clock()
    for number in range(max_rounds + 1):
        seconds = clock() - begin
        if number > min_rounds and seconds > max_seconds:
            return
        report(max(number / (max_rounds + 1), min(number / (min_rounds + 1), seconds / max_seconds if max_seconds else 1.0)))
        yield number


def begin_text(target: Target, token: int, longest: int) -> None:
    """Fills the cache with TEXT tokens, or fewer if a verify of `longest` rows needs the room, so that a draft can follow."""
    target.rollback(0)
    target.prefill([token] * max(0, min(TEXT, target.context - longest - 2) - 1))
    target.verify([token])


def overhead_and_step(drafted: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Returns the fixed overhead of a draft and the cost per token, by a least-squares line through drafts of several lengths.

    `drafted` are the numbers of tokens, `seconds` the times.
    """
    timed = [(count, times) for count, times in zip(drafted, seconds, strict=True) if count]
    if not timed:
        return 0.0, MIN_SECONDS
    counts, times = np.array(timed).T
    if len(set(counts)) > 1:
        apart = counts - counts.mean()
        step = (apart * times).sum() / (apart * apart).sum()
        overhead = times.mean() - step * counts.mean()
        if overhead > 0 and step > 0:
            return float(overhead), float(step)
    return 0.0, max(float((times / counts).mean()), MIN_SECONDS)


def steady(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Returns a figure for each column of the rounds: the median of its share of a round, times the shortest round.

    Between rounds, the speed of a machine varies by more than the figures differ. It affects all figures of a round alike, so shares of a
    round are more reliable than seconds.
    """
    totals = [sum(figures) for figures in rounds]
    shares = zip(*([figure / total for figure in figures] for figures, total in zip(rounds, totals, strict=True)), strict=True)
    return [statistics.median(share) * min(totals) for share in shares]


# Thread counts. More threads are not always faster: batches of one row wait for memory, a draft step is shorter than the time that a thread
# takes to wake up, and the slowest core delays the others.

MAX_THREAD_SECONDS = 2.0
MIN_THREAD_ROUNDS, MAX_THREAD_ROUNDS = 2, 9
# The timed work: tokens of the prefill, rows of each verify, tokens of the draft.
PREFILL, VERIFIES, DRAFTS = 16, (1, 4), 3
# More threads are used only if the time falls below this share, because they take cores from other programs and draw more power.
WORTH = 0.97
MAX_PHASE_SECONDS = 3600.0
# Threads of a draft if nothing was measured; few, because its steps are short.
USUAL_DRAFT = 2
Phase = Literal["prefill", "verify", "draft"]
PHASES: tuple[Phase, ...] = ("prefill", "verify", "draft")


@dataclass(frozen=True, kw_only=True)
class ThreadCounts:
    """The number of threads of each phase, at least 1. Plain decoding uses that of verify."""

    prefill: int
    verify: int
    draft: int

    @classmethod
    def same(cls, threads: int) -> ThreadCounts:
        """Returns the same number for all phases."""
        return cls(prefill=threads, verify=threads, draft=threads)

    @property
    def largest(self) -> int:
        return max(self.prefill, self.verify, self.draft)


@dataclass(frozen=True, kw_only=True)
class ThreadTimes:
    """The seconds of each phase, by number of threads. Raises ValueError for times that are negative or longer than MAX_PHASE_SECONDS."""

    seconds: Mapping[Phase, Mapping[int, float]]

    def __post_init__(self) -> None:
        if not all(0 <= seconds < MAX_PHASE_SECONDS for times in self.seconds.values() for seconds in times.values()):
            raise ValueError(f"{self.seconds!r} are not the seconds of phases")

    def best(self) -> ThreadCounts:
        """Returns for each phase the smallest number of threads that is nearly as fast as the fastest number."""
        prefill, verify, draft = (_fewest(self.seconds[phase]) for phase in PHASES)
        return ThreadCounts(prefill=prefill, verify=verify, draft=draft)

    def combined(self, other: ThreadTimes) -> ThreadTimes:
        """Returns the minimum of each figure, since other processes can only make a measurement slower."""
        seconds = {
            phase: {n: min(seconds, other.seconds[phase].get(n, seconds)) for n, seconds in self.seconds[phase].items()} for phase in PHASES
        }
        return ThreadTimes(seconds=seconds)

    def are_of(self, candidates: Mapping[Phase, Sequence[int]]) -> bool:
        """Whether exactly these numbers of threads were timed."""
        return {phase: [*times] for phase, times in self.seconds.items()} == {phase: [*numbers] for phase, numbers in candidates.items()}


THREADS = MeasuredValue(kind="threads", value_class=ThreadTimes, doing="finding the fastest numbers of threads")


def candidates(groups: Sequence[Sequence[int]]) -> dict[Phase, list[int]]:
    """Returns the thread counts to try on cores that are grouped by speed, the fastest group first.

    They are: all cores of the fastest groups, one to all groups; half of all cores; and for drafts also 1, 2 and 4.
    """
    sums = list(accumulate(map(len, groups)))
    total = sums[-1]
    forwards = sorted({max(1, total // 2), *sums})
    return {"prefill": forwards, "verify": forwards, "draft": sorted({n for n in (1, 2, 4) if n <= total} | set(forwards))}


def usual_threads(groups: Sequence[Sequence[int]]) -> ThreadCounts:
    """Returns the counts to use if none were measured: all cores except the slowest group, if at least two are left; few for a draft."""
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
    """Times each phase with each number of threads in `candidates`; leaves the cache empty. `use` sets the thread counts of the pair.

    The first round warms up. The lower quartile over the others, at least MIN_THREAD_ROUNDS, is the result, because other processes only
    add time. `report` gets the share of the work that is done.
    """
    counts = sorted({n for numbers in candidates.values() for n in numbers})
    timings: dict[tuple[Phase, int], list[float]] = {}
    for number in timed_rounds(MIN_THREAD_ROUNDS, MAX_THREAD_ROUNDS, MAX_THREAD_SECONDS, clock=clock, report=report):
        for count in counts if number % 2 else counts[::-1]:
            use(ThreadCounts.same(count))
            for phase, seconds in _timed(target, drafter, token, clock, {phase for phase in PHASES if count in candidates[phase]}):
                if number:
                    timings.setdefault((phase, count), []).append(seconds)
    target.rollback(0)
    quartiles = {key: statistics.quantiles(times, n=4, method="inclusive")[0] for key, times in timings.items()}
    return ThreadTimes(seconds={phase: {n: quartiles[phase, n] for n in candidates[phase]} for phase in PHASES})


def _timed(
    target: Target, drafter: Drafter | None, token: int, clock: Callable[[], float], phases: Collection[Phase]
) -> Iterator[tuple[Phase, float]]:
    """Yields these phases with their seconds, starting from an empty cache."""
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
        target.verify([token])  # gives the hidden row that a draft needs
        start = clock()
        if drafter is not None:
            drafter.draft(token, DRAFTS)
        yield "draft", clock() - start


def _fewest(seconds: Mapping[int, float]) -> int:
    shortest = min(seconds.values())
    return min(count for count, time_s in seconds.items() if time_s * WORTH <= shortest)


@dataclass(frozen=True, kw_only=True)
class MeasuredPair:
    """An opened pair to measure.

    `token` fills test texts, `rows` is the most rows of a verify, and `facts` are everything that the speed depends on besides the CPU.
    """

    target: Target
    drafter: Drafter | None
    token: int
    rows: int
    objective: str
    slowdown: float | None
    facts: tuple[object, ...]

    @property
    def key(self) -> str:
        """The key of its cached measurements."""
        return entry_key([cpu_identity(), self.rows, [*map(str, self.facts)]])


class PairCosts:
    """The costs of a pair on this machine, which all requests of a session share and correct by their rounds.

    `computed` are the costs that follow from the pair's sizes. With `measure`, costs are measured unless measured ones are cached, which
    takes about two seconds. Costs are in seconds, or in joules if the objective is energy; then `power` measures the watts if it is a
    meter. Measuring empties the KV cache.
    """

    def __init__(
        self,
        pair: MeasuredPair,
        computed: MeasuredCosts,
        power: PhasePower | PowerSource | None,
        notify: Notify,
        *,
        measure: bool,
        waiting: Waiting = silent_wait,
    ) -> None:
        self._pair, self._computed, self._power, self._notify = pair, computed, power, notify
        self._measure, self._waiting = measure, waiting
        self._curve: CostCurve | None = None
        self._costs: Costs | None = None
        self._load = LoadWatch()

    def __call__(self) -> Costs:
        """Returns the costs; all calls return the same object."""
        if self._costs is None:
            self._costs = self._first()
        return self._costs

    def keep(self) -> None:
        """Caches the costs that rounds taught, unless measured ones are cached.

        They are provisional until all numbers of rows have enough timings of a quiet machine.
        """
        learned = None if self._curve is None else self._curve.learned()
        if learned is None or ((known := COSTS.known(self._pair.key)) is not None and not known.provisional):
            return
        busy = self._load.load().is_busy
        settled = min(learned.timings[: self._pair.rows]) >= SETTLED and not busy
        # On a busy machine, no number of rows may count as settled, so that each is timed again on a quiet one.
        timings = () if settled else tuple(min(count, SETTLED - 1) for count in learned.timings) if busy else learned.timings
        COSTS.keep(self._pair.key, replace(learned, timings=timings), self._notify, provisional=not settled)

    def _first(self) -> Costs:
        pair, power = self._pair, self._power
        if self._measure:
            COSTS.known_or_measured(pair.key, self._measured, self._notify, waiting=self._waiting, fits=lambda costs: not costs.timings)
        known = COSTS.known(pair.key)
        if known is None:
            curve = CostCurve(self._computed)
        elif known.provisional:
            # The result of a probe on a busy machine counts as a single timing of each number of rows.
            curve = CostCurve(self._computed, known.value if known.value.timings else replace(known.value, timings=(1,) * MAX_ROWS))
        else:
            curve = CostCurve(known.value)
        self._curve = curve
        if pair.objective != "energy" or power is None:
            return curve
        watts = power if isinstance(power, PhasePower) else power.phases(pair.target, pair.drafter, pair.token, pair.rows, pair.key)
        return EnergyCosts(curve, watts, slowdown=pair.slowdown)

    def _measured(self, report: Report, known: Known[MeasuredCosts] | None) -> MeasuredCosts:
        pair = self._pair
        costs = measure_costs(pair.target, pair.drafter, pair.token, max_rows=pair.rows, report=report)
        return known.value.combined(costs) if known else costs


def kept_threads(pair: MeasuredPair, set_threads: Callable[[ThreadCounts], None]) -> ThreadCounts:
    """Sets and returns the cached thread counts, or the default ones if none are cached; measures nothing.

    If cores differ in speed, the process is pinned to the fastest ones from then on.
    """
    groups = processor_groups()
    known = THREADS.known(pair.key, fits=lambda known: known.are_of(candidates(groups)))
    counts = usual_threads(groups) if known is None else known.value.best()
    keep_to_fastest(counts.largest, groups)
    set_threads(counts)
    return counts


def measured_threads(pair: MeasuredPair, set_threads: Callable[[ThreadCounts], None], notify: Notify, *, waiting: Waiting) -> ThreadCounts:
    """Sets and returns the best thread counts. They are cached; the first uses measure them, in about two seconds.

    If cores differ in speed, the process is pinned to the fastest ones from then on. Measuring empties the KV cache.
    """
    groups = processor_groups()
    if sum(map(len, groups)) == 1:
        return ThreadCounts.same(1)
    thread_counts = candidates(groups)

    def use(counts: ThreadCounts) -> None:
        keep_to_fastest(counts.largest, groups)
        set_threads(counts)

    def measure(report: Report, known: Known[ThreadTimes] | None) -> ThreadTimes:
        if known is None:
            notify("Finding out how many threads each phase runs fastest on.")
        times = measure_threads(pair.target, pair.drafter, use, thread_counts, pair.token, report=report)
        return known.value.combined(times) if known else times

    times = THREADS.known_or_measured(pair.key, measure, notify, waiting=waiting, fits=lambda known: known.are_of(thread_counts))
    best = times.best()
    use(best)
    return best


def on_best_threads(
    pair: MeasuredPair, set_threads: Callable[[ThreadCounts], None], notify: Notify, *, measure: bool, waiting: Waiting
) -> MeasuredPair:
    """Sets the thread counts, with `measure` by `measured_threads`, else by `kept_threads`; returns the pair with them among its facts."""
    threads = measured_threads(pair, set_threads, notify, waiting=waiting) if measure else kept_threads(pair, set_threads)
    return replace(pair, facts=(*pair.facts, threads))
