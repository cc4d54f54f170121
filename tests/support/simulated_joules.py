"""Machines of known seconds and watts, and what the objective energy takes on them beside the best that its bound allows.

A case is a curve of verify costs, a draft step, watts by phase and a mean acceptance. Its reference is the best mix of two out of all
fixed lengths, whose seconds and joules per token are computed, the objective time, and policies that pay a constant price for time. The
bound is a share of the seconds that the objective time takes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.phase_power import EnergyCosts, PhasePower
from edge_runtime.drafting.policies import Timing
from edge_runtime.drafting.profit_policy import Profit
from edge_runtime.drafting.time_bound import TimeBound
from simulated_rounds import CURVES, ExactCosts, played

LONGEST, SEEDS = 12, (1, 2)
STEPS = (0.5, 2.0, 6.0)
ACCEPTANCES = (0.35, 0.55, 0.75, 0.9)
# A drafter on few cores; one that takes as much as a verify; one that takes five times as much; verifies of several rows as dear as one.
WATTS = {
    "2, 6, 3": PhasePower(draft=2, verify=6, plain=3),
    "5, 5, 2.5": PhasePower(draft=5, verify=5, plain=2.5),
    "30, 6, 5": PhasePower(draft=30, verify=6, plain=5),
    "3, 8, 8": PhasePower(draft=3, verify=8, plain=8),
}
PRICES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Milliseconds and millijoules per token."""

    seconds: float
    joules: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """One simulated machine and text."""

    curve: str | tuple[float, ...]
    step: float
    watts: str | PhasePower
    acceptance: float

    @property
    def verify(self) -> tuple[float, ...]:
        """Milliseconds of a verify of 1, 2, ... rows."""
        return CURVES[self.curve] if isinstance(self.curve, str) else self.curve

    @property
    def power(self) -> PhasePower:
        return WATTS[self.watts] if isinstance(self.watts, str) else self.watts

    def by_time(self, tokens: int, seed: int) -> Spent:
        """What the objective time takes."""
        counted = _Counted(self)
        return counted.after(Profit(counted, AcceptanceModel()), tokens, seed)

    def by_energy(self, tokens: int, seed: int, slowdown: float | None) -> Spent:
        """What the objective energy takes."""
        counted = _Counted(self)
        joules = EnergyCosts(counted, self.power)
        bound = None if slowdown is None else TimeBound(joules, slowdown)
        return counted.after(Profit(joules, AcceptanceModel(), bound=bound), tokens, seed)

    def priced(self, price: float, tokens: int, seed: int) -> Spent:
        """What a policy takes that pays `price` times the watts of a forward for each second."""
        counted = _Counted(self)
        joules = EnergyCosts(counted, self.power)
        joules.weights = 1.0, price * self.power.forward(1)
        return counted.after(Profit(joules, AcceptanceModel()), tokens, seed)

    def fixed(self) -> list[Spent]:
        """What rounds of 0, 1, ... drafts take; chances of drafts are independent, so their sums are exact."""
        verify = self.verify
        lengths = []
        for length in range(LONGEST + 1):
            tokens = sum(self.acceptance**n for n in range(length + 1))
            drafting = length * self.step
            seconds, rows = min((verify[rows - 1], rows) for rows in range(length + 1, len(verify) + 1))
            joules = drafting * self.power.draft + seconds * self.power.forward(rows)
            lengths.append(Spent(seconds=(drafting + seconds) / tokens, joules=joules / tokens))
        return lengths


class _Counted(ExactCosts):
    """Exact costs that count the seconds and joules of all rounds."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.verify, case.step)
        self._power, self._seconds, self._joules = case.power, 0.0, 0.0
        self._acceptance = case.acceptance

    def learn(self, timing: Timing) -> None:
        self._seconds += timing.draft_seconds + timing.verify_seconds
        self._joules += timing.draft_seconds * self._power.draft + timing.verify_seconds * self._power.forward(timing.rows)

    def after(self, policy: Profit, tokens: int, seed: int) -> Spent:
        """Runs the policy for so many tokens."""
        _, likely, _ = played(self, policy, lambda _: self._acceptance, tokens, seed, same_text=True)
        return Spent(seconds=self._seconds / likely, joules=self._joules / likely)


CASES = tuple(
    Case(curve=curve, step=step, watts=watts, acceptance=acceptance)
    for curve, step, watts, acceptance in product(sorted(CURVES), STEPS, WATTS, ACCEPTANCES)
)


def drawn(seed: int, count: int) -> list[Case]:
    """Draws cases from ranges: rows that cost what they do singly or in tiles, watts and acceptance."""
    draws = random.Random(seed)
    cases = []
    for _ in range(count):
        tile, slope, step = draws.choice((1, 4, 8)), 20 * log_uniform(draws, 0.02, 0.8), log_uniform(draws, 0.3, 8.0)
        tiles = [-(-rows // tile) * tile for rows in range(1, LONGEST + 2)]
        curve = (20.0, *(20 + slope * (rows - 1) * draws.uniform(0.95, 1.05) for rows in tiles[1:]))
        verify = log_uniform(draws, 3, 10)
        power = PhasePower(draft=log_uniform(draws, 1.5, 30), verify=verify, plain=verify * draws.uniform(0.4, 1.1))
        cases.append(Case(curve=curve, step=step, watts=power, acceptance=draws.uniform(0.3, 0.95)))
    return cases


def log_uniform(draws: random.Random, low: float, high: float) -> float:
    """Draws a number whose logarithm is uniform."""
    return low * (high / low) ** draws.random()


def best_mix(points: Sequence[Spent], limit: float) -> float:
    """Returns the least joules per token of a mix of two of these whose seconds per token are at most `limit`."""
    best = min((point.joules for point in points if point.seconds <= limit), default=float("inf"))
    for fast, slow in product(points, points):
        if fast.seconds <= limit < slow.seconds and slow.joules < fast.joules:
            share = (limit - fast.seconds) / (slow.seconds - fast.seconds)
            best = min(best, fast.joules + share * (slow.joules - fast.joules))
    return best


@dataclass(frozen=True, kw_only=True)
class Regret:
    """`slower`: seconds / those of the objective time; `joules` likewise; `regret`: joules / the best mix's within the bound, less 1."""

    case: Case
    slower: float
    joules: float
    regret: float

    @property
    def is_worse_in_both(self) -> bool:
        """Whether the objective time takes fewer seconds and fewer joules, by more than a thousandth each."""
        return self.slower > 1.001 and self.joules > 1.001


def regret(case: Case, slowdown: float, *, tokens: int, seeds: Sequence[int]) -> Regret:
    """Returns what the objective energy loses in one case, from the means over `seeds`."""

    def mean(run: Callable[[int], Spent]) -> Spent:
        spent = [run(seed) for seed in seeds]
        return Spent(seconds=sum(run.seconds for run in spent) / len(spent), joules=sum(run.joules for run in spent) / len(spent))

    time = mean(partial(case.by_time, tokens))
    energy = mean(lambda seed: case.by_energy(tokens, seed, slowdown))
    priced = [mean(partial(case.priced, price, tokens)) for price in PRICES]
    best = best_mix([*case.fixed(), time, *priced], (1 + slowdown) * time.seconds)
    return Regret(case=case, slower=energy.seconds / time.seconds, joules=energy.joules / time.joules, regret=energy.joules / best - 1)
