"""Threads and processors with the fewest joules per round: measured with a meter on first use, then kept.

Slow cores take fewer watts, but for longer, and all the while the rest of the device is on too. Which is less, only a meter can tell.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Protocol

from edge_devices.machine.cpu_affinity import fastest
from edge_devices.waiting import Report, no_report
from edge_runtime.calibration.measured import MeasuredValue
from edge_runtime.calibration.thread_probe import DRAFTS, MAX_PHASE_SECONDS, VERIFIES, ThreadCounts
from edge_runtime.drafting.phase_power import MAX_WATTS, PhasePower
from edge_runtime.interfaces import Drafter, Target

TEXT = 16  # tokens in the cache before a round
# The placement in use stays unless another one saves this share of joules, and more than twice what the meter leaves open.
SAVES, STANDARD_ERRORS = 0.05, 2.0
# No placement is measured that takes this many times as long as the fastest: idle power alone makes up for its fewer watts.
TOO_SLOW = 4.0
ROUNDS = 3  # timed, after one that warms up, to leave out what cannot be less than another


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Threads of each phase, and the processors that the process stays on."""

    processors: tuple[int, ...]
    threads: ThreadCounts

    @property
    def name(self) -> str:
        """The threads of a verify and the processors, such as "2 on 4,5,6,7"."""
        return f"{self.threads.verify} on {','.join(map(str, self.processors))}"

    def is_within(self, other: Placement) -> bool:
        """Whether it uses some of the other one's processors or threads, and nothing else."""
        mine, theirs = (set(self.processors), self.threads.verify), (set(other.processors), other.threads.verify)
        return mine != theirs and mine[0] <= theirs[0] and mine[1] <= theirs[1]


