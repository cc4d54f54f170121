"""A power model in the place of a meter. It measures nothing, is never found by itself, and every output says `estimate`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Kind, MeterFacts, Sample, Scope


class EstimateMeter:
    """Idle watts × time + watts per busy core × this process's processor seconds: joules of a model, not of the device."""

    def __init__(
        self, system: System, *, idle_watts: float, core_watts: float, busy_seconds: Callable[[], float] = time.process_time
    ) -> None:
        """`busy_seconds`: processor time of this process, all its threads; child processes are not in it. MeterError for impossible watts."""
        for name, watts in (("idle", idle_watts), ("core", core_watts)):
            if not (math.isfinite(watts) and 0 <= watts <= 1000):
                raise MeterError(f"{name} watts of {watts} make no power model; give a number from 0 to 1000.")
        self._system, self._busy_seconds = system, busy_seconds
        self._idle_watts, self._core_watts = idle_watts, core_watts
        self._begin = system.clock(), busy_seconds()
        self.facts = MeterFacts(
            name="estimate",
            kind=Kind.COUNTER,
            scope=Scope.ESTIMATE,
            source=f"model: {idle_watts:g} W idle + {core_watts:g} W per busy core",
            refresh_s=0.001,
            resolution=0.001,
            poll_s=1.0,
            systematic="unbounded: this is a model, not a measurement",
            notes=("ESTIMATE: nothing was measured",),
        )

    def read(self) -> Sample:
        """Evaluates the model; joules."""
        now, busy = self._system.clock(), self._busy_seconds()
        joules = self._idle_watts * (now - self._begin[0]) + self._core_watts * (busy - self._begin[1])
        return Sample(now, joules, f"busy={busy:.6f}")
