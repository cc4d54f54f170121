"""Tables of external meters: what USB meters, bench supplies, smart plugs and loggers write.

A header line names the columns, anywhere in the first lines, and may be repeated. Without a header, columns are recognised where one is the
product of two others, or by `--columns`. Formats and their sources: tests/devices/meters/fixtures/tables.toml.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain, islice, pairwise, permutations
from pathlib import Path
from statistics import fmean

from edge_devices.errors import MeterError
from edge_devices.files.limited_read import lines_at_most
from edge_devices.meters.base import Kind, MeterFacts, Sample, Scope, Trace

UNITS: Mapping[str, Mapping[str, float]] = {
    "time": {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0},
    "voltage": {"v": 1.0, "volts": 1.0, "mv": 1e-3, "uv": 1e-6},
    "current": {"a": 1.0, "amps": 1.0, "ma": 1e-3, "ua": 1e-6, "na": 1e-9},
    "power": {"w": 1.0, "watts": 1.0, "mw": 1e-3, "uw": 1e-6, "kw": 1e3},
    "energy": {"j": 1.0, "joules": 1.0, "ws": 1.0, "mj": 1e-3, "uj": 1e-6, "wh": 3600.0, "mwh": 3.6, "kwh": 3.6e6},
}
WORDS: Mapping[str, frozenset[str]] = {
    "time": frozenset(("t", "time", "times", "timestamp", "datetime", "date", "elapsed", "unixtime", "lastchanged", "seconds", "runtime")),
    "voltage": frozenset(("v", "voltage", "volt", "volts", "vbus", "vavg", "u")),
    "current": frozenset(("a", "i", "current", "amps", "ampere", "amperes", "intensity", "ibus", "iavg")),
    "power": frozenset(("w", "p", "power", "watt", "watts", "wavg", "pbus")),
    "energy": frozenset(("j", "energy", "joule", "joules", "wh", "mwh", "kwh")),
}
# Of other lines than the supply; of other quantities, thresholds and extremes.
_OTHER_LINES = ("dp", "dn", "d", "usb", "aux")
_OTHER_FIGURES = (
    "min",
    "max",
    "peak",
    "record",
    "resistance",
    "temp",
    "temperature",
    "capacity",
    "ripple",
    "reactive",
    "apparent",
    "factor",
    "cost",
)
OTHERS = frozenset((*_OTHER_LINES, *_OTHER_FIGURES))
COARSE = frozenset(("wh", "mwh", "kwh"))  # their steps are several joules: watts, where there are any, are finer
COLUMNS_HELP = (
    "Columns of the --external table, if they are not recognised: time=, voltage=, current=, power= or energy=NAME (or its number from 1),"
    " unit= of the figure, time_unit=, and volts=5.1 where only amperes are there."
)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its number from 0, and the factor to SI units. `unit` is empty where the table names none."""

    index: int
    factor: float = 1.0
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What `--columns` says: names or numbers (from 1) by quantity, `unit` of the figure, `time_unit`, and volts of a table without."""

    names: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""
    time_unit: str = ""
    volts: float | None = None


AUTOMATIC = Choice()


def parse_choice(text: str) -> Choice:
    """Parses `time=NAME,current=NAME,unit=mA,volts=5.1`. Raises MeterError for anything else."""
    names: dict[str, str] = {}
    units = {"unit": "", "time_unit": ""}
    volts = None
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value or key not in (*UNITS, *units, "volts"):
            raise MeterError(f"--columns {part!r} is not KEY=NAME; keys are {', '.join(UNITS)}, unit, time_unit and volts")
        if key in UNITS:
            names[key] = value
        elif key == "volts":
            volts = _volts(value)
        else:
            known = [name for quantity, own in UNITS.items() for name in own if (quantity == "time") == (key == "time_unit")]
            if (unit := simple(value)) not in known:
                raise MeterError(f"{key}={value} is not a unit that a column can have; use one of {', '.join(known)}")
            units[key] = unit
    return Choice(names=names, volts=volts, **units)


def _volts(text: str) -> float:
    try:
        volts = float(text)
    except ValueError:
        volts = math.nan
    if not 0.5 <= volts <= 480:
        raise MeterError(f"volts={text} is not a supply's voltage; give a number from 0.5 to 480")
    return volts


def simple(text: str) -> str:
    """Returns a name in small letters with u for µ."""
    return text.lower().replace("µ", "u").replace("μ", "u").strip()


def columns_of(header: Sequence[str], choice: Choice = AUTOMATIC) -> dict[str, Column]:
    """Returns the column of each quantity that the header or the choice names. Raises MeterError for a chosen name that is not there."""
    columns: dict[str, Column] = {}
    for index, name in enumerate(header):
        words, unit = _words(name)
        for quantity, known in WORDS.items():
            if quantity not in columns and words & known and not words & OTHERS:
                unit_here = unit if unit in UNITS[quantity] else next((w for w in words if w in UNITS[quantity] and w != "t"), "")
                columns[quantity] = Column(index=index, factor=UNITS[quantity].get(unit_here, 1.0), unit=unit_here)
                break
    for quantity, name in choice.names.items():
        columns[quantity] = _named_column(header, quantity, name)
    if choice.names.keys() - {"time"}:  # the figure was chosen too: others do not count
        columns = {quantity: column for quantity, column in columns.items() if quantity == "time" or quantity in choice.names}
    if choice.unit:
        quantity = next(q for q, units in UNITS.items() if q != "time" and choice.unit in units)
        if quantity not in columns:
            raise MeterError(f"unit={choice.unit} is a unit of {quantity}, and no column holds that; add {quantity}=NAME to --columns")
        columns[quantity] = Column(index=columns[quantity].index, factor=UNITS[quantity][choice.unit], unit=choice.unit)
    if choice.time_unit and "time" in columns:
        columns["time"] = Column(index=columns["time"].index, factor=UNITS["time"][choice.time_unit], unit=choice.time_unit)
    return columns


def _named_column(header: Sequence[str], quantity: str, name: str) -> Column:
    names = [simple(column) for column in header]
    if simple(name) in names:
        index = names.index(simple(name))
    elif re.fullmatch(r"\d{1,3}", name) and 1 <= int(name) <= len(header):
        index = int(name) - 1
    else:
        raise MeterError(f"the table has no column {name!r} for {quantity}; it has {', '.join(map(repr, header))}, or give a number from 1")
    unit = _words(header[index])[1]
    return Column(index=index, factor=UNITS[quantity].get(unit, 1.0), unit=unit if unit in UNITS[quantity] else "")


def _words(name: str) -> tuple[set[str], str]:
    """Returns the words of a column's name without its unit, and the unit."""
    text = simple(name)
    bracketed = re.search(r"[(\[{]\s*([a-z]+)\s*[)\]}]", text)
    words = [word for word in re.split(r"[^a-z]+", re.sub(r"[(\[{].*?[)\]}]", " ", text)) if word]
    if bracketed:
        return {*words, "".join(words)}, bracketed[1]
    known = {unit for units in UNITS.values() for unit in units}
    unit = words[-1] if len(words) > 1 and words[-1] in known else ""
    return {*words[: -1 if unit else None], "".join(words)}, unit


