"""What happened to a device while a job ran on it, named: read from the lines that `job_watch` left, and from how the job ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from edge_devices.errors import MeasurementError
from edge_devices.machine.state import DeviceState, disturbances
from edge_devices.transports.jobs import JobState, JobStatus

LONGEST_LINE = 1 << 16
MOST_LINES = 1_000_000
EMPTY = 5  # percent at the last look: a device that went off then ran out of power
SUSPENDED = 4  # times the usual distance between looks


@dataclass(frozen=True, kw_only=True)
class StateSample:
    """One look of the watch: seconds since the start, available memory in bytes."""

    t: float
    state: DeviceState
    memory: int | None


@dataclass(frozen=True, kw_only=True)
class JobHistory:
    """All looks of one job, from its begin on. `ended`: the watch saw the command's end."""

    samples: tuple[StateSample, ...]
    ended: bool

    @property
    def hottest_c(self) -> float | None:
        """The highest temperature seen, °C."""
        return max((look.state.temperature_c for look in self.samples if look.state.temperature_c is not None), default=None)

    @property
    def charge_used(self) -> int | None:
        """Percent of charge that went, None on a charger or without a battery."""
        levels = [look.state.charge_percent for look in self.samples if look.state.charge_percent is not None]
        on_charger = any(look.state.charger for look in self.samples)
        return levels[0] - levels[-1] if levels and not on_charger else None


def read_job_history(path: Path) -> JobHistory:
    """Reads a watch, also one that was cut off; raises MeasurementError for anything else."""
    samples: list[StateSample] = []
    ended = False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number in range(1, MOST_LINES):
                line = file.readline(LONGEST_LINE)
                if not line.endswith("\n"):
                    break  # the end, or a line that the power did not last for
                try:
                    record = json.loads(line)
                    kind, t = record["kind"], float(record["t"])
                    if kind == "begin":
                        samples = samples[-1:]  # what was seen while it waited for the cable is no part of the run
                    elif kind == "look":
                        memory = record["memory"]
                        samples.append(
                            StateSample(t=t, state=DeviceState.from_json(record["state"]), memory=None if memory is None else int(memory))
                        )
                    ended = ended or kind == "end"
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise MeasurementError(f"{path}: line {number} is none of a watch ({error!r}); collect the run again") from error
    except OSError as error:
        raise MeasurementError(f"{path} cannot be read: {error.strerror}") from error
    return JobHistory(samples=tuple(samples), ended=ended)


def find_incidents(history: JobHistory, status: JobStatus) -> list[str]:
    """Returns what happened, a sentence each; nothing for a run that nothing disturbed."""
    return [*_changes(history.samples), *_ending(history, status)]


def _changes(samples: tuple[StateSample, ...]) -> list[str]:
    """What changed from look to look; what happened again and again is told once, with how often."""
    gaps = sorted(b.t - a.t for a, b in pairwise(samples))
    usual = gaps[len(gaps) // 2] if gaps else 0.0
    times: dict[str, list[float]] = {}
    for before, after in pairwise(samples):
        for text in disturbances(before.state, after.state):
            times.setdefault(text, []).append(after.t)
        if len(gaps) > 2 and after.t - before.t > SUSPENDED * usual + 5:
            times.setdefault("the device put the run aside", []).append(before.t)
    return [f"after {at[0]:.0f} s: {text}" + (f" ({len(at)} times)" if len(at) > 1 else "") for text, at in times.items()]


def _ending(history: JobHistory, status: JobStatus) -> list[str]:
    last = history.samples[-1] if history.samples else None
    if status.state is JobState.RESTARTED:
        percent = last.state.charge_percent if last else None
        if last and percent is not None and percent <= EMPTY and last.state.charger is None:
            return [f"the battery ran empty: {percent} % at the last look, after {last.t:.0f} s; what was measured until then stands"]
        when = f" after {last.t:.0f} s or more" if last else ""
        return [f"the device restarted{when}; what was measured until then stands"]
    if status.state is JobState.DIED:
        left = f"; {last.memory / 1e6:.0f} MB of memory were available at the last look" if last and last.memory is not None else ""
        return [f"the run was ended from outside, most likely by the kernel for its memory{left}"]
    return []
