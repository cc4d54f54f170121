"""Measures the power of each phase in loops of that phase alone, and caches it. For commands, since it reads a meter."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from edge_devices.energy.characteristics import Characteristics
from edge_devices.energy.live import EnergyWatch
from edge_devices.files.user_cache import cache_folder, cache_put, read_entries
from edge_devices.machine.system import System
from edge_devices.meters.base import Meter
from edge_runtime.calibration.cost_probe import TEXT
from edge_runtime.drafting.phase_power import PhasePower, power_of
from edge_runtime.errors import ConfigError, RequestError
from edge_runtime.interfaces import Drafter, Target

CACHE_NAME = "power.json"
ROWS = 4  # of the verify whose power is taken for all verifies of several rows
STEPS = 3  # of a draft
ROOM = 1.1  # measuring window / the shortest window that gives a figure


@dataclass(frozen=True, kw_only=True)
class PowerProbe:
    """Calibrates with one meter; `notify` gets a sentence with the duration. Implements `first_use.PowerSource`."""

    system: System
    meter: Meter
    notify: Callable[[str], None]

    def __call__(self, target: Target, drafter: Drafter | None, token: int, most_rows: int, key: str) -> PhasePower:
        """Returns the watts cached under `key` for this meter, or measures them; empties the KV cache. Raises RequestError."""
        facts, path = self.meter.facts, cache_folder() / CACHE_NAME
        own = hashlib.sha256(f"{key} {facts.name} {facts.scope}".encode()).hexdigest()
        try:
            return power_of(read_entries(path).get(own), str(path))
        except ConfigError:
            power = self._measure(target, drafter, token, most_rows)
        cache_put(path, own, power.to_json())
        return power

    def _measure(self, target: Target, drafter: Drafter | None, token: int, most_rows: int) -> PhasePower:
        longest, steps = min(most_rows, target.context - 2, target.rewind_slack), min(STEPS, most_rows - 1)
        text = [token] * max(1, min(TEXT, target.context - longest - 1))
        seconds = ROOM * Characteristics.expected(self.meter.facts).shortest_window_s
        self.notify(f"measuring the power of each phase with {self.meter.facts.name}, about {3 * seconds:.0f} s, once")
        target.rollback(0)
        target.prefill(text)

        def forward(rows: int) -> None:
            target.verify([token] * rows)
            target.rollback(len(text))

        def draft() -> None:
            if drafter is None or not drafter.draft(token, steps):
                raise RequestError("there is no drafter whose power could be measured; the energy objective needs one")

        plain = self._watts(lambda: forward(1), seconds)
        verify = self._watts(lambda: forward(min(ROWS, longest)), seconds)
        target.verify([token])  # a draft follows a row of the newest forward
        drafting = self._watts(draft, seconds)
        target.rollback(0)
        return PhasePower(draft=drafting, verify=verify, plain=plain)

    def _watts(self, work: Callable[[], None], seconds: float) -> float:
        with EnergyWatch(self.system, self.meter) as watch:
            begin = self.system.clock()
            for _ in itertools.takewhile(lambda _: self.system.clock() - begin < seconds, itertools.count()):
                work()
        energy = watch.energy(1)
        if energy.watts is None:
            raise RequestError(f"the power of a phase could not be measured: {energy.sentence()}")
        return energy.watts
