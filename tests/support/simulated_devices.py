"""More machines of known seconds and watts: watts that rise with rows, and machines and texts that change within a request."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from edge_runtime.calibration.power_probe import ROWS, VERIFY_ROWS
from edge_runtime.drafting.energy_objective import PhasePower
from edge_runtime.drafting.policies import Fixed, Timing
from simulated_joules import LONGEST, Case, Device, Spent, log_uniform, mean

NOISE = 0.08
# Seconds that a row adds, as a share of those of one row: flat, cheap and dear.
SLOPES = ((0.005, 0.02), (0.04, 0.12), (0.25, 0.7))


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
    """A machine whose watts rise with the rows of a verify."""

    rising: RisingWatts

    @property
    def power(self) -> RisingWatts:
        return self.rising

    @property
    def calibrated(self) -> PhasePower:
        return self.rising.calibrated()


def rising(seed: int, count: int) -> list[RisingCase]:
    """Draws machines whose watts rise with rows, which are flat, cheap or dear in time; each time that is measured is off by 8 %."""
    draws = random.Random(seed)
    return [RisingCase(**_rising_machine(draws), acceptance=draws.uniform(0.3, 0.95)) for _ in range(count)]


def _rising_machine(draws: random.Random) -> dict[str, object]:
    slope, step = 20 * log_uniform(draws, *draws.choice(SLOPES)), log_uniform(draws, 0.3, 8.0)
    plain = draws.uniform(2, 8)
    watts = RisingWatts(plain, plain * draws.uniform(1, 4), draws.uniform(0.5, 2), plain * draws.uniform(0.5, 1.5))
    curve = (20.0, *(20 + slope * (rows - 1) * draws.uniform(0.95, 1.05) for rows in range(2, LONGEST + 2)))
    return {"curve": curve, "step": step, "watts": watts.calibrated(), "rising": watts, "noise": NOISE}


@dataclass(frozen=True, kw_only=True)
class ChangingCase(RisingCase):
    """A machine and a text that change within a request.

    Every `period` tokens the acceptance changes between `acceptance` and `other`. Heat adds watts to every phase, up to the share `leak` of
    those of one row, with a time constant of `warming` milliseconds. From the token `step_at` on, a machine that is too hot or shared takes
    `slower` times as long for a forward, `drafts_slower` times as long for a draft, and the share `dimmed` of its watts.
    """

    other: float
    period: int
    leak: float
    warming: float
    step_at: int
    slower: float
    drafts_slower: float
    dimmed: float

    def acceptance_at(self, place: int) -> float:
        return self.other if place // self.period % 2 else self.acceptance

    def device(self) -> Device:
        return ChangingDevice(self)

    def fixed(self, tokens: int, seeds: Sequence[int]) -> list[Spent]:
        """What rounds of 0, 1, ... drafts take on the same texts."""
        return [mean([self.device().after(Fixed(length), tokens, seed) for seed in seeds]) for length in range(LONGEST + 1)]


class ChangingDevice(Device):
    """A machine that gets warm, and slower from a certain token on."""

    case: ChangingCase

    def __init__(self, case: ChangingCase) -> None:
        super().__init__(case)
        self._is_slow = False

    def verify(self, rows: int) -> float:
        return super().verify(rows) * (self.case.slower if self._is_slow else 1.0)

    def draft(self, steps: int, requests: int = 1) -> float:
        return super().draft(steps, requests) * (self.case.drafts_slower if self._is_slow else 1.0)

    def take(self, timing: Timing) -> None:
        dimmed = self.case.dimmed if self._is_slow else 1.0
        leaked = self.case.leak * self.case.power.plain * -math.expm1(-self.seconds / self.case.warming)
        seconds, joules = self.seconds, self.joules
        super().take(timing)
        self.joules = joules + dimmed * (self.joules - joules) + leaked * (self.seconds - seconds)
        self._is_slow = timing.length >= self.case.step_at


def changing(seed: int, count: int) -> list[ChangingCase]:
    """Draws machines and texts that change within 2000 tokens."""
    draws = random.Random(seed)
    return [
        ChangingCase(
            **_rising_machine(draws),
            acceptance=draws.uniform(0.3, 0.95),
            other=draws.uniform(0.3, 0.95),
            period=draws.randrange(200, 800),
            leak=draws.uniform(0.0, 0.4),
            warming=draws.uniform(3_000, 30_000),
            step_at=draws.randrange(500, 1500),
            slower=draws.uniform(1.0, 1.6),
            drafts_slower=draws.uniform(1.0, 1.6),
            dimmed=draws.uniform(0.6, 1.0),
        )
        for _ in range(count)
    ]
