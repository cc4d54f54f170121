"""The difference between an external meter's clock and the device's, from load steps."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from edge_devices.errors import MeasurementError
from edge_devices.meters.base import Kind, Sample
from edge_devices.trace import Trace

Span = tuple[float, float]
LEAST_CONTRAST = 3.0  # watts between load and rest, in standard errors
RIVAL_SHARE = 0.9


def clock_offset(trace: Trace, loads: Sequence[Span], *, search: Span) -> float:
    """Returns the seconds to add to the trace's times so that its power is highest in the spans of load against the rests between them.

    The score of an offset is mean watts under load minus mean watts at rest: a matched filter for steps. `search` bounds the offset.
    Raises MeasurementError when no step shows, or when another offset fits almost as well (steps of equal length and distance).
    """
    if len(loads) < 2:
        raise MeasurementError(f"{len(loads)} load steps cannot align two clocks; give at least 2, of different lengths.")
    rests = [(a[1], b[0]) for a, b in pairwise(loads)]
    curve = _cumulative(trace)
    width = min(end - start for start, end in [*loads, *rests])
    coarse = max(width / 8, (search[1] - search[0]) / 200_000)
    tried = [search[0] + i * coarse for i in range(int((search[1] - search[0]) / coarse) + 1)]
    scored = [(_contrast(trace.times, curve, loads, rests, offset), offset) for offset in tried]
    contrast, best = max(scored)
    rival = max((s for s, offset in scored if abs(offset - best) > width), default=-math.inf)
    if contrast <= 0 or contrast < LEAST_CONTRAST * _noise(trace):
        raise MeasurementError(
            f"no load step shows in the meter's recording (contrast {contrast:.3g} W); make the steps longer or the load heavier."
        )
    if rival > RIVAL_SHARE * contrast:
        raise MeasurementError("the load steps fit the meter's recording at two places; make steps and rests of different lengths.")
    step = coarse
    while step > 1e-3:
        step /= 2
        contrast, best = max((_contrast(trace.times, curve, loads, rests, o), o) for o in (best - step, best, best + step))
    return best


def shifted(trace: Trace, offset_s: float) -> Trace:
    """Returns the trace on the other clock."""
    return Trace.of(trace.facts, (Sample(t + offset_s, v) for t, v in zip(trace.times, trace.values, strict=True)))


def _cumulative(trace: Trace) -> list[float]:
    """Joules at each reading; a sampler's watts hold until the next reading."""
    if trace.facts.kind is Kind.COUNTER:
        return trace.values
    total, curve = 0.0, [0.0]
    for i in range(1, len(trace.times)):
        total += trace.values[i - 1] * (trace.times[i] - trace.times[i - 1])
        curve.append(total)
    return curve


def _joules_at(times: Sequence[float], curve: Sequence[float], time: float) -> float:
    i = bisect_right(times, time)
    if i == 0 or i == len(times):
        return curve[min(i, len(times) - 1)]
    share = (time - times[i - 1]) / (times[i] - times[i - 1])
    return curve[i - 1] + share * (curve[i] - curve[i - 1])


def _contrast(times: Sequence[float], curve: Sequence[float], loads: Sequence[Span], rests: Sequence[Span], offset: float) -> float:
    def mean_watts(spans: Sequence[Span]) -> float:
        joules = sum(_joules_at(times, curve, e - offset) - _joules_at(times, curve, s - offset) for s, e in spans)
        return joules / sum(e - s for s, e in spans)

    return mean_watts(loads) - mean_watts(rests)


def _noise(trace: Trace) -> float:
    """Standard error of a mean over the whole trace, from differences of neighbours, in watts; 0 for a counter."""
    if trace.facts.kind is Kind.COUNTER or len(trace.values) < 3:
        return 0.0
    squares = sum((b - a) ** 2 for a, b in pairwise(trace.values))
    return math.sqrt(squares / 2 / (len(trace.values) - 1) / len(trace.values))
