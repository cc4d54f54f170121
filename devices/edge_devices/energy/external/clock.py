"""The offset of an external meter's clock, found from load steps, and a run log with its readings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from edge_devices.energy.characteristics import Characteristics, change_times
from edge_devices.energy.run_log import RunLog
from edge_devices.errors import MeasurementError
from edge_devices.meters.base import Kind, Sample, Trace

MIN_FIT = 0.5  # share of the power's variance that the steps must explain
MAX_RIVAL_SHARE = 0.9  # of the best fit
MAX_RECORDING_S = 6 * 3600.0
Span = tuple[float, float]  # seconds


def clock_offset(trace: Trace, loads: Sequence[Span], *, search: Span) -> float:
    """Returns the seconds to add to the trace's times so that its power is high in the spans of load and low in the rests around them.

    The fit of an offset is the share of variance over loads and rests that two levels explain (R² of a step function); `search`
    bounds the offset. Raises MeasurementError if no step is visible, or if another offset fits almost as well (equal steps and rests).
    """
    if len(loads) < 2:
        raise MeasurementError(f"{len(loads)} load steps cannot align two clocks; give at least 2, of different lengths")
    between = [(a[1], b[0]) for a, b in pairwise(loads)]
    margin = min(end - start for start, end in between)
    rests = [(loads[0][0] - margin, loads[0][0]), *between, (loads[-1][1], loads[-1][1] + margin)]
    curves = _Integrals(trace)
    width = min(end - start for start, end in [*loads, *rests])
    coarse = max(width / 8, (search[1] - search[0]) / 200_000)
    tried = [search[0] + i * coarse for i in range(int((search[1] - search[0]) / coarse) + 1)]
    scored = [(curves.fit(loads, rests, offset), offset) for offset in tried]
    fit, best = max(scored)
    if fit < MIN_FIT:
        raise MeasurementError(
            f"no load step is visible in the meter's recording (fit {fit:.2f} of 1); make the steps longer or the load heavier"
        )
    rival = max((s for s, offset in scored if abs(offset - best) > width), default=0.0)
    if rival > MAX_RIVAL_SHARE * fit:
        raise MeasurementError("the load steps fit the meter's recording at two places; make steps and rests of different lengths")
    step = coarse
    while step > 1e-3:
        step /= 2
        fit, best = max((curves.fit(loads, rests, offset), offset) for offset in (best - step, best, best + step))
    return best


def shifted(trace: Trace, offset_s: float) -> Trace:
    """Returns the trace with its times moved by an offset in seconds."""
    return Trace.of(trace.facts, (Sample(t + offset_s, v) for t, v in zip(trace.times, trace.values, strict=True)))


class _Integrals:
    """Integrals of power and of its square up to each reading; power is constant between readings."""

    def __init__(self, trace: Trace) -> None:
        self._times = trace.times
        self._first, self._second = [0.0], [0.0]
        counter = trace.facts.kind is Kind.COUNTER
        for i in range(1, len(trace.times)):
            seconds = trace.times[i] - trace.times[i - 1]
            joules = trace.values[i] - trace.values[i - 1] if counter else trace.values[i - 1] * seconds
            self._first.append(self._first[-1] + joules)
            self._second.append(self._second[-1] + (joules * joules / seconds if seconds > 0 else 0.0))

    def fit(self, loads: Sequence[Span], rests: Sequence[Span], offset: float) -> float:
        """Returns the share of variance that the two levels explain; 0 if the power under load is not higher."""
        if rests[0][0] - offset < self._times[0] or rests[-1][1] - offset > self._times[-1]:
            return 0.0
        load_s, rest_s = (sum(e - s for s, e in spans) for spans in (loads, rests))
        load, rest = (self._integral(self._first, spans, offset) for spans in (loads, rests))
        total_s, total = load_s + rest_s, load + rest
        variance = self._integral(self._second, [*loads, *rests], offset) - total * total / total_s
        contrast = load / load_s - rest / rest_s
        return contrast**2 * load_s * rest_s / total_s / variance if variance > 1e-12 and contrast > 0 else 0.0

    def _integral(self, curve: Sequence[float], spans: Sequence[Span], offset: float) -> float:
        return sum(self._at(curve, e - offset) - self._at(curve, s - offset) for s, e in spans)

    def _at(self, curve: Sequence[float], time: float) -> float:
        i = bisect_right(self._times, time)
        if i == 0 or i == len(self._times):
            return curve[min(i, len(self._times) - 1)]
        share = (time - self._times[i - 1]) / (self._times[i] - self._times[i - 1])
        return curve[i - 1] + share * (curve[i] - curve[i - 1])


def with_external_meter(log: RunLog, table: Trace) -> RunLog:
    """Returns the log with the external meter's readings, its clock aligned by the load steps, or else by the runs.

    Raises MeasurementError when the clocks cannot be aligned.
    """
    steps = log.loads or [(run.start_s, run.end_s) for run in log.runs]
    if not steps:
        raise MeasurementError("the log holds neither load steps nor runs to align the external meter's clock with")
    span = table.times[-1] - table.times[0]
    if span > MAX_RECORDING_S:
        raise MeasurementError(f"the external recording lasts {span:.0f} s; cut it to the run, at most {MAX_RECORDING_S:.0f} s")
    # The first step is somewhere inside the recording.
    search = (steps[0][0] - table.times[-1], steps[0][0] - table.times[0])
    trace = shifted(table, clock_offset(table, steps, search=search))
    changes = change_times(trace)
    gaps = sorted(b - a for a, b in pairwise(changes))
    refresh_s = gaps[len(gaps) // 2] if gaps else table.facts.refresh_s
    characteristics = Characteristics(
        refresh_s=max(refresh_s, 1e-6), longest_gap_s=max(gaps, default=refresh_s), lag_s=0.0, zero_rate=0.0, read_s=0.0
    )
    return replace(log, facts=trace.facts, trace=trace, characteristics=characteristics, faults=[])
