"""The energy of a window of time, and of the phases within it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, stdev

from edge_devices.energy.recorder import Characteristics
from edge_devices.errors import MeasurementError
from edge_devices.meters.base import Kind, Trace

# A window's energy is the difference of a counter, or the integral of a sampler. Near a window's edges, readings still show the time
# outside. If the same work ran for the lead-in before the window, readings are late by the same time at both edges, so all of them are
# used. Otherwise the lead-in is left out, and the mean power of the rest is multiplied by the whole length, because every window begins
# with a prefill.

MIN_UPDATES = 8
LONGEST_GAP = 3  # a value is valid for at most this many refreshes, or readings if these are less frequent
FAST = 1000  # a counter with this many updates per window needs no lead-in and no update times


@dataclass(frozen=True, kw_only=True)
class WindowEnergy:
    """The energy of one window.

    `error_watts` is the standard error of the power, with `freedom` degrees of freedom. `resolution_watts` is the meter's resolution.
    `updates` counts new values, and `longest_gap_s` is the longest time without one. The figure is based on `observed_s` seconds.
    `missing_s` are seconds in gaps without readings, for which the mean of the others is used."""

    start_s: float
    end_s: float
    watts: float
    error_watts: float
    freedom: float
    resolution_watts: float
    updates: int
    longest_gap_s: float
    observed_s: float
    missing_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def joules(self) -> float:
        """Mean power × length of the window."""
        return self.watts * self.seconds


def measure_window(trace: Trace, start_s: float, end_s: float, meter: Characteristics, lead_s: float = 0.0) -> WindowEnergy:
    """Returns the energy of [start_s, end_s]. The same work ran for `lead_s` before it.

    Raises MeasurementError if the trace does not cover it.
    """
    if not start_s < end_s:
        raise MeasurementError(f"the window from {start_s} to {end_s} s has no length")
    if trace.facts.kind is Kind.COUNTER:
        return _difference(trace, start_s, end_s, meter, lead_s)
    return _integral(trace, start_s, end_s, meter, lead_s)


def _difference(trace: Trace, start_s: float, end_s: float, meter: Characteristics, lead_s: float) -> WindowEnergy:
    """Computes a counter's mean power: ΔE / Δt between the first and the last new value in the window.

    After a lead-in, the readings at the edges are used, because both are late by the same time. The error of an edge is uniform over its
    possible delay t (variance t²/12). The part of the window that is not covered is assumed to be like the rest, within its scatter.
    """
    led = lead_s >= meter.refresh_s > 0
    fast = led or meter.refresh_s * FAST <= end_s - start_s
    inside = trace.span(start_s if fast else start_s + meter.refresh_s, end_s)
    fresh = [i for i in inside if (fast and i == 0) or (i > 0 and trace.values[i] != trace.values[i - 1])]
    if len(fresh) < 2:
        raise MeasurementError(
            f"{trace.facts.name} showed {len(fresh)} new values in {end_s - start_s:.3g} s: the window is too short for this meter"
        )
    first, last = (inside[0], inside[-1]) if led else (fresh[0], fresh[-1])
    seconds = trace.times[last] - trace.times[first]
    watts = (trace.values[last] - trace.values[first]) / seconds
    late = [meter.refresh_s if fast or i == 0 else min(meter.refresh_s, trace.times[i] - trace.times[i - 1]) for i in (first, last)]
    edge = abs(watts) * math.hypot(*late) / math.sqrt(12)
    resolution = math.hypot(edge, trace.facts.resolution / math.sqrt(6)) / seconds
    powers = [
        (trace.values[b] - trace.values[a]) / (trace.times[b] - trace.times[a])
        for a, b in pairwise(fresh)
        if trace.times[b] > trace.times[a]
    ]
    uncovered = (stdev(powers) if len(powers) > 1 else 0.0) * (1 - seconds / (end_s - start_s))
    return WindowEnergy(
        start_s=start_s,
        end_s=end_s,
        watts=watts,
        error_watts=math.hypot(resolution, uncovered),
        freedom=math.inf,
        resolution_watts=resolution,
        updates=len(fresh),
        longest_gap_s=_longest_gap([trace.times[i] for i in fresh], start_s, end_s),
        observed_s=seconds,
    )


def _integral(trace: Trace, start_s: float, end_s: float, meter: Characteristics, lead_s: float) -> WindowEnergy:
    """Computes a sampler's mean power: the mean of the values, each of which is held until the next reading.

    The error follows from the number of independent new values (AR(1): N(1-r)/(1+r)). Before a long gap, a value is held only for one
    refresh, and the rest of the gap is assumed to be like what was read, within its scatter.
    """
    begin = start_s + max(0.0, meter.lead_in_s - lead_s)
    if begin >= end_s:
        raise MeasurementError(f"the window of {end_s - start_s:.3g} s ends within the meter's lead-in of {meter.lead_in_s:.3g} s")
    inside = trace.span(begin, end_s)
    if not inside or trace.times[inside[0]] >= end_s:
        raise MeasurementError(f"the recording holds no reading between {begin:.3f} and {end_s:.3f} s; let the meter run during the work")
    # Gaps as long as in the characterisation are normal for the meter.
    hold_s = max(LONGEST_GAP * meter.refresh_s, LONGEST_GAP * trace.facts.poll_s, 1.5 * meter.longest_gap_s)
    if lead_s >= meter.lead_in_s and inside[0] > 0:
        inside = range(inside[0] - 1, inside.stop)
    missing_s = max(0.0, trace.times[inside[0]] - begin - hold_s)
    begin = max(begin, trace.times[inside[0]])  # an earlier reading may still show the time before the window
    times = [begin, *(trace.times[i] for i in inside[1:]), end_s]
    held = [b - a if b - a <= hold_s else min(meter.refresh_s, b - a) for a, b in pairwise(times)]
    missing_s += end_s - begin - sum(held)
    watts = sum(trace.values[i] * seconds for i, seconds in zip(inside, held, strict=True)) / sum(held)
    fresh = fresh_values(trace, begin, end_s)
    error, freedom = sampling_error(fresh)
    if missing_s > 0 and len(fresh) > 1:
        error = math.hypot(error, stdev(fresh) * missing_s / (end_s - start_s))
    return WindowEnergy(
        start_s=start_s,
        end_s=end_s,
        watts=watts,
        error_watts=error,
        freedom=freedom,
        resolution_watts=trace.facts.resolution / math.sqrt(12),
        updates=len(fresh),
        longest_gap_s=_longest_gap([trace.times[i] for i in inside], begin, end_s),
        observed_s=end_s - begin,
        missing_s=missing_s,
    )


def change_within(trace: Trace, windows: Sequence[WindowEnergy], meter: Characteristics) -> float:
    """Returns by how many watts the power changes from the first to the second half of a window, on average.

    It is 0 if the halves are too short. A single phase makes a device warmer or cooler than requests do, more so in longer windows, and
    leakage and clocks change with the temperature.
    """
    changes = []
    for window in windows:
        middle_s = (window.start_s + window.end_s) / 2
        with contextlib.suppress(MeasurementError):
            first = measure_window(trace, window.start_s, middle_s, meter)
            changes.append(measure_window(trace, middle_s, window.end_s, meter, middle_s - window.start_s).watts - first.watts)
    return abs(fmean(changes)) if changes else 0.0


def rise_within(trace: Trace, window: WindowEnergy, meter: Characteristics) -> float:
    """Returns by how many watts the second half of a window's observed part is above the first; 0 if the halves are too short."""
    begin_s = window.end_s - window.observed_s
    middle_s = (begin_s + window.end_s) / 2
    with contextlib.suppress(MeasurementError):
        first = measure_window(trace, begin_s, middle_s, meter, math.inf)
        return measure_window(trace, middle_s, window.end_s, meter, math.inf).watts - first.watts
    return 0.0


