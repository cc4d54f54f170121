"""The readings of a meter over time: times and values, from which windows are cut."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from edge_devices.errors import MeasurementError
from edge_devices.meters.base import MeterFacts, Sample


@dataclass(kw_only=True)
class Trace:
    """Readings of one meter in the order of their times (seconds); values in joules (counter) or watts (sampler)."""

    facts: MeterFacts
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @staticmethod
    def of(facts: MeterFacts, samples: Iterable[Sample]) -> Trace:
        """Collects samples; raises MeasurementError if a time decreases."""
        trace = Trace(facts=facts)
        for sample in samples:
            trace.add(sample)
        return trace

    def add(self, sample: Sample) -> None:
        """Appends a reading; raises MeasurementError if its time decreases or a value is not finite."""
        if not (math.isfinite(sample.time_s) and math.isfinite(sample.value)):
            raise MeasurementError(f"the recording holds {sample.value} at {sample.time_s} s, which is not a number; record it again")
        if self.times and sample.time_s < self.times[-1]:
            raise MeasurementError(f"the recording goes back in time, from {self.times[-1]} to {sample.time_s} s; record it again")
        self.times.append(sample.time_s)
        self.values.append(sample.value)

    def index_at(self, time_s: float) -> int:
        """Returns the index of the last reading at or before a time; raises MeasurementError if there is none."""
        index = bisect_right(self.times, time_s) - 1
        if index < 0:
            raise MeasurementError(f"the recording begins only after {time_s:.3f} s; start the meter before the work")
        return index

    def span(self, start_s: float, end_s: float) -> range:
        """Returns the indices of the readings in [start_s, end_s]."""
        return range(bisect_right(self.times, math.nextafter(start_s, -math.inf)), bisect_right(self.times, end_s))
