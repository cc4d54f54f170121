"""The raw record of a measurement: one JSON object per line, from which every figure can be recomputed without the device.

Kinds of line: header (schema, meter, environment), characteristics, sample (t, v, raw), fault (t, reason), idle and load (start, end),
run, warning. Times are seconds on the clock that decoding is timed with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edge_devices.energy.characteristics import Characteristics
from edge_devices.errors import MeasurementError
from edge_devices.files.atomic_write import write_text
from edge_devices.files.limited_read import lines_at_most
from edge_devices.machine.state import DeviceState
from edge_devices.meters.base import MeterFacts, Sample
from edge_devices.meters.trace import Trace

SCHEMA = 1
MAX_LINE_CHARS = 1 << 20
MAX_LINES = 50_000_000  # half a day at 1 kHz


@dataclass(frozen=True, kw_only=True)
class Run:
    """One window of work. `phases`: seconds per phase (prefill, draft, verify, ...); `emitted_tokens`: without drafted tokens;
    `prompt_tokens`: those not in the cache; `expected_s`: duration expected from the variant's earlier runs, None for its first.
    """

    variant: str
    repeat: int
    start_s: float
    end_s: float
    emitted_tokens: int
    prompt_tokens: int = 0
    requests: int = 1
    phases: Mapping[str, float] = field(default_factory=dict)
    expected_s: float | None = None
    before: DeviceState = field(default_factory=DeviceState)
    after: DeviceState = field(default_factory=DeviceState)

    @property
    def seconds(self) -> float:
        """The window's length."""
        return self.end_s - self.start_s


@dataclass(kw_only=True)
class RunLog:
    """All of one measurement."""

    facts: MeterFacts
    characteristics: Characteristics
    trace: Trace
    environment: dict[str, Any] = field(default_factory=dict)
    idles: list[tuple[float, float]] = field(default_factory=list)
    loads: list[tuple[float, float]] = field(default_factory=list)  # plain load steps, for the clock of an external meter
    runs: list[Run] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def write_log(path: Path, log: RunLog, raw: list[str] | None = None) -> None:
    """Writes a log atomically. `raw`: the meter's raw reading at each sample."""
    write_text(
        path, (json.dumps(record, ensure_ascii=False) + "\n" for record in _records(log, raw or [""] * len(log.trace.times))), parents=True
    )


def _records(log: RunLog, raw: list[str]) -> Iterator[dict[str, Any]]:
    yield {"kind": "header", "schema": SCHEMA, "meter": log.facts.to_json(), "environment": log.environment}
    yield {"kind": "characteristics", **log.characteristics.to_json()}
    for time_s, value, reading in zip(log.trace.times, log.trace.values, raw, strict=True):
        yield {"kind": "sample", "t": time_s, "v": value, "raw": reading}
    yield from ({"kind": "fault", "t": time_s, "reason": reason} for time_s, reason in log.faults)
    yield from ({"kind": "idle", "start": start_s, "end": end_s} for start_s, end_s in log.idles)
    yield from ({"kind": "load", "start": start_s, "end": end_s} for start_s, end_s in log.loads)
    yield from ({"kind": "run", **asdict(run)} for run in log.runs)
    yield from ({"kind": "warning", "text": text} for text in log.warnings)


def read_log(path: Path) -> RunLog:
    """Reads what `write_log` wrote; raises MeasurementError, with the line's number, for anything else."""
    log: RunLog | None = None
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(lines_at_most(file, MAX_LINE_CHARS, MAX_LINES), start=1):
                try:
                    record = json.loads(line)
                    log = _take(log, record.pop("kind"), record)
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                    raise MeasurementError(
                        f"{path}: line {number} is not a line of a run log ({error!r}); use the file that the run wrote"
                    ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise MeasurementError(f"{path} cannot be read: {error}") from error
    if log is None or not log.characteristics.refresh_s > 0:
        raise MeasurementError(f"{path} holds no measurement; use the file that the run wrote")
    return log


def _take(log: RunLog | None, kind: str, record: dict[str, Any]) -> RunLog:
    if log is None:
        if kind != "header" or record["schema"] != SCHEMA:
            raise ValueError(f"a {kind!r} line of schema {record.get('schema')} where a header of schema {SCHEMA} is needed")
        facts = MeterFacts.from_json(record["meter"])
        unknown = Characteristics(refresh_s=0.0, longest_gap_s=0.0, lag_s=0.0, zero_rate=0.0, read_s=0.0)
        return RunLog(facts=facts, characteristics=unknown, trace=Trace(facts=facts), environment=dict(record["environment"]))
    if kind == "sample":
        log.trace.add(Sample(float(record["t"]), float(record["v"])))
    elif kind == "characteristics":
        log.characteristics = Characteristics(**{k: float(v) for k, v in record.items()})
    elif kind == "fault":
        log.faults.append((float(record["t"]), str(record["reason"])))
    elif kind in ("idle", "load"):
        (log.idles if kind == "idle" else log.loads).append((float(record["start"]), float(record["end"])))
    elif kind == "run":
        log.runs.append(_run(record))
    elif kind == "warning":
        log.warnings.append(str(record["text"]))
    else:
        raise ValueError(f"unknown kind {kind!r}")
    return log


def _run(record: dict[str, Any]) -> Run:
    record["before"], record["after"] = DeviceState.from_json(record["before"]), DeviceState.from_json(record["after"])
    record["phases"] = {str(k): float(v) for k, v in record["phases"].items()}
    record |= {k: int(record[k]) for k in ("repeat", "emitted_tokens", "prompt_tokens", "requests")}
    record |= {k: float(record[k]) for k in ("start_s", "end_s")}
    run = Run(**record)
    if run.expected_s is not None and not isinstance(run.expected_s, float | int):
        raise ValueError(f"an expected time of {run.expected_s!r}")
    if not run.start_s < run.end_s or run.emitted_tokens < 0 or run.prompt_tokens < 0 or run.requests < 0:
        raise ValueError(f"a run from {run.start_s} to {run.end_s} s with {run.emitted_tokens} tokens")
    return run
