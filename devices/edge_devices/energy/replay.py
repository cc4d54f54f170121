"""A recorded trace in the place of a meter: repeats what another meter said, at the same distance from its start."""

from __future__ import annotations

from dataclasses import replace

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Sample
from edge_devices.meters.trace import Trace


class ReplayMeter:
    """Answers the recorded value that was current as long after the trace's start as now is after this meter's."""

    def __init__(self, system: System, trace: Trace) -> None:
        if not trace.times:
            raise MeterError("the recorded trace has no samples; record it again.")
        self._system, self._trace = system, trace
        self._begin = system.clock()
        self.facts = replace(trace.facts, name=f"replay:{trace.facts.name}", notes=(*trace.facts.notes, "replayed from a recording"))

    def read(self) -> Sample:
        """Returns the recorded value; raises MeterError past the end of the recording."""
        now = self._system.clock()
        elapsed = now - self._begin
        if elapsed > self._trace.times[-1] - self._trace.times[0] + self._trace.facts.poll_s:
            raise MeterError(f"the recording ends after {self._trace.times[-1] - self._trace.times[0]:.3g} s; this run is longer.")
        at = self._trace.index_at(self._trace.times[0] + elapsed)
        return Sample(now, self._trace.values[at], f"replayed {at}")
