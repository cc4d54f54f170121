"""What happened to a device while a job ran on it: found in the state samples that `job_monitor` wrote, and in how the job ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from edge_devices.errors import MeasurementError
from edge_devices.files.typed_json import from_json
from edge_devices.machine.memory import byte_text
from edge_devices.machine.state import DeviceState, disturbances
from edge_devices.transports.jobs import JobState, JobStatus

MAX_LINE_CHARS = 1 << 16
MAX_LINES = 1_000_000
EMPTY_PERCENT = 5  # a device that went off at this charge or less ran out of power
SUSPENDED = 4  # a gap of this many usual intervals: Android suspended the job


@dataclass(frozen=True, kw_only=True)
class StateSample:
    """One sample of the device's state. `t`: seconds since the start; `memory`: available bytes, None where unknown."""

    t: float
    state: DeviceState
    memory: int | None


@dataclass(frozen=True, kw_only=True)
class JobHistory:
    """The state samples of one job since it began. `ended`: the monitor recorded the command's exit."""

    samples: tuple[StateSample, ...]
    ended: bool

    @property
    def hottest_c(self) -> float | None:
        """The highest temperature, °C; None where the device reports none."""
        return max((s.state.temperature_c for s in self.samples if s.state.temperature_c is not None), default=None)

    @property
    def charge_used(self) -> int | None:
        """Percent of charge used; None with a charger connected or without a battery."""
        levels = [s.state.charge_percent for s in self.samples if s.state.charge_percent is not None]
        on_charger = any(s.state.charger for s in self.samples)
        return levels[0] - levels[-1] if levels and not on_charger else None


def read_job_history(path: Path) -> JobHistory:
    """Reads a monitor's file, complete or cut off; raises MeasurementError for anything else."""
    samples: list[StateSample] = []
    ended = False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number in range(1, MAX_LINES):
                line = file.readline(MAX_LINE_CHARS)
                if not line.endswith("\n"):
                    break  # the end of the file, or a line cut off by a power loss
                try:
                    record = json.loads(line)
                    kind, t = record["kind"], float(record["t"])
                    if kind == "begin":
                        samples = samples[-1:]  # samples taken while waiting for unplugging are no part of the run
                    elif kind == "look":
                        samples.append(_sample(t, record))
                    ended = ended or kind == "end"
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                    reason = f"{path}: line {number} is not a record of the job monitor ({error!r})"
                    raise MeasurementError(f"{reason}; collect the run again") from error
    except OSError as error:
        raise MeasurementError(f"{path} cannot be read: {error.strerror}") from error
    return JobHistory(samples=tuple(samples), ended=ended)


def _sample(t: float, record: dict[str, Any]) -> StateSample:
    memory = record["memory"]
    return StateSample(
        t=t, state=from_json(DeviceState, record["state"], "state", exact=True), memory=None if memory is None else int(memory)
    )


def find_incidents(history: JobHistory, status: JobStatus) -> list[str]:
    """Returns the incidents of a run, one sentence each; an empty list for an undisturbed run."""
    return [*_changes(history.samples), *_ending(history, status)]


def _changes(samples: tuple[StateSample, ...]) -> list[str]:
    """Changes between neighbouring samples; a repeated change is reported once, with its count."""
    gaps = sorted(b.t - a.t for a, b in pairwise(samples))
    usual = gaps[len(gaps) // 2] if gaps else 0.0
    times: dict[str, list[float]] = {}
    for before, after in pairwise(samples):
        for text in disturbances(before.state, after.state):
            times.setdefault(text, []).append(after.t)
        if len(gaps) > 2 and after.t - before.t > SUSPENDED * usual + 5:
            times.setdefault("the device suspended the run", []).append(before.t)
    return [f"after {at[0]:.0f} s: {text}" + (f" ({len(at)} times)" if len(at) > 1 else "") for text, at in times.items()]


def _ending(history: JobHistory, status: JobStatus) -> list[str]:
    last = history.samples[-1] if history.samples else None
    if status.state is JobState.RESTARTED:
        percent = last.state.charge_percent if last else None
        if last and percent is not None and percent <= EMPTY_PERCENT and last.state.charger is None:
            return [f"the battery ran empty: {percent} % in the last sample, after {last.t:.0f} s; the results until then are kept"]
        when = f" after {last.t:.0f} s or more" if last else ""
        return [f"the device restarted{when}; the results until then are kept"]
    if status.state is JobState.STOPPED:
        return ["it was stopped with --stop" + (f" after {last.t:.0f} s" if last else "")]
    if status.state is JobState.DIED:
        left = f"; {byte_text(last.memory)} of memory were available in the last sample" if last and last.memory is not None else ""
        return [f"the run was killed from outside, most likely by the kernel to reclaim memory{left}"]
    return []
