"""The raw record of a measurement, with one JSON object per line. Every figure can be recomputed from it without the device.

Kinds of line: header (schema, meter, environment), characteristics, sample (t, v, raw), fault (t, reason), idle and load (start, end), run,
warning, and others (share: the share of the processors that other programs used; waiting: the share of the time in which programs waited;
seconds). Times are in seconds on the same clock as decoding.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from edge_devices.energy.recorder import Characteristics
from edge_devices.errors import MeasurementError
from edge_devices.files.atomic_write import GrowingFile
from edge_devices.files.limited_read import lines_at_most
from edge_devices.files.typed_json import from_json
from edge_devices.machine.processors import MachineLoad
from edge_devices.machine.state import DeviceState
from edge_devices.meters.base import MeterFacts, Sample, Trace

SCHEMA = 1
MAX_LINE_CHARS = 1 << 20
MAX_LINES = 50_000_000  # half a day at 1 kHz
MAX_PHASES = 16  # in a run; the usual five are encode, prefill, draft, plain and verify
# Limits per log. Two idle windows and a few warnings are usual. 5000 runs of at least 12 s, with the rests between them, take a day.
MAX_OF_KIND = {"run": 5000, "idle": 1000, "load": 1000, "warning": 1000, "others": 1000}
LISTS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "faults": lambda fault: {"kind": "fault", "t": fault[0], "reason": fault[1]},
    "idles": lambda span: {"kind": "idle", "start": span[0], "end": span[1]},
    "loads": lambda span: {"kind": "load", "start": span[0], "end": span[1]},
    "runs": lambda run: {"kind": "run", **asdict(run)},
    "others": lambda load: {"kind": "others", "share": load.others, "waiting": load.waiting, "seconds": load.seconds},
    "warnings": lambda text: {"kind": "warning", "text": text},
}


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """One window of work.

    `phases` holds the seconds per phase (prefill, draft, verify, ...). `emitted_tokens` does not count drafted tokens, and `prompt_tokens`
    does not count tokens in the cache. `expected_s` is the duration expected from earlier runs of the variant; None for its first run.
    `lead_s` is for how long the same work ran before the window."""

    variant: str
    repeat: int
    start_s: float
    end_s: float
    emitted_tokens: int
    prompt_tokens: int = 0
    requests: int = 1
    phases: Mapping[str, float] = field(default_factory=dict)
    expected_s: float | None = None
    lead_s: float = 0.0
    before: DeviceState = field(default_factory=DeviceState)
    after: DeviceState = field(default_factory=DeviceState)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(kw_only=True)
class RunLog:
    """All data of one measurement."""

    facts: MeterFacts
    characteristics: Characteristics
    trace: Trace
    environment: dict[str, Any] = field(default_factory=dict)
    idles: list[tuple[float, float]] = field(default_factory=list)
    loads: list[tuple[float, float]] = field(default_factory=list)  # plain load steps, which align an external meter's clock
    runs: list[LoggedRun] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    others: list[MachineLoad] = field(default_factory=list)  # one entry for the whole measurement, added at its end
    stopped: bool = False  # ended early by Ctrl-C


class LogFile(GrowingFile):
    """A log file that is written during the measurement. After an error or Ctrl-C, it is kept if it has a run.

    Each call of `keep` appends what is new, so if the process is killed, the file has all earlier windows.
    """

    def __init__(self, path: Path) -> None:
        """Creates the file. Raises MeasurementError if it cannot be written."""
        self._written = dict.fromkeys(LISTS, 0)
        self._samples = -1  # means that the header is not written yet
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path)

    def keep(self, log: RunLog, raw: Sequence[str] = ()) -> None:
        """Appends what was added to the log since the last call. `raw` is the meter's raw text for each sample. Raises MeasurementError."""
        self.append(json.dumps(record, ensure_ascii=False) + "\n" for record in self._new(log, raw))
        self.worth_keeping = bool(log.runs)

    def _new(self, log: RunLog, raw: Sequence[str]) -> Iterator[dict[str, Any]]:
        if self._samples < 0:
            self._samples = 0
            yield {"kind": "header", "schema": SCHEMA, "meter": log.facts.to_json(), "environment": log.environment}
            yield {"kind": "characteristics", **asdict(log.characteristics)}
        readings = len(raw) if raw else len(log.trace.values)  # the recorder's thread may be adding a sample
        for i in range(self._samples, min(readings, len(log.trace.times), len(log.trace.values))):
            yield {"kind": "sample", "t": log.trace.times[i], "v": log.trace.values[i], "raw": raw[i] if raw else ""}
            self._samples = i + 1
        for name, record in LISTS.items():
            entries = getattr(log, name)
            yield from map(record, entries[self._written[name] :])
            self._written[name] = len(entries)