def fresh_values(trace: Trace, start_s: float, end_s: float) -> list[float]:
    """Returns the readings of a span that differ from the reading before."""
    return [trace.values[i] for i in trace.span(start_s, end_s) if i > 0 and trace.values[i] != trace.values[i - 1]]


def sampling_error(values: list[float]) -> tuple[float, float]:
    """Returns the standard error of the mean of correlated values, and its degrees of freedom; infinite for fewer than 3 values."""
    if len(values) < 3:
        return math.inf, 1.0
    mean = fmean(values)
    deviations = [v - mean for v in values]
    squares = sum(d * d for d in deviations)
    if not squares:
        return 0.0, len(values) - 1.0
    correlation = sum(a * b for a, b in pairwise(deviations)) / squares
    correlation = min(max(correlation, 0.0), 0.95)
    independent = max(2.0, len(values) * (1 - correlation) / (1 + correlation))
    return math.sqrt(squares / (len(values) - 1) / independent), independent - 1


def _longest_gap(times: list[float], start_s: float, end_s: float) -> float:
    edges = [start_s, *times, end_s]
    return max(b - a for a, b in pairwise(edges))


# Prefill, draft and verify are too short for any meter. There are two methods. Calibrated: a loop of each single phase gives its power, and
# power × seconds of the phases gives their *shares* of the joules that were measured in the window. The sum is always the window's joules,
# so an error of the calibration can only move joules from one phase to another. Time-proportional: if powers are unknown, all phases are
# assumed to have the mean power.

