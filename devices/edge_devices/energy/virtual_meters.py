"""Meters that are requested by name and never found by the search: an estimate, a replayed recording, and an external meter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from edge_devices.energy.external.clock import offset_of
from edge_devices.energy.external.table import import_csv
from edge_devices.energy.run_log import is_energy_log, read_log
from edge_devices.errors import DeviceError, MeterError
from edge_devices.machine.detection import detect_device
from edge_devices.machine.power_supply import batteries
from edge_devices.machine.system import System
from edge_devices.meters.base import REPLAYED, Finding, Kind, Meter, MeterFacts, Sample, Scope, Trace
from edge_devices.meters.search import choose_meter

ESTIMATE, REPLAY, EXTERNAL = "estimate", "replay", "external"
VIRTUAL = "estimate or estimate:IDLE,CORE (watts: a model, no measurement), replay:RUN.jsonl (a recording)"
LONGEST_ROW_S = 120.0
_ADVICE = "write estimate:IDLE,CORE such as estimate:2.5,4"
UNKNOWN_ERROR = 1.0  # of watts that somebody typed: the figure may be nothing, or double


class PendingExternalMeter:
    """A meter in the supply line or at the wall whose table is read after the run. It returns no readings.

    `refresh_s`: seconds between its rows; `table`: where it writes them meanwhile, if that is known.
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
            lag_s=refresh_s,  # what the alignment of the clocks may be off by
            needs="a meter in the supply line that writes a table",
            systematic="see the meter's data sheet",
        )

    def read(self) -> None:
        """Returns None: the readings are in the meter's table."""

    def steps_sentence(self, loads: Sequence[tuple[float, float]]) -> str:
        """Returns whether the load steps, spans in seconds, are visible in the table so far, or what to look for without one."""
        if self.table is None:
            longest = max(end - start for start, end in loads)
            return (
                f"{len(loads)} load steps of up to {longest:.0f} s are over: if the meter's watts did not rise with each, stop here"
                f" (Ctrl-C); with rows every 10 s give --meter {EXTERNAL}:10"
            )
        try:
            offset_s = offset_of(import_csv(self.table), loads)
        except DeviceError as error:
            return f"the load steps are not visible in {self.table} so far: {error}"
        return f"the load steps are visible in {self.table}, whose clock is {-offset_s:+.1f} s from this one"


def external_meter(name: str | None) -> PendingExternalMeter | None:
    """Returns the meter of `external`, `external:SECONDS` between its rows, `external:TABLE` that it writes meanwhile, or
    `external:SECONDS:TABLE`; None for other names. Raises MeterError for seconds or a table that cannot be.
    """
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
        seconds = import_csv(table).facts.refresh_s
    if seconds is not None and not 0 < seconds <= LONGEST_ROW_S:
        raise MeterError(
            f"{name!r}: rows every {seconds:g} s cannot show a run; give the seconds between the meter's rows, such as external:10"
        )
    return PendingExternalMeter(1.0 if seconds is None else max(1.0, seconds), table)


def requested_meter(system: System, findings: Sequence[Finding], name: str | None) -> Meter | None:
    """Returns the found or virtual meter of this name, the best usable one without a name, or None. Raises MeterError."""
    virtual = None if any(finding.name == name for finding in findings) else virtual_meter(system, name)
    return virtual or choose_meter(findings, name)


def virtual_meter(system: System, name: str | None) -> Meter | None:
    """Returns the meter of `estimate:IDLE,CORE` or `replay:FILE`; None for other names. Raises MeterError for invalid values."""
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
    """Returns the readings in an energy log. Raises MeterError for a missing name and for another file, DeviceError for a broken log."""
    if not name:
        raise MeterError(f"{REPLAY}: names no recording; give a file, such as {REPLAY}:RUN.jsonl")
    path = Path(name)
    if path.is_file() and not is_energy_log(path):
        raise MeterError(f"{path} holds no readings of a meter; give the file that edge-bench run --energy wrote, not that of --runs")
    return read_log(path).trace


def _profile_estimate(system: System) -> EstimateMeter:
    """The model with the watts of this device's profile. Raises MeterError where it has none."""
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
        # The widest of both: in between lies any mixture of idle time and work.
        model_error=max((high - low) / (high + low) for low, high in (profile.idle_watts, profile.core_watts)),
        origin=f"profile {profile.name}",
    )


def _has_battery(system: System) -> bool:
    try:
        return bool(batteries(system))
    except PermissionError:
        return True  # it is there, and may not be read


class EstimateMeter:
    """Idle watts × time + watts per busy core × this process's processor seconds: joules of a model, not of the device."""

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
        """`busy_seconds`: processor seconds of this process without its children. Raises MeterError for watts outside 0 to 1000."""
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
    """Returns the recorded values at the same times after the start as in the recording."""

    def __init__(self, system: System, trace: Trace) -> None:
        if not trace.times:
            raise MeterError("the recorded trace has no samples; record it again")
        self._system, self._trace = system, trace
        self._begin = system.clock()
        self.facts = replace(trace.facts, name=f"{REPLAYED}{trace.facts.name}", notes=(*trace.facts.notes, "replayed from a recording"))

    def read(self) -> Sample:
        """Returns the recorded value; raises MeterError past the end of the recording."""
        now = self._system.clock()
        elapsed = now - self._begin
        if elapsed > self._trace.times[-1] - self._trace.times[0] + self._trace.facts.poll_s:
            raise MeterError(f"the recording ends after {self._trace.times[-1] - self._trace.times[0]:.3g} s; this run is longer")
        at = self._trace.index_at(self._trace.times[0] + elapsed)
        return Sample(now, self._trace.values[at], f"replayed {at}")