def write_log(path: Path, log: RunLog) -> None:
    """Writes a complete log."""
    with LogFile(path) as file:
        file.keep(log)


def is_energy_log(path: Path) -> bool:
    """Returns whether a file begins like one by `write_log`."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = json.loads(file.readline(MAX_LINE_CHARS))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and first.get("kind") == "header" and isinstance(first.get("meter"), dict)


def read_log(path: Path, max_lines: int = MAX_LINES) -> RunLog:
    """Reads a log by `write_log`. For any other file, raises MeasurementError with the line's number.

    Overlapping windows are an error too, because measurements have none. So the work of computing figures is proportional to the readings.
    """
    log: RunLog | None = None
    counts: Counter[str] = Counter()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(lines_at_most(file, MAX_LINE_CHARS, max_lines), start=1):
                if log is not None and _is_cut(line):
                    log.warnings.append("the log's last line is incomplete and was left out: its writer was stopped")
                    break
                try:
                    record = json.loads(line)
                    log = _take(log, kind := record.pop("kind"), record)
                    counts[kind] += 1
                    if counts[kind] > MAX_OF_KIND.get(kind, max_lines):
                        raise ValueError(f"more than {MAX_OF_KIND[kind]} lines of the kind {kind!r}")
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                    raise MeasurementError(
                        f"{path}: line {number} is not a line of a run log ({error!r}); use the file that the run wrote"
                    ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise MeasurementError(f"{path} cannot be read: {error}") from error
    if log is None or not log.characteristics.refresh_s > 0:
        raise MeasurementError(f"{path} holds no measurement; use the file that the run wrote")
    windows = sorted([(run.start_s, run.end_s) for run in log.runs] + log.idles)
    for (_, end_s), (start_s, _) in pairwise(windows):
        if not start_s >= end_s:  # NaN is refused as well, as it would spoil the sorting
            raise MeasurementError(
                f"{path}: a window begins at {start_s} s, before another ends at {end_s} s; use the file that the run wrote"
            )
    return log


def _is_cut(line: str) -> bool:
    """Returns whether this is the incomplete last line of a writer that was killed."""
    if line.endswith("\n"):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def _take(log: RunLog | None, kind: str, record: dict[str, Any]) -> RunLog:
    if log is None:
        if kind != "header":
            raise ValueError(f"a {kind!r} line where a header is needed")
        return _begun(record)
    if kind == "sample":
        log.trace.add(Sample(float(record["t"]), float(record["v"])))
    elif kind == "characteristics":
        log.characteristics = from_json(Characteristics, record, "characteristics", exact=True)
    elif kind == "fault":
        time_s = float(record["t"])
        if log.faults and not time_s >= log.faults[-1][0]:
            raise ValueError(f"a fault at {time_s} s after one at {log.faults[-1][0]} s")
        log.faults.append((time_s, str(record["reason"])))
    elif kind in ("idle", "load"):
        (log.idles if kind == "idle" else log.loads).append((float(record["start"]), float(record["end"])))
    elif kind == "run":
        log.runs.append(_run(record))
    elif kind == "others":
        log.others.append(from_json(MachineLoad, {**record, "others": record["share"]}, "others"))
    elif kind == "warning":
        log.warnings.append(str(record["text"]))
    else:
        raise ValueError(f"unknown kind {kind!r}")
    return log


def _begun(header: dict[str, Any]) -> RunLog:
    if header["schema"] != SCHEMA:
        raise ValueError(f"schema {str(header['schema'])[:40]}; this version reads {SCHEMA}: upgrade edge-mtp")
    if "meter" not in header:
        raise ValueError("the header of speeds, which --runs wrote, has no meter; the log of --energy is needed")
    facts = from_json(MeterFacts, header["meter"], "meter")
    unknown = Characteristics(refresh_s=0.0, longest_gap_s=0.0, lag_s=0.0, zero_rate=0.0, read_s=0.0)
    return RunLog(facts=facts, characteristics=unknown, trace=Trace(facts=facts), environment=dict(header["environment"]))


def _run(record: dict[str, Any]) -> LoggedRun:
    if len(record["phases"]) > MAX_PHASES:
        raise ValueError(f"a run of {len(record['phases'])} phases; {MAX_PHASES} are the most")
    run = from_json(LoggedRun, record, "run", exact=True)
    if not run.start_s < run.end_s or run.emitted_tokens < 0 or run.prompt_tokens < 0 or run.requests < 0:
        raise ValueError(f"a run from {run.start_s} to {run.end_s} s with {run.emitted_tokens} tokens")
    return run
