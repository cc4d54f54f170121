"""More machines of known seconds and watts: watts that rise with rows, and times that vary."""

from __future__ import annotations

import random
from dataclasses import dataclass

from edge_runtime.calibration.power_probe import ROWS, VERIFY_ROWS
from edge_runtime.drafting.energy_objective import PhasePower
from simulated_joules import LONGEST, Case, log_uniform

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
