"""The costs of drafts, in seconds or joules, and the thread counts that a pair starts with on this machine.

Nothing is measured before the first token: a session takes the cached values, otherwise computed ones, and updates them from its rounds.
Commands can have everything measured at once. Costs in joules need that, because the watts of a meter cannot be computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from edge_devices.files.user_cache import entry_key
from edge_devices.machine.cpu_affinity import keep_to_fastest, processor_groups
from edge_devices.machine.facts import cpu_identity
from edge_devices.machine.load import LoadWatch
from edge_devices.waiting import Report, Waiting, silent_wait
from edge_runtime.calibration.cost_probe import COSTS, measure_costs
from edge_runtime.calibration.measured import Known, Notify
from edge_runtime.calibration.thread_probe import THREADS, ThreadCounts, ThreadTimes, candidates, measure_threads, usual_threads
from edge_runtime.drafting.cost_model import MAX_ROWS, SETTLED, CostCurve, Costs, MeasuredCosts
from edge_runtime.drafting.phase_power import EnergyCosts, PhasePower, PowerSource
from edge_runtime.interfaces import Drafter, Target


@dataclass(frozen=True, kw_only=True)
class MeasuredPair:
    """An opened pair, a token to fill texts with, the most rows of a verify, and `facts`, everything its speed depends on."""

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
    """The costs of a pair on this machine, for all requests of a session, and what their rounds taught.

    `computed` are those by the pair's sizes. With `measure` they are measured where no measured ones are kept, in about two seconds. Costs
    are seconds, or joules if the objective is energy; a meter measures its watts first. Measuring empties the KV cache.
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
        """Returns the costs, which all calls share."""
        if self._costs is None:
            self._costs = self._first()
        return self._costs

    def keep(self) -> None:
        """Caches the costs learned from rounds, unless measured ones are cached; provisional until a quiet machine timed all row counts."""
        learned = None if self._curve is None else self._curve.learned()
        if learned is None or ((known := COSTS.known(self._pair.key)) is not None and not known.provisional):
            return
        busy = self._load.load().is_busy
        settled = min(learned.timings[: self._pair.rows]) >= SETTLED and not busy
        # Timings of a busy machine are not final: a quiet one has to time each number of rows itself.
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
            # What a probe gave on a busy machine counts as one timing of each number of rows.
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
    """Sets the cached thread counts, or the usual ones for such processors if none are cached; measures nothing.

    Where cores differ, the process is pinned to the fastest from then on.
    """
    groups = processor_groups()
    known = THREADS.known(pair.key, fits=lambda known: known.are_of(candidates(groups)))
    counts = usual_threads(groups) if known is None else known.value.best()
    keep_to_fastest(counts.largest, groups)
    set_threads(counts)
    return counts


def measured_threads(
    pair: MeasuredPair, set_threads: Callable[[ThreadCounts], None], notify: Notify, *, waiting: Waiting = silent_wait
) -> ThreadCounts:
    """Sets the thread counts; the first calls measure the best ones, in about two seconds.

    Where cores differ, the process is pinned to the fastest from then on. Measuring empties the KV cache.
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
    pair: MeasuredPair, set_threads: Callable[[ThreadCounts], None], notify: Notify, *, measure: bool, waiting: Waiting = silent_wait
) -> MeasuredPair:
    """Sets the cached thread counts, or measures the best ones with `measure`; returns the pair with the counts among its facts."""
    threads = measured_threads(pair, set_threads, notify, waiting=waiting) if measure else kept_threads(pair, set_threads)
    return replace(pair, facts=(*pair.facts, threads))
