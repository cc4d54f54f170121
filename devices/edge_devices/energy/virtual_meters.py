"""Meters that are used only if requested by name: an estimate, a recording, and an external meter, whose clock is aligned here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from edge_devices.energy.recorder import SLEPT, Characteristics, change_times
from edge_devices.energy.run_log import RunLog, is_energy_log, read_log
from edge_devices.errors import DeviceError, MeasurementError, MeterError
from edge_devices.machine.detection import detect_device
from edge_devices.machine.state import batteries
from edge_devices.machine.system import System
from edge_devices.meters.base import REPLAYED, Finding, Kind, Meter, MeterFacts, Sample, Scope, Trace
from edge_devices.meters.search import choose_meter

MIN_FIT = 0.5  # the least share of the power's variance that the steps must explain
MAX_RIVAL_SHARE = 0.9  # another offset may have at most this share of the best fit
MAX_RECORDING_S = 6 * 3600.0
# A counter paused in a gap of more than these seconds and readings if it counted less than this share of the mean power there.
PAUSE_S, PAUSE_READINGS, PAUSE_SHARE = 5.0, 20, 0.1
Span = tuple[float, float]  # seconds
FloatArray = NDArray[np.float64]


def _trace_of(table: Path) -> Trace:
    """Returns the readings of a CSV file. The reader is imported only here, so that it does not slow down every start."""
    from edge_devices.energy.external.table import import_csv

    return import_csv(table)


def clock_offset(trace: Trace, loads: Sequence[Span], *, search: Span) -> float:
    """Returns the seconds to add to the trace's times so that its power is high during `loads` and low in the rests around them.

    The fit of an offset is the share of the variance over loads and rests that two levels explain (R² of a step function). `search` is the
    range of offsets. Raises MeasurementError if no step is visible, or if another offset fits almost as well, because steps and rests are
    equal.
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
    """Returns for each offset the share of variance that two levels explain; 0 if the power is not higher under load.

    It is computed from integrals of the power and of its square up to each reading. Power is taken as constant between readings.
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
    """Returns the trace with `offset_s` added to its times."""
    return Trace.of(trace.facts, (Sample(t + offset_s, v) for t, v in zip(trace.times, trace.values, strict=True)))


def with_external_meter(log: RunLog, table: Trace) -> RunLog:
    """Returns the log with the external meter's readings.

    The meter's clock is aligned by the load steps, or by the runs if there are none. Raises MeasurementError if that is not possible.
    """
    if slept := next((reason for _, reason in log.faults if reason.startswith(SLEPT)), None):
        raise MeasurementError(f"{slept} while the external meter's clock went on, so they cannot be aligned; measure again without sleep")
    steps = log.loads or [(run.start_s, run.end_s) for run in log.runs]
    if not steps:
        raise MeasurementError("the log holds neither load steps nor runs to align the external meter's clock with")
    gaps = sorted(b - a for a, b in pairwise(change_times(table)))
    refresh_s = max(gaps[len(gaps) // 2] if gaps else table.facts.refresh_s, 1e-6)
    # The alignment is exact to about one row. Readings are shifted to be one row late, so that no window includes the time after it. The
    # lead-in of a window covers the lateness.
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
    """Returns the seconds to add to the table's times. The steps may be anywhere in the table. Raises MeasurementError."""
    span = table.times[-1] - table.times[0]
    if span > MAX_RECORDING_S:
        raise MeasurementError(f"the external recording lasts {span:.0f} s; cut it to the run, at most {MAX_RECORDING_S:.0f} s")
    return clock_offset(table, steps, search=(steps[0][0] - table.times[-1], steps[0][0] - table.times[0]))