MAX_ROWS = 10_000_000
MAX_LINE_CHARS = 4096
PREAMBLE = 40  # lines before the header
NO_VALUE = frozenset(("unavailable", "unknown", "none"))  # Home Assistant's words for a sensor that did not answer
WATTS_ASSUMED = (0.05, 300.0)  # mean of a table whose columns name no unit
WATTS_STATED = (0.001, 3000.0)
RESTART_SHARE = 0.1  # a counter that falls below this share of its value began again


DAY_S = 86400.0
JUMPS_NAMED = 3
DATED_S = 1e7  # times from here on are dates; clock times are below, of which dates that are not ISO 8601 keep the hours alone
HELD_S = 60.0  # a logger that stamps packets is behind by less
EPOCHS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))  # numbers from here on are an epoch in nano-, micro- or milliseconds
CLOCK = re.compile(r"(\d{1,3}):(\d{2})(?::(\d{2}(?:[.,:]\d{1,9})?))?\s*([ap]m)?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """How the rows of one table are read."""

    time: Column
    factors: tuple[Column, ...]
    counter: bool
    volts: float
    header: Sequence[str]

    def row(self, path: Path, at: int, row: Sequence[str]) -> tuple[float, float] | None:
        """Returns seconds and watts or joules; None for a repeated header or a reading that is missing. Raises MeterError."""
        if [cell.lower() for cell in row] == [cell.lower() for cell in self.header]:
            return None
        time, *cells = (row[column.index] if column.index < len(row) else "" for column in (self.time, *self.factors))
        if any(cell.lower() in NO_VALUE for cell in (time, *cells)):
            return None
        seconds = seconds_of(time, self.time.factor, self.time.unit)
        if seconds is None or not math.isfinite(seconds):
            raise MeterError(f"{path}: row {at} holds {time!r} where a time is needed")
        value = self.volts
        for cell, column in zip(cells, self.factors, strict=True):
            figure = number(cell)
            if figure is None or not math.isfinite(figure):
                raise MeterError(f"{path}: row {at} holds {cell!r} where a number is needed")
            value *= figure * column.factor
        return seconds, value


def number(text: str) -> float | None:
    """Returns a number, also one with a decimal comma; None for anything else."""
    try:
        return float(text.replace(",", "."))
    except ValueError:
        return None


def seconds_of(text: str, factor: float, unit: str) -> float | None:
    """Returns the seconds of a time cell, of which only differences count: a number, an epoch, ISO 8601, or a clock time.

    None for anything else. Of a date that is not ISO 8601 the clock time is read alone; `Timeline` counts the days.
    """
    plain = number(text)
    if plain is not None:
        return plain * (factor if unit else next((scale for smallest, scale in EPOCHS if abs(plain) >= smallest), factor))
    try:
        moment = datetime.fromisoformat(text.strip().replace(",", "."))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        clock = CLOCK.search(text)
    if clock is None:
        return None
    hours = int(clock[1]) % 12 + 12 * (clock[4].lower() == "pm") if clock[4] else int(clock[1])
    return hours * 3600.0 + int(clock[2]) * 60 + (float(re.sub("[,:]", ".", clock[3])) if clock[3] else 0.0)


class Timeline:
    """Makes the times of a table's rows go on: past midnight, over packets with one stamp, and where the meter's clock was set.

    `jumps` are the seconds by which it was set, forward above 0.
    """

    def __init__(self) -> None:
        self.jumps: list[float] = []
        self._added = self._spacing = 0.0
        self._last: float | None = None

    def time_of(self, seconds: float) -> float:
        """Returns the time of the next row, whose cell has these seconds: never before the last one's.

        A time a little in the past is held (packets), a clock time after midnight is the next day's. No measurement pauses for half a day,
        and nothing goes back by a minute: then the clock was set, and the row comes as long after the last one as that came.
        """
        if self._last is None:
            self._last = seconds
            return seconds
        step = seconds + self._added - self._last
        if step < -DAY_S / 2 and seconds < DATED_S:
            self._added, step = self._added + DAY_S, step + DAY_S
        if not -HELD_S <= step <= DAY_S / 2:
            self.jumps.append(step)
            self._added, step = self._added + self._spacing - step, self._spacing
        if step > 0:
            self._spacing = step
            self._last += step
        return self._last


def import_csv(path: Path, choice: Choice = AUTOMATIC, *, scope: Scope = Scope.EXTERNAL) -> Trace:
    """Reads a table separated by commas, semicolons, tabs or blanks. Watts are preferred to V × A, joules to watts, watt-hours come last.

    Times that go back a little (loggers that stamp whole packets) are held; where the meter's clock was set they go on, and a note says so.
    A counter that begins again is continued. Raises MeterError for missing columns, and for a mean power that no supply of such a device
    has: a unit is wrong then.
    """
    rows = _rows(path)
    first = list(islice(rows, PREAMBLE))
    layout, skipped = _layout(path, first, choice)
    samples: list[Sample] = []
    restarts, base, last_value = 0, 0.0, -math.inf
    timeline = Timeline()
    for at, row in enumerate(chain(first[skipped:], rows), start=skipped + 1):
        if at > MAX_ROWS:
            raise MeterError(f"{path} has more than {MAX_ROWS} rows; cut it to the measured part")
        figures = layout.row(path, at, row)
        if figures is None:
            continue
        time, value = timeline.time_of(figures[0]), figures[1]
        if layout.counter and value < last_value:
            if value > RESTART_SHARE * last_value:
                raise MeterError(f"{path}: row {at} has less energy than the row before ({value:g} after {last_value:g} J)")
            base, restarts = base + last_value, restarts + 1
        last_value = value
        samples.append(Sample(time, base + value if layout.counter else abs(value)))
    if len(samples) < 2:
        raise MeterError(f"{path} has {len(samples)} rows of figures; at least 2 are needed")
    _check_power(path, samples, layout)
    gaps = sorted(b.time_s - a.time_s for a, b in pairwise(samples) if b.time_s > a.time_s)
    spacing = gaps[len(gaps) // 2] if gaps else 1.0
    notes: tuple[str, ...] = (f"the counter began again {restarts} times and was continued",) if restarts else ()
    if timeline.jumps:
        jumps = ", ".join(f"{jump:+.0f} s" for jump in timeline.jumps[:JUMPS_NAMED])
        count = len(timeline.jumps)
        notes += (f"the meter's clock was set {count} times ({jumps}); the times after it go on from before",)
    facts = MeterFacts(
        name=f"csv:{path.name}",
        kind=Kind.COUNTER if layout.counter else Kind.SAMPLER,
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


def _layout(path: Path, first: Sequence[Sequence[str]], choice: Choice) -> tuple[TableLayout, int]:
    """Returns how to read the table, and how many of its first rows precede the figures."""
    for at, row in enumerate(first):
        if _is_figures(row):
            header = [str(i + 1) for i in range(len(row))]
            chosen = choice if "time" in choice.names else _headless(path, first[at:], choice)
            return _chosen(path, header, columns_of(header, chosen), choice), at
        if {"state", "last_changed"} <= {cell.lower() for cell in row}:
            choice = _home_assistant(path, row, first[at + 1 :], choice)
            return _chosen(path, row, columns_of(row, choice), choice), at + 1
        columns = columns_of(row, choice if at + 1 < len(first) and _is_figures(first[at + 1]) else AUTOMATIC)
        if "time" in columns and len(columns) > 1:
            return _chosen(path, row, columns_of(row, choice), choice), at + 1
    names = ", ".join(first[0]) if first else "(none)"
    raise MeterError(
        f"{path}: the columns {names} have no time with joules, watts, or volts and amperes; name them with"
        " --columns time=NAME,power=NAME,unit=mW (or voltage= and current=, or energy=)"
    )


def _is_figures(row: Sequence[str]) -> bool:
    """Returns whether a row holds figures only: a time and at least one number."""
    times = [bool(CLOCK.fullmatch(cell.strip())) for cell in row]
    numbers = [number(cell) is not None for cell in row]
    return len(row) > 1 and all(a or b for a, b in zip(times, numbers, strict=True)) and any(numbers[1:])


def _chosen(path: Path, header: Sequence[str], columns: dict[str, Column], choice: Choice) -> TableLayout:
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
    apart = "date" in words and "time" in words  # the clock time is enough, in the column after the date's
    time = Column(index=words.index("time")) if apart else columns["time"]
    return TableLayout(time=time, factors=factors, counter=factors[0] is energy, volts=volts, header=header)


def _headless(path: Path, rows: Sequence[Sequence[str]], choice: Choice) -> Choice:
    """Returns which columns of a table without a header hold what: volts and amperes after a clock time, or watts as a product."""
    width = len(rows[0])
    power = _product(rows) if width > 3 else None
    if power is not None:
        return replace(choice, names={"time": "1", "power": str(power + 1)})
    if width == 3 and CLOCK.fullmatch(rows[0][0]):  # WITRN
        return replace(choice, names={"time": "1", "voltage": "2", "current": "3"})
    raise MeterError(f"{path} has no header; say which columns are what, such as --columns time=1,current=2,voltage=3")


def _product(rows: Sequence[Sequence[str]]) -> int | None:
    """Returns the column that is the product of two others in every row: watts, of volts and amperes."""
    table = [[number(cell) for cell in row[1:]] for row in rows]
    if len(table) < 3 or any(cell is None for row in table for cell in row) or len({len(row) for row in table}) > 1:
        return None
    figures = [[cell or 0.0 for cell in row] for row in table]
    for power, a, b in permutations(range(len(figures[0])), 3):
        if all(abs(row[a] * row[b] - row[power]) <= 0.02 * abs(row[power]) for row in figures) and any(row[power] for row in figures):
            return power + 1
    return None


def _home_assistant(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]], choice: Choice) -> Choice:
    """Returns which columns of a history export hold what: its sensor's name says whether it counts power or energy."""
    words = [cell.lower() for cell in header]
    entity = words.index("entity_id") if "entity_id" in words else None
    entities = {row[entity] for row in rows if entity is not None and entity < len(row)}
    if len(entities) > 1:
        raise MeterError(f"{path} has {len(entities)} sensors ({', '.join(sorted(entities)[:4])}, ...); export the power sensor alone")
    name = next(iter(entities), "")
    quantity = "energy" if "energy" in name and "power" not in name else "power"
    if quantity == "energy" and not choice.unit:
        raise MeterError(f"{path}: {name} counts energy, and its unit is not in the table; add it: --columns unit=kWh")
    return replace(choice, names={"time": "last_changed", quantity: "state"})


def _check_power(path: Path, samples: Sequence[Sample], layout: TableLayout) -> None:
    """Raises MeterError for a mean power that a unit must have gone wrong for."""
    span = samples[-1].time_s - samples[0].time_s
    if layout.counter:
        watts = (samples[-1].value - samples[0].value) / span if span > 0 else 0.0
    else:
        watts = fmean(sample.value for sample in samples)
    low, high = WATTS_STATED if all(column.unit for column in layout.factors) else WATTS_ASSUMED
    if not low <= watts <= high:
        raise MeterError(
            f"{path}: {watts:.3g} W on average over {span:.4g} s is no plausible power of such a device; if a unit is not what the table"
            " says, give it: --columns unit=mA (or mW, Wh, ...), or time_unit=ms"
        )


def _resolution(samples: Sequence[Sample]) -> float:
    steps = [abs(b.value - a.value) for a, b in pairwise(samples) if a.value != b.value]
    return min(steps, default=0.0)