ENCODE, PREFILL, OTHER = "encode", "prefill", "other"  # encode: images and sound; other: time in no phase, between requests
NO_DECODING = frozenset((ENCODE, PREFILL, OTHER))
CLOSURE = 0.05
MIN_OTHER = 0.001  # share of the window; less time in no phase is an inaccuracy of the clock


@dataclass(frozen=True, kw_only=True)
class PhaseWatts:
    """The power of one phase, with its standard error and the error's degrees of freedom."""

    watts: float
    error: float = 0.0
    freedom: float = math.inf


@dataclass(frozen=True, kw_only=True)
class PhaseShares:
    """Joules per phase. Their sum is the window's joules.

    `method` is measured (a single phase), calibrated or time_proportional. `closure` is (calibrated power × seconds - measured) / measured;
    None if it was not tested. `closes` says whether that is within the tolerance. `errors` holds the relative standard error of each
    phase's power, with degrees of freedom.
    """

    joules: Mapping[str, float]
    method: str
    closure: float | None = None
    closes: bool = True
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def sensitivity(self, phases: Collection[str]) -> dict[str, float]:
        """Returns d ln(joules of `phases`) / d ln(power of a phase) for every phase. All are 0 if `phases` are all phases or none."""
        total, inside = sum(self.joules.values()), sum(j for phase, j in self.joules.items() if phase in phases)
        if total <= 0 or inside <= 0:
            return dict.fromkeys(self.joules, 0.0)
        return {phase: joules * ((phase in phases) / inside - 1 / total) for phase, joules in self.joules.items()}


def share_out(
    joules: float,
    seconds: Mapping[str, float],
    powers: Mapping[str, PhaseWatts],
    *,
    error_joules: float = 0.0,
    window_s: float | None = None,
    idle_watts: float = 0.0,
) -> PhaseShares:
    """Divides a window's joules among its phases.

    `powers` are those of calibrated phases. Time in no phase is assumed to have a power between idle power and the mean. A phase of unknown
    power may have any power from idle to the same distance above the mean. Both uncertainties are errors of the shares. Calibrated powers
    close if power × seconds is within 5 % or two standard errors of what was measured.
    """
    total = sum(seconds.values())
    if total <= 0:
        return PhaseShares(joules=dict(seconds), method="measured")
    window_s = window_s or total
    rest_s = window_s - total if window_s - total > MIN_OTHER * window_s else 0.0
    mean = joules / window_s
    idle = min(max(idle_watts, 0.0), mean)
    known = seconds.keys() <= powers.keys() or len(seconds) == 1
    unknown = PhaseWatts(watts=mean, error=0.0 if known else (mean - idle) / math.sqrt(3))
    used = {phase: powers.get(phase, unknown) if known else unknown for phase in seconds}
    if rest_s:
        seconds = {**seconds, OTHER: rest_s}
        used[OTHER] = PhaseWatts(watts=(mean + idle) / 2, error=(mean - idle) / math.sqrt(12))
    computed = {phase: used[phase].watts * s for phase, s in seconds.items()}
    expected = sum(computed.values())
    shares = {phase: joules * j / expected if expected else 0.0 for phase, j in computed.items()}
    errors = {phase: (power.error / power.watts if power.watts else 0.0, power.freedom) for phase, power in used.items()}
    if len(shares) == 1 or not known:
        return PhaseShares(joules=shares, method="time_proportional" if len(shares) > 1 else "measured", errors=errors)
    if not seconds.keys() - {OTHER} <= powers.keys():
        return PhaseShares(joules=shares, method="measured", errors=errors)
    difference = expected - joules
    error = math.hypot(error_joules, *(used[phase].error * s for phase, s in seconds.items()))
    closes = abs(difference) <= max(CLOSURE * abs(joules), 2 * error)
    return PhaseShares(
        joules=shares, method="calibrated", closure=difference / joules if joules else math.inf, closes=closes, errors=errors
    )