@dataclass(frozen=True, kw_only=True)
class RoundEnergy:
    """Joules and seconds of one round; `error`: the relative standard error of the joules."""

    joules: float
    seconds: float
    error: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be of a round."""
        fine = 0 < self.seconds < MAX_PHASE_SECONDS and 0 < self.joules < MAX_WATTS * self.seconds and 0 <= self.error < math.inf
        if not fine:
            raise ValueError(f"{self.joules!r} J in {self.seconds!r} s is no round")


class PowerSource(Protocol):
    """A meter that measures work on an opened pair. Both methods raise RequestError where it cannot."""

    @property
    def name(self) -> str:
        """Meter and scope; figures of another one are not comparable."""

    @property
    def window_s(self) -> float:
        """Seconds of one measurement."""

    def phases(self, target: Target, drafter: Drafter | None, token: int, max_rows: int, key: str) -> PhasePower:
        """Returns the watts of each phase, measured or cached under `key`; empties the KV cache. `token` fills texts."""

    def energy_of(self, work: Callable[[], None]) -> RoundEnergy:
        """Repeats `work` until the meter has a figure; returns what one call took."""


@dataclass(frozen=True, kw_only=True)
class PlacementFigures:
    """What rounds took by name of the placement; the names of the fastest and of the one in use."""

    rounds: Mapping[str, RoundEnergy]
    fastest: str
    chosen: str

    @property
    def slower(self) -> float:
        """Time of the placement in use / of the fastest."""
        return self.rounds[self.chosen].seconds / self.rounds[self.fastest].seconds

    def sentence(self) -> str:
        """Returns the placement in use beside the fastest."""
        joules = self.rounds[self.chosen].joules / self.rounds[self.fastest].joules
        return f"threads {self.chosen}, {joules:.2f} × the joules and {self.slower:.2f} × the time of the fastest ({self.fastest})"

    def decided(self, slowdown: float | None) -> PlacementFigures:
        """Returns these figures with the placement of fewest joules among those at most `slowdown` slower than the fastest (None: all).

        Hysteresis: the one in use stays unless another saves more than SAVES, and than the meter leaves open.
        """
        allowed = self._allowed(slowdown)
        held = self.chosen if self.chosen in allowed else self.fastest
        best = min(allowed, key=lambda name: allowed[name].joules)
        doubt = STANDARD_ERRORS * math.hypot(allowed[best].error, allowed[held].error)
        saved = 1 - allowed[best].joules / allowed[held].joules
        return replace(self, chosen=best if saved > max(SAVES, doubt) else held)

    def worth_repeating(self, slowdown: float | None) -> list[str]:
        """Returns the names of the placement in use and of the best other one: these two are measured again."""
        allowed = self._allowed(slowdown)
        return [self.chosen, *sorted(allowed.keys() - {self.chosen}, key=lambda name: allowed[name].joules)[:1]]

    def with_again(self, again: Mapping[str, RoundEnergy], times: int) -> PlacementFigures:
        """Returns the means of these figures, of so many measurements, and those of one more."""
        means = {
            name: RoundEnergy(
                joules=(times * self.rounds[name].joules + new.joules) / (times + 1),
                seconds=(times * self.rounds[name].seconds + new.seconds) / (times + 1),
                error=math.hypot(times * self.rounds[name].error, new.error) / (times + 1),
            )
            for name, new in again.items()
        }
        return replace(self, rounds={**self.rounds, **means})

    def are_of(self, names: Sequence[str]) -> bool:
        """Whether all placements are among `names`, whose first is the fastest."""
        return {names[0], self.chosen} <= self.rounds.keys() <= set(names) and self.fastest == names[0]

    def _allowed(self, slowdown: float | None) -> dict[str, RoundEnergy]:
        limit = math.inf if slowdown is None else (1 + slowdown) * self.rounds[self.fastest].seconds
        return {name: energy for name, energy in self.rounds.items() if energy.seconds <= limit or name == self.fastest}


FIGURES = MeasuredValue(kind="placements", value_class=PlacementFigures, doing="measuring the joules of cores and threads")


def placements(groups: Sequence[Sequence[int]], best: ThreadCounts) -> list[Placement]:
    """Returns what to try on cores grouped by speed: first the fastest threads, `best`, where they run now.

    On equal cores: one, two, half of all and all threads. Else complete clusters from the fastest on, and each cluster alone, with all
    and with half its cores.
    """
    every = tuple(number for group in groups for number in group)
    alike = len(groups) == 1
    if alike:
        pairs = [(every, n) for n in (1, 2, len(every) // 2, len(every)) if 1 <= n <= len(every)]
    else:
        pairs = [(every[:size], size) for size in accumulate(map(len, groups))]
        pairs += [(tuple(group), n) for group in groups for n in (len(group), max(1, len(group) // 2))]
    first = Placement(processors=every if alike else tuple(fastest(best.largest, [list(group) for group in groups])), threads=best)
    named = {first.name: first}
    for processors, n in pairs:
        threads = ThreadCounts(prefill=min(best.prefill, len(processors)), verify=n, draft=min(best.draft, n))
        placement = Placement(processors=processors, threads=threads)
        named.setdefault(placement.name, placement)
    return list(named.values())


@dataclass(frozen=True, kw_only=True)
class PlacementProbe:
    """Measures rounds of an opened pair on placements, of which `placements` begins with the fastest; `use` sets one, `token` fills texts.

    A round is as in decoding: a forward of one row, a draft, a verify of several rows.
    """

    target: Target
    drafter: Drafter | None
    token: int
    placements: Sequence[Placement]
    use: Callable[[Placement], None]
    power: PowerSource
    clock: Callable[[], float] = time.perf_counter

    def named(self, name: str) -> Placement:
        """Returns the placement of that name."""
        return next(placement for placement in self.placements if placement.name == name)

    def worth_measuring(self) -> list[str]:
        """Times all placements and returns the names of those worth measuring, the fastest first.

        Left out is what takes far longer than that one, and what is no faster than another with no other processors and no more threads.
        """
        seconds = {placement.name: self._seconds(placement) for placement in self.placements}
        first, *others = self.placements

        def is_worth(placement: Placement) -> bool:
            better = (other for other in self.placements if other.is_within(placement) and seconds[other.name] <= seconds[placement.name])
            return seconds[placement.name] < TOO_SLOW * seconds[first.name] and not any(better)

        return [first.name, *(placement.name for placement in others if is_worth(placement))]

    def measured(self, names: Sequence[str], report: Report = no_report) -> dict[str, RoundEnergy]:
        """Returns what a round takes on each of these placements; leaves the KV cache empty. `report` gets the share that is done."""
        energies = {}
        for done, name in enumerate(names):
            report(done / len(names))
            self._begin(self.named(name))
            energies[name] = self.power.energy_of(self._round)
        self.target.rollback(0)
        return energies

    @property
    def _text(self) -> int:
        """Tokens that rounds follow."""
        return max(1, min(TEXT, self.target.context - max(VERIFIES) - 1))

    def _begin(self, placement: Placement) -> None:
        self.use(placement)
        self.target.rollback(0)
        self.target.prefill([self.token] * self._text)

    def _round(self) -> None:
        for rows in VERIFIES:
            self.target.verify([self.token] * min(rows, self.target.rewind_slack))
            if self.drafter is not None and rows == 1:
                self.drafter.draft(self.token, DRAFTS)
            self.target.rollback(self._text)

    def _seconds(self, placement: Placement) -> float:
        self._begin(placement)
        ends = [self.clock()]
        for _ in range(ROUNDS + 1):
            self._round()
            ends.append(self.clock())
        self.target.rollback(0)
        return statistics.median(end - begin for begin, end in pairwise(ends[1:]))
