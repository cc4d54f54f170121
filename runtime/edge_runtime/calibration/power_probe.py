"""Measures the power of each phase by repeating that phase alone, and caches it. Only commands use it, since it reads a meter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from edge_devices.energy.live import EnergyWatch
from edge_devices.energy.recorder import Characteristics
from edge_devices.files.user_cache import entry_key
from edge_devices.machine.system import System
from edge_devices.meters.base import Meter
from edge_devices.waiting import Report, Waiting, silent_wait
from edge_runtime.calibration.first_use import TEXT
from edge_runtime.calibration.measured import MeasuredValue
from edge_runtime.drafting.energy_objective import MAX_WATTS, PhasePower
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Drafter, Target

WATTS = MeasuredValue(kind="power", value_class=PhasePower, doing="measuring the power of each phase", times=1)
# The numbers of rows whose power is measured; between them it is interpolated. More rows keep more of a processor busy.
ROWS = (1, 2, 4, 8, 13)
VERIFY_ROWS = 4  # rows of the verify whose power is used where the number of rows is unknown
STEPS = 3  # tokens of a draft
ROOM = 1.1  # length of a measurement, relative to the shortest one that gives a figure


@dataclass(frozen=True, kw_only=True)
class PowerProbe:
    """Measures with one meter; `notify` gets a sentence with the duration. Implements `energy_objective.PowerSource`.

    A meter measures other programs too, so watts of a busy machine are provisional.
    """

    system: System
    meter: Meter
    notify: Callable[[str], None]
    waiting: Waiting = silent_wait

    @property
    def name(self) -> str:
        """The names of the meter and of its scope."""
        return f"{self.meter.facts.name} {self.meter.facts.scope}"

    @property
    def window_s(self) -> float:
        """The seconds of one measurement."""
        return ROOM * Characteristics.expected(self.meter.facts).shortest_window_s

    def phases(self, target: Target, drafter: Drafter | None, token: int, max_rows: int, key: str) -> PhasePower:
        """Returns the watts that are cached under `key` for this meter, or measures them. See `PowerSource.phases`."""

        def measure(report: Report, _: object) -> PhasePower:
            return self._measure(target, drafter, token, max_rows, report)

        return WATTS.known_or_measured(entry_key([key, self.name]), measure, self.notify, waiting=self.waiting)

    def _measure(self, target: Target, drafter: Drafter | None, token: int, max_rows: int, report: Report) -> PhasePower:
        longest, steps = min(max_rows, target.context - 2, target.rewind_slack), min(STEPS, max_rows - 1)
        text = [token] * max(1, min(TEXT, target.context - longest - 1))
        widths = sorted({min(rows, longest) for rows in ROWS})
        loops = len(widths) + 1
        self.notify(f"measuring the power of each phase with {self.meter.facts.name}, about {loops * self.window_s:.0f} s, once")
        target.rollback(0)
        target.prefill(text)

        def forward(rows: int) -> None:
            target.verify([token] * rows)
            target.rollback(len(text))

        def draft() -> None:
            if drafter is None or not drafter.draft(token, steps):
                raise RequestError("there is no drafter whose power could be measured; the energy objective needs one")

        by_rows = {}
        for done, rows in enumerate(widths):
            by_rows[rows] = self._watts(partial(forward, rows))
            report((done + 1) / loops)
        target.verify([token])  # gives the hidden row that a draft needs
        drafting = self._watts(draft)
        target.rollback(0)
        return PhasePower(draft=drafting, verify=by_rows[min(VERIFY_ROWS, longest)], plain=by_rows[widths[0]], by_rows=by_rows)

    def _watts(self, work: Callable[[], object]) -> float:
        """Repeats `work` for one measurement; returns the mean power. Raises RequestError if the meter gives no figure."""
        with EnergyWatch(self.system, self.meter) as watch:
            begin = self.system.clock()
            while self.system.clock() - begin < self.window_s:
                work()
        energy = watch.energy(1)
        if energy.joules is None:
            raise RequestError(f"the power of this machine could not be measured: {energy.sentence()}")
        watts = energy.joules.value / energy.seconds if energy.seconds > 0 else 0.0
        if not 0 < watts <= MAX_WATTS:
            raise RequestError(f"{self.meter.facts.name} gave {watts:g} W, which is no power; see edge-devices meters --measure")
        return watts
