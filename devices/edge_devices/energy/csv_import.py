"""Recordings of external meters: any table with a time and volts × amperes, watts, or joules.

Its clock is the meter's own. `clock_offset` finds the difference from load steps whose times the device knows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from edge_devices.errors import MeterError
from edge_devices.files.bounded import lines_at_most
from edge_devices.meters.base import Kind, MeterFacts, Sample, Scope
from edge_devices.meters.trace import Trace

TIME = {"t": 1.0, "time": 1.0, "timestamp": 1.0, "times": 1.0, "seconds": 1.0, "timems": 1e-3, "timestampms": 1e-3}
VOLTS = {"v": 1.0, "voltage": 1.0, "voltagev": 1.0, "volts": 1.0, "voltagemv": 1e-3}
AMPERES = {"a": 1.0, "current": 1.0, "currenta": 1.0, "amps": 1.0, "amperes": 1.0, "currentma": 1e-3, "currentua": 1e-6}
WATTS = {"w": 1.0, "power": 1.0, "powerw": 1.0, "watts": 1.0, "powermw": 1e-3}
JOULES = {"j": 1.0, "energy": 1.0, "energyj": 1.0, "energyws": 1.0, "joules": 1.0, "energywh": 3600.0, "energymwh": 3.6}
MOST_ROWS = 10_000_000
LONGEST_LINE = 4096


def import_csv(path: Path, *, scope: Scope = Scope.EXTERNAL) -> Trace:
    """Reads a table with a header line, separated by commas, semicolons, tabs or blanks. Joules are taken before watts before V × A.

    Times that go back (loggers that stamp whole packets) are held at the latest one. Raises MeterError for a table without the needed columns.
    """
    rows = _rows(path)
    header = next(rows, [])
    columns = {re.sub(r"[^a-z]", "", name.lower().replace("µ", "u")): i for i, name in enumerate(header)}
    time = _column(columns, TIME)
    joules, watts, volts, amperes = (_column(columns, names) for names in (JOULES, WATTS, VOLTS, AMPERES))
    factors = [c for c in ((joules,) if joules else (watts,) if watts else (volts, amperes)) if c]
    if time is None or not factors or (not joules and not watts and len(factors) < 2):
        raise MeterError(
            f"{path}: the columns {', '.join(header) or '(none)'} hold no time with joules, watts, or volts and amperes. Name them so."
        )
    samples: list[Sample] = []
    for number, row in enumerate(rows, start=2):
        if number > MOST_ROWS:
            raise MeterError(f"{path} has more than {MOST_ROWS} rows; cut out the part that was measured.")
        figures = [_figure(path, number, row, column) for column in (time, *factors)]
        samples.append(Sample(max(figures[0], samples[-1].time_s if samples else -math.inf), math.prod(figures[1:])))
    if len(samples) < 2:
        raise MeterError(f"{path} has {len(samples)} rows of figures; at least 2 are needed.")
    gaps = sorted(b.time_s - a.time_s for a, b in pairwise(samples) if b.time_s > a.time_s)
    spacing = gaps[len(gaps) // 2] if gaps else 1.0
    facts = MeterFacts(
        name=f"csv:{path.name}",
        kind=Kind.COUNTER if joules else Kind.SAMPLER,
        scope=scope,
        source=str(path.name),
        refresh_s=spacing,
        resolution=_resolution(samples),
        poll_s=spacing,
        systematic="see the meter's data sheet",
    )
    return Trace.of(facts, samples)


def _rows(path: Path) -> Iterator[list[str]]:
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for line in lines_at_most(file, LONGEST_LINE, 2 * MOST_ROWS):
                text = line.strip()
                if text and not text.startswith("#"):
                    separator = next((s for s in (";", ",", "\t") if s in text), None)
                    yield [cell.strip().strip('"') for cell in text.split(separator)]
    except OSError as error:
        raise MeterError(f"{path} cannot be read: {error.strerror}.") from error


def _column(columns: dict[str, int], names: dict[str, float]) -> tuple[int, float] | None:
    return next(((columns[name], scale) for name, scale in names.items() if name in columns), None)


def _figure(path: Path, number: int, row: Sequence[str], column: tuple[int, float]) -> float:
    text = row[column[0]] if column[0] < len(row) else ""
    try:
        figure = float(text) * column[1]
    except ValueError:
        figure = math.nan
    if not math.isfinite(figure):
        raise MeterError(f"{path}: row {number} holds {text!r} where a number is needed (decimal points, no commas).")
    return figure


def _resolution(samples: Sequence[Sample]) -> float:
    steps = [abs(b.value - a.value) for a, b in pairwise(samples) if a.value != b.value]
    return min(steps, default=0.0)