def _pauses(trace: Trace) -> list[tuple[float, str]]:
    """Returns the times at which a counter's recording stopped and continued.

    Between these times nothing was counted, so no window may include them. Such a gap appears if a logging program adds up the joules
    itself, is restarted, and appends to its table. A meter's own register counts on and leaves no such gap.
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


ESTIMATE, REPLAY, EXTERNAL = "estimate", "replay", "external"
VIRTUAL = "estimate or estimate:IDLE,CORE (watts: a model, no measurement), replay:RUN.jsonl (a recording)"
LONGEST_ROW_S = 120.0
_ADVICE = "write estimate:IDLE,CORE such as estimate:2.5,4"
UNKNOWN_ERROR = 1.0  # relative error of watts that a user typed: the true figure may be 0 or double


class PendingExternalMeter:
    """A meter in the supply line or at the wall, whose table is read after the run. It returns no readings.

    `refresh_s` is the seconds between its rows. `table` is the file to which it writes them during the run, if that is known.
    """

    def __init__(self, refresh_s: float = 1.0, table: Path | None = None) -> None:
        self.table = table
        self.facts = MeterFacts(
            name=EXTERNAL,
            kind=Kind.SAMPLER,
            scope=Scope.EXTERNAL,
            source="a table to come",
            refresh_s=refresh_s,
            resolution=0.001,
            poll_s=max(1.0, refresh_s),
            lag_s=refresh_s,  # the possible error of the clocks' alignment
            needs="a meter in the supply line that writes a table",
            systematic="see the meter's data sheet",
        )

    def read(self) -> None:
        """Returns None, because the readings are in the meter's table."""

    def steps_sentence(self, loads: Sequence[tuple[float, float]]) -> str:
        """Returns a sentence that says whether the load steps are visible in the table so far, or without a table, what to check."""
        if self.table is None:
            longest = max(end - start for start, end in loads)
            return (
                f"{len(loads)} load steps of up to {longest:.0f} s are over: if the meter's watts did not rise with each, stop here"
                f" (Ctrl-C); with rows every 10 s give --meter {EXTERNAL}:10"
            )
        try:
            offset_s = offset_of(_trace_of(self.table), loads)
        except DeviceError as error:
            return f"the load steps are not visible in {self.table} so far: {error}"
        return f"the load steps are visible in {self.table}, whose clock is {-offset_s:+.1f} s from this one"


def external_meter(name: str | None) -> PendingExternalMeter | None:
    """Returns the meter for `external`, `external:SECONDS`, `external:TABLE` or `external:SECONDS:TABLE`; None for other names.

    SECONDS are the time between its rows, and TABLE is the file that it writes during the run. Raises MeterError for impossible seconds or
    an unusable table."""
    kind, *parts = (name or "").split(":", 2)
    if kind != EXTERNAL:
        return None
    seconds, table = None, None
    for part in parts:
        try:
            seconds = float(part)
        except ValueError:
            table = Path(part)
    if table is not None and seconds is None:
        seconds = _trace_of(table).facts.refresh_s
    if seconds is not None and not 0 < seconds <= LONGEST_ROW_S:
        raise MeterError(
            f"{name!r}: rows every {seconds:g} s cannot show a run; give the seconds between the meter's rows, such as external:10"
        )
    return PendingExternalMeter(1.0 if seconds is None else max(1.0, seconds), table)


def requested_meter(system: System, findings: Sequence[Finding], name: str | None) -> Meter | None:
    """Returns the found or virtual meter with this name; without a name, the best usable one, or None. Raises MeterError."""
    virtual = None if any(finding.name == name for finding in findings) else virtual_meter(system, name)
    return virtual or choose_meter(findings, name)


def virtual_meter(system: System, name: str | None) -> Meter | None:
    """Returns the meter for `estimate`, `estimate:IDLE,CORE` or `replay:FILE`; None for other names. Raises MeterError for bad values."""
    kind, _, value = (name or "").partition(":")
    if kind == ESTIMATE and not value:
        return _profile_estimate(system)
    if kind == ESTIMATE:
        try:
            idle_watts, core_watts = map(float, value.split(","))
        except ValueError:
            raise MeterError(f"{name!r} is not a power model; write estimate:IDLE,CORE with watts, such as estimate:2.5,4") from None
        return EstimateMeter(system, idle_watts=idle_watts, core_watts=core_watts)
    if kind == REPLAY:
        return ReplayMeter(system, _recorded(value))
    return None


