"""Tables of external meters: what USB meters, bench supplies, smart plugs and loggers write.

A header line names the columns, anywhere in the first lines, and may be repeated. Without a header, columns are recognised where one is the
product of two others, or by `--columns`. Formats and their sources: tests/devices/meters/test_meter_tables.py.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise, permutations
from pathlib import Path
from statistics import fmean

from edge_devices.energy.external.columns import AUTOMATIC, COARSE, Choice, Column, columns_of
from edge_devices.energy.external.times import CLOCK, continued, number, seconds_of
from edge_devices.errors import MeterError
from edge_devices.files.limited_read import lines_at_most
from edge_devices.meters.base import Kind, MeterFacts, Sample, Scope
from edge_devices.meters.trace import Trace

MAX_ROWS = 10_000_000
MAX_LINE_CHARS = 4096
PREAMBLE = 40  # lines before the header
NO_VALUE = frozenset(("unavailable", "unknown", "none"))  # Home Assistant's words for a sensor that did not answer
WATTS_ASSUMED = (0.05, 300.0)  # mean of a table whose columns name no unit
WATTS_STATED = (0.001, 3000.0)
RESTART_SHARE = 0.1  # a counter that falls below this share of its value began again


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How the rows of one table are read. `date`: the column that precedes the time's, if it is apart."""

    time: Column
    date: int | None
    factors: tuple[Column, ...]
    counter: bool
    volts: float
    decimal_comma: bool
    header: Sequence[str]

    def row(self, path: Path, at: int, row: Sequence[str]) -> tuple[float, float] | None:
        """Returns seconds and watts or joules; None for a repeated header or a reading that is missing. Raises MeterError."""
        if [cell.lower() for cell in row] == [cell.lower() for cell in self.header]:
            return None
        cells = [row[column.index] if column.index < len(row) else "" for column in (self.time, *self.factors)]
        if any(cell.lower() in NO_VALUE for cell in cells):
            return None
        text = f"{row[self.date]} {cells[0]}" if self.date is not None and self.date < len(row) else cells[0]
        seconds = seconds_of(text, self.time.factor, self.time.unit, decimal_comma=self.decimal_comma)
        figures = [number(cell, decimal_comma=self.decimal_comma) for cell in cells[1:]]
        if seconds is None or not math.isfinite(seconds):
            raise MeterError(f"{path}: row {at} holds {text!r} where a time is needed")
        value = self.volts
        for cell, figure, column in zip(cells[1:], figures, self.factors, strict=True):
            if figure is None or not math.isfinite(figure):
                raise MeterError(f"{path}: row {at} holds {cell!r} where a number is needed")
            value *= figure * column.factor
        return seconds, value


