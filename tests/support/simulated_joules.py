"""Machines of known seconds and watts, and what the objective energy takes on them beside the best that its bound allows.

A case is a curve of verify costs, a draft step, watts by phase and a mean acceptance. It is compared with the best mix of two out of all
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
from edge_runtime.calibration.power_probe import ROWS, VERIFY_ROWS
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.cost_model import MAX_ROWS, CostCurve, Costs, MeasuredCosts
from edge_runtime.drafting.energy_objective import EnergyCosts, PhasePower, TimeBound
from edge_runtime.drafting.policies import DraftLengthPolicy, RoundPlan, RoundResult, Timing
from edge_runtime.drafting.profit_policy import Profit
from simulated_rounds import ExactCosts, played

LONGEST = 12
PRICES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)
NOISE = 0.08
# Seconds that a row adds, as a share of those of one row: flat, cheap and dear.
SLOPES = ((0.005, 0.02), (0.04, 0.12), (0.25, 0.7))


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
    """One simulated machine and text.

    `verify`: milliseconds of 1, 2, ... rows; `calibrated`: the watts that a calibration with a meter knows; `noise`: standard deviation of
    every time that is measured, as a share of it. Without noise, the policy knows all times.
    """

    verify: tuple[float, ...]
    step: float
    calibrated: PhasePower
    acceptance: float
    noise: float = 0.0

    @property
    def power(self) -> Watts:
        """The watts that a round takes."""
        return self.calibrated

    def by_time(self, tokens: int, seed: int) -> Spent:
        """What the objective time takes."""
        device = Device(self)
        return device.after(Profit(device.known(seed), AcceptanceModel()), tokens, seed)

    def by_energy(self, tokens: int, seed: int, slowdown: float) -> Spent:
        """What the objective energy takes."""
        device = Device(self)
        joules = EnergyCosts(device.known(seed), self.calibrated)
        return device.after(Profit(joules, AcceptanceModel(), bound=TimeBound(joules, slowdown)), tokens, seed)

    def priced(self, price: float, tokens: int, seed: int) -> Spent:
        """What a policy takes that pays `price` times the watts of a forward for each second."""
        device = Device(self)
        joules = EnergyCosts(device.known(seed), self.calibrated)
        joules.weights = 1.0, price * self.calibrated.forward(1)
        return device.after(Profit(joules, AcceptanceModel()), tokens, seed)

    def fixed(self) -> list[Spent]:
        """What rounds of 0, 1, ... drafts take; chances of drafts are independent, so their sums are exact."""
        lengths = []
        for length in range(LONGEST + 1):
            emitted = sum(self.acceptance**n for n in range(length + 1))
            drafting = length * self.step
            seconds, rows = min((self.verify[rows - 1], rows) for rows in range(length + 1, len(self.verify) + 1))
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
        _, likely, _ = played(self, _Counted(policy, self), lambda _: self.case.acceptance, tokens, seed, same_text=True)
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
        verify = (20.0, *(20 + slope * (rows - 1) * draws.uniform(0.95, 1.05) for rows in tiles[1:]))
        watts = log_uniform(draws, 3, 10)
        power = PhasePower(draft=log_uniform(draws, 1.5, 30), verify=watts, plain=watts * draws.uniform(0.4, 1.1))
        cases.append(Case(verify=verify, step=step, calibrated=power, acceptance=draws.uniform(0.3, 0.95)))
    return cases


@dataclass(frozen=True)
class RisingWatts:
    """Watts of forwards that rise from those of one row to those of 9: more rows keep more of a processor busy."""

    plain: float
    full: float
    exponent: float
    draft: float

    def forward(self, rows: int) -> float:
        return self.plain + (self.full - self.plain) * min(1.0, ((rows - 1) / 8) ** self.exponent)

    def calibrated(self) -> PhasePower:
        """What a calibration measures of them, exactly."""
        by_rows = {rows: self.forward(rows) for rows in ROWS}
        return PhasePower(draft=self.draft, verify=self.forward(VERIFY_ROWS), plain=self.plain, by_rows=by_rows)


@dataclass(frozen=True, kw_only=True)
class RisingCase(Case):
    """A machine whose watts rise with the rows of a verify, which a calibration tells exactly."""

    rising: RisingWatts

    @property
    def power(self) -> RisingWatts:
        return self.rising


def rising(seed: int, count: int) -> list[RisingCase]:
    """Draws machines whose watts rise with rows, which are flat, cheap or dear in time; each time that is measured is off by 8 %."""
    draws, cases = random.Random(seed), []
    for _ in range(count):
        slope, step = 20 * log_uniform(draws, *draws.choice(SLOPES)), log_uniform(draws, 0.3, 8.0)
        plain = draws.uniform(2, 8)
        watts = RisingWatts(plain, plain * draws.uniform(1, 4), draws.uniform(0.5, 2), plain * draws.uniform(0.5, 1.5))
        verify = (20.0, *(20 + slope * (rows - 1) * draws.uniform(0.95, 1.05) for rows in range(2, LONGEST + 2)))
        known = {"verify": verify, "step": step, "calibrated": watts.calibrated(), "noise": NOISE}
        cases.append(RisingCase(**known, rising=watts, acceptance=draws.uniform(0.3, 0.95)))
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

    slower: float
    joules: float
    regret: float


def mean(spent: Sequence[Spent]) -> Spent:
    """The means of several texts."""
    return Spent(seconds=fmean(one.seconds for one in spent), joules=fmean(one.joules for one in spent))


def regret(case: Case, slowdown: float, *, tokens: int, seeds: Sequence[int]) -> Regret:
    """Returns what the objective energy loses in one case, from the means over `seeds`."""
    energy = mean([case.by_energy(tokens, seed, slowdown) for seed in seeds])
    time = mean([case.by_time(tokens, seed) for seed in seeds])
    priced = [mean([case.priced(price, tokens, seed) for seed in seeds]) for price in PRICES]
    best = best_mix([*case.fixed(), time, *priced], (1 + slowdown) * time.seconds)
    return Regret(slower=energy.seconds / time.seconds, joules=energy.joules / time.joules, regret=energy.joules / best - 1)
