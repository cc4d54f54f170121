"""The offset of an external meter's clock, found from load steps, and a run log with its readings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edge_devices.energy.characteristics import Characteristics, change_times
from edge_devices.energy.recorder import SLEPT
from edge_devices.energy.run_log import RunLog
from edge_devices.errors import MeasurementError
from edge_devices.meters.base import Kind, Sample, Trace

MIN_FIT = 0.5  # share of the power's variance that the steps must explain
MAX_RIVAL_SHARE = 0.9  # of the best fit
MAX_RECORDING_S = 6 * 3600.0
PAUSE_S, PAUSE_READINGS, PAUSE_SHARE = 5.0, 20, 0.1  # of a counter: a gap that long, in which it counts this share of the mean power
Span = tuple[float, float]  # seconds
FloatArray = NDArray[np.float64]


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
    width = min(end - start for start, end in [*loads, *rests])
    coarse = max(width / 8, (search[1] - search[0]) / 200_000)
    tried = np.arange(search[0], search[1] + coarse / 2, coarse)
    scores = _fits(trace, loads, rests, tried)
    fit, best = float(scores.max()), float(tried[scores.argmax()])
    if fit < MIN_FIT:
        raise MeasurementError(
            f"no load step is visible in the meter's recording (fit {fit:.2f} of 1): the shortest lasts {width:.0f} s and a row"
            f" {trace.facts.refresh_s:.3g} s; name the seconds between the rows, as in --meter external:10, and measure again"
        )
    if scores[np.abs(tried - best) > width].max(initial=0.0) > MAX_RIVAL_SHARE * fit:
        raise MeasurementError("the load steps fit the meter's recording at two places; make steps and rests of different lengths")
    step = coarse
    while step > 1e-3:
        step /= 2
        near = np.array([best - step, best, best + step])
        best = float(near[_fits(trace, loads, rests, near).argmax()])
    return best


def _fits(trace: Trace, loads: Sequence[Span], rests: Sequence[Span], offsets: FloatArray) -> FloatArray:
    """Returns the share of variance that the two levels explain, for each offset; 0 where the power under load is not higher.

    From integrals of power and of its square up to each reading; power is constant between readings.
    """
    times, values = np.array(trace.times), np.array(trace.values)
    seconds = np.diff(times)
    joules = np.diff(values) if trace.facts.kind is Kind.COUNTER else values[:-1] * seconds
    squares = np.divide(joules**2, seconds, out=np.zeros_like(joules), where=seconds > 0)
    first, second = (np.concatenate([[0.0], np.cumsum(parts)]) for parts in (joules, squares))

    def integral(curve: FloatArray, spans: Sequence[Span]) -> FloatArray:
        total = np.zeros_like(offsets)
        for start, end in spans:
            total += np.interp(end - offsets, times, curve) - np.interp(start - offsets, times, curve)
        return total

    load_s, rest_s = (sum(e - s for s, e in spans) for spans in (loads, rests))
    load, rest = integral(first, loads), integral(first, rests)
    total_s = load_s + rest_s
    variance = integral(second, [*loads, *rests]) - (load + rest) ** 2 / total_s
    contrast = load / load_s - rest / rest_s
    inside = (rests[0][0] - offsets >= times[0]) & (rests[-1][1] - offsets <= times[-1])
    known = inside & (variance > 1e-12) & (contrast > 0)
    fits: FloatArray = np.divide(contrast**2 * load_s * rest_s / total_s, variance, out=np.zeros_like(variance), where=known)
    return fits


def shifted(trace: Trace, offset_s: float) -> Trace:
    """Returns the trace with its times moved by an offset in seconds."""
    return Trace.of(trace.facts, (Sample(t + offset_s, v) for t, v in zip(trace.times, trace.values, strict=True)))


def with_external_meter(log: RunLog, table: Trace) -> RunLog:
    """Returns the log with the external meter's readings, its clock aligned by the load steps, or else by the runs.

    Raises MeasurementError when the clocks cannot be aligned.
    """
    if slept := next((reason for _, reason in log.faults if reason.startswith(SLEPT)), None):
        raise MeasurementError(f"{slept} while the external meter's clock went on, so they cannot be aligned; measure again without sleep")
    steps = log.loads or [(run.start_s, run.end_s) for run in log.runs]
    if not steps:
        raise MeasurementError("the log holds neither load steps nor runs to align the external meter's clock with")
    gaps = sorted(b - a for a, b in pairwise(change_times(table)))
    refresh_s = max(gaps[len(gaps) // 2] if gaps else table.facts.refresh_s, 1e-6)
    # The steps fit within a row or so. A row late, no window holds the time after it, and its lead-in takes what is late.
    trace = shifted(table, offset_of(table, steps) + refresh_s)
    characteristics = Characteristics(
        refresh_s=refresh_s, longest_gap_s=max(gaps, default=refresh_s), lag_s=refresh_s, zero_rate=0.0, read_s=0.0
    )
    return replace(
        log,
        facts=trace.facts,
        trace=trace,
        characteristics=characteristics,
        faults=_pauses(trace),
        warnings=[*log.warnings, f"the joules are from {trace.facts.source}", *trace.facts.notes],
    )


def offset_of(table: Trace, steps: Sequence[Span]) -> float:
    """Returns the seconds to add to the table's times, wherever in it the steps are. Raises MeasurementError."""
    span = table.times[-1] - table.times[0]
    if span > MAX_RECORDING_S:
        raise MeasurementError(f"the external recording lasts {span:.0f} s; cut it to the run, at most {MAX_RECORDING_S:.0f} s")
    return clock_offset(table, steps, search=(steps[0][0] - table.times[-1], steps[0][0] - table.times[0]))


def _pauses(trace: Trace) -> list[tuple[float, str]]:
    """Returns the times at which a counter's recording stopped and went on: it counted nothing between, so no window may span them.

    A logger that is started again and appends to its table, and whose program adds up the joules, leaves such a gap. A register counts on.
    """
    if trace.facts.kind is not Kind.COUNTER:
        return []
    steps = [(b - a, w - v, a, b) for (a, b), (v, w) in zip(pairwise(trace.times), pairwise(trace.values), strict=True)]
    shortest = max(PAUSE_S, PAUSE_READINGS * trace.facts.refresh_s)
    counted = [(seconds, joules) for seconds, joules, _, _ in steps if seconds <= shortest]
    watts = sum(joules for _, joules in counted) / max(1e-9, sum(seconds for seconds, _ in counted))
    return [
        (time_s, f"its recording pauses for {seconds:.0f} s")
        for seconds, joules, *edges in steps
        if seconds > shortest and joules < PAUSE_SHARE * watts * seconds
        for time_s in edges
    ]
