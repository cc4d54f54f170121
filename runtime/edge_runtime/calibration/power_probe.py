"""Measures the power of each phase in loops of that phase alone, and caches it. For commands, since it reads a meter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_devices.energy.characteristics import Characteristics
from edge_devices.energy.live import EnergyWatch
from edge_devices.files.user_cache import entry_key
from edge_devices.machine.system import System
from edge_devices.meters.base import Meter
from edge_devices.waiting import Report, Waiting, silent_wait
from edge_runtime.calibration.cost_probe import TEXT
from edge_runtime.calibration.measured import MeasuredValue
from edge_runtime.calibration.placement import RoundEnergy
from edge_runtime.drafting.phase_power import PhasePower
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Drafter, Target

WATTS = MeasuredValue(kind="power", value_class=PhasePower, doing="measuring the power of each phase", times=1)
ROWS = 4  # of the verify whose power is taken for all verifies of several rows
STEPS = 3  # of a draft
ROOM = 1.1  # measuring window / the shortest window that gives a figure


@dataclass(frozen=True, kw_only=True)
class PowerProbe:
    """Calibrates with one meter; `notify` gets a sentence with the duration. Implements `placement.PowerSource`.

    A meter measures other programs too: watts of a busy machine are provisional.
    """

    system: System
    meter: Meter
    notify: Callable[[str], None]
    waiting: Waiting = silent_wait

    @property
    def name(self) -> str:
        """Meter and scope."""
        return f"{self.meter.facts.name} {self.meter.facts.scope}"

    @property
    def window_s(self) -> float:
        """Seconds of one measurement."""
        return ROOM * Characteristics.expected(self.meter.facts).shortest_window_s

    def phases(self, target: Target, drafter: Drafter | None, token: int, max_rows: int, key: str) -> PhasePower:
        """Returns the watts cached under `key` for this meter, or measures them; empties the KV cache. Raises RequestError."""

        def measure(report: Report, _: object) -> PhasePower:
            return self._measure(target, drafter, token, max_rows, report)

        return WATTS.known_or_measured(entry_key([key, self.name]), measure, self.notify, waiting=self.waiting)

    def energy_of(self, work: Callable[[], None]) -> RoundEnergy:
        """Repeats `work` for a window of the meter; returns what one call took. Raises RequestError without a figure."""
        with EnergyWatch(self.system, self.meter) as watch:
            begin, calls = self.system.clock(), 0
            while self.system.clock() - begin < self.window_s:
                work()
                calls += 1
        energy = watch.energy(1)
        if energy.joules is None:
            raise RequestError(f"the power of this machine could not be measured: {energy.sentence()}")
        joules = energy.joules
        try:
            return RoundEnergy(joules=joules.value / calls, seconds=energy.seconds / calls, error=joules.error / joules.value)
        except (ValueError, ZeroDivisionError) as error:
            raise RequestError(f"{self.meter.facts.name} gave no power ({error}); see edge-devices meters --measure") from error

    def _measure(self, target: Target, drafter: Drafter | None, token: int, max_rows: int, report: Report) -> PhasePower:
        longest, steps = min(max_rows, target.context - 2, target.rewind_slack), min(STEPS, max_rows - 1)
        text = [token] * max(1, min(TEXT, target.context - longest - 1))
        self.notify(f"measuring the power of each phase with {self.meter.facts.name}, about {3 * self.window_s:.0f} s, once")
        target.rollback(0)
        target.prefill(text)

        def forward(rows: int) -> None:
            target.verify([token] * rows)
            target.rollback(len(text))

        def draft() -> None:
            if drafter is None or not drafter.draft(token, steps):
                raise RequestError("there is no drafter whose power could be measured; the energy objective needs one")

        plain = self._watts(lambda: forward(1))
        report(1 / 3)
        verify = self._watts(lambda: forward(min(ROWS, longest)))
        report(2 / 3)
        target.verify([token])  # a draft follows a row of the newest forward
        drafting = self._watts(draft)
        target.rollback(0)
        return PhasePower(draft=drafting, verify=verify, plain=plain)

    def _watts(self, work: Callable[[], None]) -> float:
        energy = self.energy_of(work)
        return energy.joules / energy.seconds