def import_csv(path: Path, choice: Choice = AUTOMATIC, *, scope: Scope = Scope.EXTERNAL) -> Trace:
    """Reads a table separated by commas, semicolons, tabs or blanks. Watts are preferred to V × A, joules to watts, watt-hours come last.

    Times that go back a little (loggers that stamp whole packets) are held. A counter that begins again is continued. Raises MeterError for
    missing columns, and for a mean power that no supply of such a device has: a unit is wrong then.
    """
    rows = _rows(path)
    first = list(islice(rows, PREAMBLE))
    reading, skipped = _reading(path, first, choice)
    samples: list[Sample] = []
    restarts, base, last_time, last_value = 0, 0.0, None, -math.inf
    for at, row in enumerate(chain(first[skipped:], rows), start=skipped + 1):
        if at > MAX_ROWS:
            raise MeterError(f"{path} has more than {MAX_ROWS} rows; cut it to the measured part")
        found = reading.row(path, at, row)
        if found is None:
            continue
        last_time = continued(found[0], last_time)
        value = found[1]
        if reading.counter and value < last_value:
            if value > RESTART_SHARE * last_value:
                raise MeterError(f"{path}: row {at} has less energy than the row before ({value:g} after {last_value:g} J)")
            base, restarts = base + last_value, restarts + 1
        last_value = value
        samples.append(Sample(last_time, base + value if reading.counter else abs(value)))
    if len(samples) < 2:
        raise MeterError(f"{path} has {len(samples)} rows of figures; at least 2 are needed")
    _question(path, samples, reading)
    gaps = sorted(b.time_s - a.time_s for a, b in pairwise(samples) if b.time_s > a.time_s)
    spacing = gaps[len(gaps) // 2] if gaps else 1.0
    notes = (f"the counter began again {restarts} times and was continued",) if restarts else ()
    facts = MeterFacts(
        name=f"csv:{path.name}",
        kind=Kind.COUNTER if reading.counter else Kind.SAMPLER,
        scope=scope,
        source=str(path.name),
        refresh_s=spacing,
        resolution=_resolution(samples),
        poll_s=spacing,
        systematic="see the meter's data sheet",
        notes=notes,
    )
    return Trace.of(facts, samples)


def _rows(path: Path) -> Iterator[list[str]]:
    """Yields the cells of every line that is neither empty nor a note."""
    separator: str | None = None
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for line in lines_at_most(file, MAX_LINE_CHARS, 2 * MAX_ROWS):
                text = line.strip("\r\n \0")
                if not text or (text.startswith("#") and separator):
                    continue
                cut = text.lstrip("# ") if text.startswith("#") else text
                separator = next((s for s in (";", "\t", ",") if s in cut), separator)
                if separator is None or separator not in cut:
                    cells = cut.split()
                else:
                    cells = next(csv.reader([cut], delimiter=separator, skipinitialspace=True))
                yield [cell.strip().strip('"') for cell in cells]
    except (OSError, csv.Error) as error:
        raise MeterError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _reading(path: Path, first: Sequence[Sequence[str]], choice: Choice) -> tuple[Reading, int]:
    """Returns how to read the table, and how many of its first rows precede the figures."""
    for at, row in enumerate(first):
        if _is_figures(row):
            return _headless(path, first[at:], choice), at
        if {"state", "last_changed"} <= {cell.lower() for cell in row}:
            return _home_assistant(path, row, first[at + 1 :], choice), at + 1
        columns = columns_of(row, choice if at + 1 < len(first) and _is_figures(first[at + 1]) else AUTOMATIC)
        if "time" in columns and len(columns) > 1:
            columns = columns_of(row, choice)
            return _chosen(path, row, columns, choice, decimal_comma=_has_commas(first[at + 1 :])), at + 1
    header = ", ".join(first[0]) if first else "(none)"
    raise MeterError(
        f"{path}: the columns {header} have no time with joules, watts, or volts and amperes; name them with"
        " --columns time=NAME,power=NAME,unit=mW (or voltage= and current=, or energy=)"
    )


def _is_figures(row: Sequence[str]) -> bool:
    """Returns whether a row holds figures only: a time and at least one number."""
    times = [bool(CLOCK.fullmatch(cell.strip())) for cell in row]
    numbers = [number(cell, decimal_comma=True) is not None for cell in row]
    return len(row) > 1 and all(a or b for a, b in zip(times, numbers, strict=True)) and any(numbers[1:])


def _has_commas(rows: Sequence[Sequence[str]]) -> bool:
    return any("," in cell and number(cell, decimal_comma=True) is not None for row in rows for cell in row)


def _chosen(path: Path, header: Sequence[str], columns: dict[str, Column], choice: Choice, *, decimal_comma: bool) -> Reading:
    energy, power = columns.get("energy"), columns.get("power")
    pair = tuple(columns[name] for name in ("voltage", "current") if name in columns)
    volts = 1.0
    if energy and energy.unit and (energy.unit not in COARSE or not (power or len(pair) == 2)):
        factors: tuple[Column, ...] = (energy,)
    elif power:
        factors = (power,)
    elif len(pair) == 2:
        factors = pair
    elif energy:
        raise MeterError(f"{path}: the column {header[energy.index]!r} names no unit; add it, such as --columns unit=Wh")
    elif "current" in columns and choice.volts:
        factors, volts = (columns["current"],), choice.volts
    elif "current" in columns:
        raise MeterError(f"{path} has amperes and no volts; give the supply's, such as --columns volts=5.1")
    else:
        raise MeterError(f"{path}: the columns {', '.join(header)} have no time with joules, watts, or volts and amperes; use --columns")
    words = [name.strip().lower() for name in header]
    date = words.index("date") if "date" in words and "time" in words else None
    time = Column(index=words.index("time")) if date is not None else columns["time"]
    return Reading(
        time=time, date=date, factors=factors, counter=factors[0] is energy, volts=volts, decimal_comma=decimal_comma, header=header
    )


def _headless(path: Path, rows: Sequence[Sequence[str]], choice: Choice) -> Reading:
    width = len(rows[0])
    header = [str(i + 1) for i in range(width)]
    commas = _has_commas(rows)
    if choice.names:
        columns = columns_of(header, choice)
        if "time" in columns:
            return _chosen(path, header, columns, choice, decimal_comma=commas)
    found = _product(rows, commas) if width > 3 else None
    if found is not None:
        return Reading(
            time=Column(index=0), date=None, factors=(Column(index=found),), counter=False, volts=1.0, decimal_comma=commas, header=header
        )
    if width == 3 and CLOCK.fullmatch(rows[0][0]):  # WITRN: clock time, volts, amperes
        factors = (Column(index=1), Column(index=2))
        return Reading(time=Column(index=0), date=None, factors=factors, counter=False, volts=1.0, decimal_comma=commas, header=header)
    raise MeterError(f"{path} has no header; say which columns are what, such as --columns time=1,current=2,voltage=3")


def _product(rows: Sequence[Sequence[str]], commas: bool) -> int | None:
    """Returns the column that is the product of two others in every row: watts, of volts and amperes."""
    table = [[number(cell, decimal_comma=commas) for cell in row[1:]] for row in rows]
    if len(table) < 3 or any(cell is None for row in table for cell in row) or len({len(row) for row in table}) > 1:
        return None
    figures = [[cell or 0.0 for cell in row] for row in table]
    for power, a, b in permutations(range(len(figures[0])), 3):
        if all(abs(row[a] * row[b] - row[power]) <= 0.02 * abs(row[power]) for row in figures) and any(row[power] for row in figures):
            return power + 1
    return None


def _home_assistant(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]], choice: Choice) -> Reading:
    words = [cell.lower() for cell in header]
    state, entity = words.index("state"), words.index("entity_id") if "entity_id" in words else None
    entities = {row[entity] for row in rows if entity is not None and entity < len(row)}
    if len(entities) > 1:
        raise MeterError(f"{path} has {len(entities)} sensors ({', '.join(sorted(entities)[:4])}, ...); export the power sensor alone")
    name = next(iter(entities), "")
    quantity = "energy" if "energy" in name and "power" not in name else "power"
    if quantity == "energy" and not choice.unit:
        raise MeterError(f"{path}: {name} counts energy, and its unit is not in the table; add it: --columns unit=kWh")
    column = columns_of([quantity], Choice(unit=choice.unit))[quantity]
    figure = Column(index=state, factor=column.factor, unit=column.unit)
    return Reading(
        time=Column(index=words.index("last_changed")),
        date=None,
        factors=(figure,),
        counter=quantity == "energy",
        volts=1.0,
        decimal_comma=False,
        header=header,
    )


def _question(path: Path, samples: Sequence[Sample], reading: Reading) -> None:
    """Raises MeterError for a mean power that a unit must have gone wrong for."""
    span = samples[-1].time_s - samples[0].time_s
    if reading.counter:
        watts = (samples[-1].value - samples[0].value) / span if span > 0 else 0.0
    else:
        watts = fmean(sample.value for sample in samples)
    stated = all(column.unit for column in reading.factors)
    least, most = WATTS_STATED if stated else WATTS_ASSUMED
    if not least <= watts <= most:
        raise MeterError(
            f"{path}: {watts:.3g} W on average over {span:.4g} s is no plausible power of such a device; if a unit is not what the table"
            " says, give it: --columns unit=mA (or mW, Wh, ...), or time_unit=ms"
        )


def _resolution(samples: Sequence[Sample]) -> float:
    steps = [abs(b.value - a.value) for a, b in pairwise(samples) if a.value != b.value]
    return min(steps, default=0.0)
