"""Machines of known seconds and watts, and what the objective energy takes on them beside the best that its bound allows.

A case is a curve of verify costs, a draft step, watts by phase and a mean acceptance. Its reference is the best mix of two out of all
fixed lengths, whose seconds and joules per token are computed, the objective time, and policies that pay a constant price for time. The
bound is a share of the seconds that the objective time takes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Protocol

from edge_runtime.calibration.first_use import MIN_ROUNDS
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.cost_model import MAX_ROWS, CostCurve, Costs, MeasuredCosts
from edge_runtime.drafting.energy_objective import EnergyCosts, PhasePower, TimeBound
from edge_runtime.drafting.policies import DraftLengthPolicy, RoundPlan, RoundResult, Timing
from edge_runtime.drafting.profit_policy import Profit
from simulated_rounds import CURVES, ExactCosts, played

LONGEST = 12
# A drafter on few cores; one that takes as much as a verify; one that takes five times as much; verifies of several rows as dear as one.
WATTS = {
    "2, 6, 3": PhasePower(draft=2, verify=6, plain=3),
    "5, 5, 2.5": PhasePower(draft=5, verify=5, plain=2.5),
    "30, 6, 5": PhasePower(draft=30, verify=6, plain=5),
    "3, 8, 8": PhasePower(draft=3, verify=8, plain=8),
}
PRICES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)


class Watts(Protocol):
    """Watts of drafting, and of a forward of so many rows."""

    @property
    def draft(self) -> float: ...

    def forward(self, rows: int) -> float: ...


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
    noise: float = 0.0  # standard deviation of every time that is measured, as a share of it; without it, the policy knows all times

    @property
    def verify(self) -> tuple[float, ...]:
        """Milliseconds of a verify of 1, 2, ... rows."""
        return CURVES[self.curve] if isinstance(self.curve, str) else self.curve

    @property
    def power(self) -> Watts:
        """The watts that a round takes."""
        return WATTS[self.watts] if isinstance(self.watts, str) else self.watts

    @property
    def calibrated(self) -> PhasePower:
        """What a calibration with a meter knows of them."""
        return WATTS[self.watts] if isinstance(self.watts, str) else self.watts

    def acceptance_at(self, place: int) -> float:
        """The mean chance of a draft after so many tokens."""
        return self.acceptance

    def device(self) -> Device:
        """A machine that has run nothing yet."""
        return Device(self)

    def by_time(self, tokens: int, seed: int) -> Spent:
        """What the objective time takes."""
        device = self.device()
        return device.after(Profit(device.known(seed), AcceptanceModel()), tokens, seed)

    def by_energy(self, tokens: int, seed: int, slowdown: float | None) -> Spent:
        """What the objective energy takes."""
        device = self.device()
        joules = EnergyCosts(device.known(seed), self.calibrated)
        bound = None if slowdown is None else TimeBound(joules, slowdown)
        return device.after(Profit(joules, AcceptanceModel(), bound=bound), tokens, seed)

    def priced(self, price: float, tokens: int, seed: int) -> Spent:
        """What a policy takes that pays `price` times the watts of a forward for each second."""
        device = self.device()
        joules = EnergyCosts(device.known(seed), self.calibrated)
        joules.weights = 1.0, price * self.calibrated.forward(1)
        return device.after(Profit(joules, AcceptanceModel()), tokens, seed)

    def fixed(self, tokens: int, seeds: Sequence[int]) -> list[Spent]:
        """What rounds of 0, 1, ... drafts take; chances of drafts are independent, so their sums are exact."""
        verify = self.verify
        lengths = []
        for length in range(LONGEST + 1):
            emitted = sum(self.acceptance**n for n in range(length + 1))
            drafting = length * self.step
            seconds, rows = min((verify[rows - 1], rows) for rows in range(length + 1, len(verify) + 1))
            joules = drafting * self.power.draft + seconds * self.power.forward(rows)
            lengths.append(Spent(seconds=(drafting + seconds) / emitted, joules=joules / emitted))
        return lengths


class Device(ExactCosts):
    """The times and watts of a case, and the seconds and joules of all rounds so far."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.verify, case.step)
        self.case, self.seconds, self.joules = case, 0.0, 0.0

    def known(self, seed: int) -> Costs:
        """What a session knows of the times."""
        return self if not self.case.noise else MeasuredDevice(self, self.case.noise, seed)

    def take(self, timing: Timing) -> None:
        """Takes in a round."""
        power = self.case.power
        self.seconds += timing.draft_seconds + timing.verify_seconds
        self.joules += timing.draft_seconds * power.draft + timing.verify_seconds * power.forward(timing.rows)

    def after(self, policy: DraftLengthPolicy, tokens: int, seed: int) -> Spent:
        """What a policy takes per token, the luck of what was accepted left out, for so many tokens."""
        _, likely, _ = played(self, _Counted(policy, self), self.case.acceptance_at, tokens, seed, same_text=True)
        return Spent(seconds=self.seconds / likely, joules=self.joules / likely)


class _Counted:
    """A policy whose rounds a device takes in."""

    def __init__(self, policy: DraftLengthPolicy, device: Device) -> None:
        self._policy, self._device = policy, device

    def plan(self) -> RoundPlan:
        return self._policy.plan()

    def observe(self, result: RoundResult) -> None:
        if result.timing is not None:
            self._device.take(result.timing)
        self._policy.observe(result)


class MeasuredDevice(CostCurve):
    """Costs from a probe and from rounds, of which every single time is off by `noise` (normal, as a share); a probe takes several."""

    def __init__(self, device: Device, noise: float, seed: int) -> None:
        self._noise, self._draws = noise, random.Random(seed)
        probe = noise / MIN_ROUNDS**0.5
        verify = tuple(device.verify(rows) * self._draws.gauss(1, probe) for rows in range(1, MAX_ROWS + 1))
        super().__init__(MeasuredCosts(verify=verify, step=device.draft(1) * self._draws.gauss(1, probe)))

    def learn(self, timing: Timing) -> None:
        draft, verify = (seconds * self._draws.gauss(1, self._noise) for seconds in (timing.draft_seconds, timing.verify_seconds))
        super().learn(timing._replace(draft_seconds=draft, verify_seconds=verify))


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


def mean(spent: Sequence[Spent]) -> Spent:
    """The means of several texts."""
    return Spent(seconds=fmean(one.seconds for one in spent), joules=fmean(one.joules for one in spent))


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the objective energy is compared with: the objective time, and the best mix within the bound."""

    time: Spent
    best_joules: float


def reference(case: Case, slowdown: float, *, tokens: int, seeds: Sequence[int]) -> Reference:
    """Returns the means over `seeds`."""
    time = mean([case.by_time(tokens, seed) for seed in seeds])
    priced = [mean([case.priced(price, tokens, seed) for seed in seeds]) for price in PRICES]
    fixed = case.fixed(tokens, seeds)
    return Reference(time=time, best_joules=best_mix([*fixed, time, *priced], (1 + slowdown) * time.seconds))


def regret(case: Case, slowdown: float, *, tokens: int, seeds: Sequence[int]) -> Regret:
    """Returns what the objective energy loses in one case, from the means over `seeds`."""
    beside = reference(case, slowdown, tokens=tokens, seeds=seeds)
    energy = mean([case.by_energy(tokens, seed, slowdown) for seed in seeds])
    return Regret(
        case=case,
        slower=energy.seconds / beside.time.seconds,
        joules=energy.joules / beside.time.joules,
        regret=energy.joules / beside.best_joules - 1,
    )
