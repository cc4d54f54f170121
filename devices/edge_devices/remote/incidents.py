"""What happened to a device while a job ran on it: found in the state samples that `job_monitor` wrote, and in how the job ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from edge_devices.children import signal_name
from edge_devices.errors import MeasurementError, byte_text, one_line
from edge_devices.files.typed_json import from_json
from edge_devices.machine.state import DeviceState, changes, throttling
from edge_devices.remote.jobs import JobState, JobStatus

MAX_LINE_CHARS = 1 << 16
MAX_LINES = 1_000_000
EMPTY_PERCENT = 5  # a device that went off at this charge or less ran out of power
SUSPENDED = 4  # a gap of this many usual intervals: Android suspended the job
BY_SIGNAL = 128  # exit codes from here on: the command was ended by the signal of the number that remains
HANGUP, KILL, TERMINATE = 1, 9, 15
SCARCE_BYTES = 1 << 30  # with more memory than this in the last sample, hardly the kernel ended a run
KEPT = "the results until then are kept"


@dataclass(frozen=True, kw_only=True)
class StateSample:
    """One sample of the device's state. `t`: seconds since the start; `memory`: available bytes, `free`: those of the disk, None where
    unknown.
    """

    t: float
    state: DeviceState
    memory: int | None
    free: int | None = None


@dataclass(frozen=True, kw_only=True)
class JobHistory:
    """The state samples of one job since it began. `ended`: the monitor recorded the command's exit; `notes`: sentences of the monitor."""

    samples: tuple[StateSample, ...]
    ended: bool
    notes: tuple[str, ...] = ()

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
    samples, notes, ended = list[StateSample](), list[str](), False
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
                    elif kind == "note":
                        notes.append(one_line(str(record["text"])))
                    ended = ended or kind == "end"
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                    reason = f"{path}: line {number} is not a record of the job monitor ({error!r})"
                    raise MeasurementError(f"{reason}; collect the run again") from error
    except OSError as error:
        raise MeasurementError(f"{path} cannot be read: {error.strerror}") from error
    return JobHistory(samples=tuple(samples), ended=ended, notes=tuple(notes))


def _sample(t: float, record: dict[str, Any]) -> StateSample:
    memory, free = (None if value is None else int(value) for value in (record["memory"], record.get("free")))
    return StateSample(t=t, state=from_json(DeviceState, record["state"], "state", exact=True), memory=memory, free=free)


def find_incidents(history: JobHistory, status: JobStatus) -> list[str]:
    """Returns the incidents of a run, one sentence each; an empty list for an undisturbed run."""
    return [*history.notes, *_changes(history.samples), *_ending(history, status)]


def _changes(samples: tuple[StateSample, ...]) -> list[str]:
    """Changes between neighbouring samples; a repeated change is reported once, with its count."""
    gaps = sorted(b.t - a.t for a, b in pairwise(samples))
    usual = gaps[len(gaps) // 2] if gaps else 0.0
    times: dict[str, list[float]] = {}
    for text in throttling(samples[0].state) if samples else ():
        times.setdefault(text, []).append(samples[0].t)
    for before, after in pairwise(samples):
        lost = [f"no longer known: {text}" for text in after.state.unknown if text not in before.state.unknown]
        for text in dict.fromkeys([*changes(before.state, after.state), *throttling(after.state), *lost]):
            times.setdefault(text, []).append(after.t)
        if len(gaps) > 2 and after.t - before.t > SUSPENDED * usual + 5:
            times.setdefault("the device suspended the run", []).append(before.t)
    return [f"after {at[0]:.0f} s: {text}" + (f" ({len(at)} times)" if len(at) > 1 else "") for text, at in times.items()]


def _ending(history: JobHistory, status: JobStatus) -> list[str]:
    last = history.samples[-1] if history.samples else None
    if status.disk_full:
        return [f"the device's disk was full when the run ended: delete files there; {KEPT}"]
    if status.state is JobState.RESTARTED:
        percent = last.state.charge_percent if last else None
        if last and percent is not None and percent <= EMPTY_PERCENT and last.state.charger is None:
            return [f"the battery ran empty: {percent} % in the last sample, after {last.t:.0f} s; {KEPT}"]
        when = f" after {last.t:.0f} s or more" if last else ""
        return [f"the device restarted{when}; {KEPT}"]
    if status.state is JobState.STOPPED:
        return ["it was stopped with --stop" + (f" after {last.t:.0f} s" if last else "")]
    by_signal = status.exit_code is not None and status.exit_code >= BY_SIGNAL
    if status.state is JobState.DIED or by_signal:
        return [f"{_killed(status.exit_code, last)}; {KEPT}"]
    if status.exit_code:
        words = [line for line in status.log if line.strip()]
        return [f"it ended with an error: {one_line(words[-1]) if words else f'exit code {status.exit_code}'}"]
    return []


def _killed(code: int | None, last: StateSample | None) -> str:
    """Returns how a run ended that did not end itself. Without an exit code nobody saw it end."""
    number = KILL if code is None else code - BY_SIGNAL
    if number not in (HANGUP, KILL, TERMINATE):
        return f"the run crashed ({signal_name(number)})"
    memory = last.memory if last else None
    scarce = number == KILL and (memory is None or memory < SCARCE_BYTES)
    cause = ", most likely by the kernel to reclaim memory" if scarce else ""
    disk = f" and {byte_text(last.free)} of the disk" if last and last.free is not None else ""
    left = f"; {byte_text(memory)} of memory{disk} were available in the last sample" if memory is not None else ""
    return f"the run was killed from outside{cause}{left}"
