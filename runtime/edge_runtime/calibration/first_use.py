"""Measurements on first use of a pair on a machine, then cached: its costs, and the best threads of each phase, by time or by joules."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from edge_devices.files.user_cache import cache_folder, cache_put, entry_key, read_entries
from edge_devices.machine.cpu_affinity import keep_to_fastest, processor_groups, stay_on
from edge_devices.machine.facts import cpu_identity
from edge_devices.waiting import Report, Waiting, silent_wait
from edge_runtime.calibration.cost_probe import CACHE_NAME, cache_costs, cached_costs, measure_costs
from edge_runtime.calibration.placement import CACHE_NAME as PLACEMENTS_NAME
from edge_runtime.calibration.placement import Placement, PlacementFigures, PlacementProbe, PowerSource, RoundLoop, placements
from edge_runtime.calibration.quiet import QuietCheck
from edge_runtime.calibration.thread_probe import CACHE_NAME as THREADS_NAME
from edge_runtime.calibration.thread_probe import ThreadCounts, ThreadTimes, candidates, measure_threads
from edge_runtime.drafting.cost_model import CostCurve, Costs
from edge_runtime.drafting.phase_power import EnergyCosts, PhasePower
from edge_runtime.interfaces import Drafter, Target

# Load comes and goes, so each of the first uses measures. What was measured on a busy machine is used once and not kept.
TIMES = 3
F = TypeVar("F", bound="_Figures")


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


class _Figures(Protocol):
    """What was measured on `times` first uses."""

    @property
    def times(self) -> int:
        """How many measurements are combined."""

    def combined(self, other: Self, /) -> Self:
        """Returns both as one."""


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """Measures on each of the first TIMES uses, but on a busy machine only what is not known yet, which is not kept then."""

    what: str
    doing: str
    notify: Callable[[str], None]
    waiting: Waiting

    def known_or_measured(self, known: F | None, measure: Callable[[Report], F], keep: Callable[[F], object]) -> F:
        if known is not None and known.times >= TIMES:
            return known
        check = QuietCheck(self.what, self.notify)
        if known is not None and check.was_busy:
            return known
        with self.waiting(self.doing) as report:
            now = measure(report)
        found = now if known is None else known.combined(now)
        if check.passed():
            keep(found)
        return found


def measured_costs(
    pair: MeasuredPair, power: PhasePower | PowerSource | None, notify: Callable[[str], None], *, waiting: Waiting = silent_wait
) -> Costs:
    """Returns the cached costs of this pair on this machine; on the first TIMES uses measures them, in about two seconds.

    On a busy machine, known costs are not measured again. Costs are seconds, or joules if the objective is energy; measuring the power
    takes longer. Measuring empties the KV cache, so call this before the prompt of a request is in it.
    """
    path = cache_folder() / CACHE_NAME
    probe = _Probe(what="the costs of drafts", doing="measuring what drafts cost on this machine", notify=notify, waiting=waiting)
    measured = probe.known_or_measured(
        cached_costs(path, pair.key),
        lambda report: measure_costs(pair.target, pair.drafter, pair.token, most_rows=pair.rows, report=report),
        lambda costs: cache_costs(path, pair.key, costs),
    )
    curve = CostCurve(measured)
    if pair.objective != "energy" or power is None:
        return curve
    watts = power if isinstance(power, PhasePower) else power.phases(pair.target, pair.drafter, pair.token, pair.rows, pair.key)
    return EnergyCosts(curve, watts, slowdown=pair.slowdown)


def measured_threads(
    pair: MeasuredPair, set_threads: Callable[[ThreadCounts], None], notify: Callable[[str], None], *, waiting: Waiting = silent_wait
) -> ThreadCounts:
    """Sets the cached numbers of threads; on the first TIMES uses measures the best ones, in about two seconds.

    Where cores differ, the process is pinned to the fastest from then on. Measuring empties the KV cache.
    """
    groups = processor_groups()
    most = sum(map(len, groups))

    def use(counts: ThreadCounts) -> None:
        keep_to_fastest(counts.most, groups)
        set_threads(counts)

    if most == 1:
        return ThreadCounts.same(1)
    path, key, tries = cache_folder() / THREADS_NAME, pair.key, candidates(groups)
    known = ThreadTimes.from_json(read_entries(path).get(key), tries)
    if known is None:
        notify("First use of this bundle on this machine: finding out how many threads each phase runs fastest on.")
    probe = _Probe(what="the numbers of threads", doing="finding the fastest numbers of threads", notify=notify, waiting=waiting)
    best = probe.known_or_measured(
        known,
        lambda report: measure_threads(pair.target, pair.drafter, use, tries, pair.token, report=report),
        lambda times: cache_put(path, key, times.to_json()),
    ).best()
    use(best)
    return best


def measured_placement(
    pair: MeasuredPair,
    set_threads: Callable[[ThreadCounts], None],
    power: PowerSource,
    notify: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.perf_counter,
    waiting: Waiting = silent_wait,
) -> tuple[Placement, float]:
    """Sets the threads and processors with the fewest joules per round; returns them, and their time / that of the fastest.

    The first use measures each placement with the meter; the next ones up to TIMES the one in use and its best rival again. Measuring
    empties the KV cache. Raises RequestError where the meter has no figure.
    """
    groups, counts = processor_groups(), measured_threads(pair, set_threads, notify, waiting=waiting)

    def use(one: Placement) -> None:
        if len(groups) > 1:
            stay_on(one.processors)
        set_threads(one.threads)

    loop = RoundLoop(pair.target, pair.drafter, pair.token)
    probe = PlacementProbe(loop=loop, tries=placements(groups, counts), use=use, power=power, clock=clock)
    path, key = cache_folder() / PLACEMENTS_NAME, entry_key([pair.key, power.name])
    known, trusted = PlacementFigures.from_json(read_entries(path).get(key), [one.name for one in probe.tries]), True
    if known is None or known.times < TIMES:
        again = probe.worth_measuring() if known is None else known.rivals(pair.slowdown)
        if len(again) > 1:
            notify(f"measuring the joules of {len(again)} choices of cores and threads, about {len(again) * power.window_s:.0f} s")
            check = QuietCheck("the joules of cores and threads", notify)
            with waiting("measuring the joules of cores and threads") as report:
                rounds = probe.measured(again, report)
            known = known.with_again(rounds) if known else PlacementFigures(rounds=rounds, fastest=again[0], chosen=again[0])
            trusted = check.passed()
    if known is None:  # nothing to choose from
        use(probe.tries[0])
        return probe.tries[0], 1.0
    before, known = known, known.decided(pair.slowdown)
    if trusted:
        cache_put(path, key, known.to_json())
    if known.chosen != before.chosen:
        notify(f"fewest joules: {known.sentence()}")
    chosen = probe.named(known.chosen)
    use(chosen)
    return chosen, known.slower