def _recorded(name: str) -> Trace:
    """Returns the readings in an energy log. Raises MeterError for a missing name or another file, DeviceError for a broken log."""
    if not name:
        raise MeterError(f"{REPLAY}: names no recording; give a file, such as {REPLAY}:RUN.jsonl")
    path = Path(name)
    if path.is_file() and not is_energy_log(path):
        raise MeterError(f"{path} holds no readings of a meter; give the file that edge-bench run --energy wrote, not that of --runs")
    return read_log(path).trace


def _profile_estimate(system: System) -> EstimateMeter:
    """Returns the power model with the watts of this device's profile. Raises MeterError if the profile has none."""
    device = detect_device(system)
    profile = device.profile
    if profile.idle_watts is None or profile.core_watts is None:
        raise MeterError(f"the profile {profile.name} has no watts for a power model; {_ADVICE}")
    if profile.watts_of == "laptop" and not _has_battery(system):
        raise MeterError(f"the watts of the profile {profile.name} are those of laptops, and this machine has no battery; {_ADVICE}")
    shares = device.machine.usable_processors if profile.watts_of == "processor" else 1
    return EstimateMeter(
        system,
        idle_watts=shares * fmean(profile.idle_watts),
        core_watts=fmean(profile.core_watts),
        # The larger of both relative errors, which is enough for any mixture of idle time and work.
        model_error=max((high - low) / (high + low) for low, high in (profile.idle_watts, profile.core_watts)),
        origin=f"profile {profile.name}",
    )


def _has_battery(system: System) -> bool:
    try:
        return bool(batteries(system))
    except PermissionError:
        return True  # there is a battery, but it may not be read


class EstimateMeter:
    """A power model: idle watts × time + watts per busy core × this process's processor seconds. Nothing is measured."""

    def __init__(
        self,
        system: System,
        *,
        idle_watts: float,
        core_watts: float,
        busy_seconds: Callable[[], float] = time.process_time,
        model_error: float = UNKNOWN_ERROR,
        origin: str = "given",
    ) -> None:
        """`busy_seconds` returns this process's processor seconds, without its children. Raises MeterError for watts outside 0 to 1000."""
        for name, watts in (("idle", idle_watts), ("core", core_watts)):
            if not (math.isfinite(watts) and 0 <= watts <= 1000):
                raise MeterError(f"{name} watts of a power model must be 0 to 1000, not {watts}")
        self._system, self._busy_seconds = system, busy_seconds
        self._idle_watts, self._core_watts = idle_watts, core_watts
        self._begin = system.clock(), busy_seconds()
        self.facts = MeterFacts(
            name="estimate",
            kind=Kind.COUNTER,
            scope=Scope.ESTIMATE,
            source=f"model: {idle_watts:g} W idle + {core_watts:g} W per busy core ({origin})",
            refresh_s=0.001,
            resolution=0.001,
            poll_s=1.0,
            systematic="unbounded: this is a model, not a measurement",
            notes=("ESTIMATE: nothing was measured",),
            model_error=model_error,
        )

    def read(self) -> Sample:
        now, busy = self._system.clock(), self._busy_seconds()
        joules = self._idle_watts * (now - self._begin[0]) + self._core_watts * (busy - self._begin[1])
        return Sample(now, joules, f"busy={busy:.6f}")


class ReplayMeter:
    """Replays a recording: returns its values at the same times after the start."""

    def __init__(self, system: System, trace: Trace) -> None:
        if not trace.times:
            raise MeterError("the recorded trace has no samples; record it again")
        self._system, self._trace = system, trace
        self._begin = system.clock()
        self.facts = replace(trace.facts, name=f"{REPLAYED}{trace.facts.name}", notes=(*trace.facts.notes, "replayed from a recording"))

    def read(self) -> Sample:
        """Returns the recorded value. Raises MeterError after the end of the recording."""
        now = self._system.clock()
        elapsed = now - self._begin
        if elapsed > self._trace.times[-1] - self._trace.times[0] + self._trace.facts.poll_s:
            raise MeterError(f"the recording ends after {self._trace.times[-1] - self._trace.times[0]:.3g} s; this run is longer")
        at = self._trace.index_at(self._trace.times[0] + elapsed)
        return Sample(now, self._trace.values[at], f"replayed {at}")
