"""Reads tables of external meters, such as USB meters, bench supplies, smart plugs and loggers, into a trace.

A header line among the first lines names the columns. It may be repeated, and a line of units may follow. Without a header, columns are
recognised if one is the product of two others, or by `--columns`. A figure that may be wrong is refused with its column's name.
Formats and their sources: tests/devices/meters/fixtures/tables.toml.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path

from edge_devices.energy.external.columns import (
    AUTOMATIC,
    OVERLOADS,
    UNITS,
    Choice,
    Numbers,
    Timeline,
    Times,
    decimal_mark,
    is_number,
    stamp_seconds,
)
from edge_devices.energy.external.layout import (
    MAX_MISSING_SHARE,
    PREAMBLE,
    Row,
    TableLayout,
    check_one_device,
    counted_joules,
    is_header,
    layout_of,
    mean_watts,
    plausible,
    used_watts,
    without_zeros,
)
from edge_devices.errors import MeterError
from edge_devices.files.limited_read import lines_at_most
from edge_devices.meters.base import Kind, MeterFacts, Sample, Scope, Trace

MAX_ROWS = 10_000_000
MAX_LINE_CHARS = 1 << 16  # the header of a log of hundreds of sensors has 20,000 characters
SEPARATORS = ";\t|,"
SNIFFED_LINES, SNIFFED_BYTES, SNIFFED_SHARE = 60, 1 << 16, 0.6


def rows_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the number and the cells of every line that is neither empty nor a note.

    Raises MeterError if the file cannot be read, or if a line is too long.
    """
    try:
        with path.open("rb") as file:
            text = io.TextIOWrapper(file, encoding=_encoding(file.peek(SNIFFED_BYTES)), errors="replace")
            lines = enumerate(lines_at_most(text, MAX_LINE_CHARS, 2 * MAX_ROWS), start=1)
            first = [(number, line) for number, line in islice(lines, SNIFFED_LINES) if line.strip("\r\n \0")]
            separator, begun = _separator([line for _, line in first]), False
            for number, line in chain(first, lines):
                stripped = line.strip("\r\n \0")
                if begun and stripped.startswith("#"):
                    continue  # a note; before the table, it may be the header
                if cells := _cells(stripped, separator):
                    begun = begun or (len(cells) > 1 and not stripped.startswith("#"))
                    yield number, cells
    except (OSError, csv.Error) as error:
        raise MeterError(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _encoding(head: bytes) -> str:
    """Returns the encoding of a text by its first bytes. Text without a byte order mark that is not UTF-8 is Windows-1252."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if len(head) > 3 and head[0] and not head[1] and head[2] and not head[3]:
        return "utf-16-le"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8-sig"


def _separator(lines: Sequence[str]) -> str:
    """Returns the separator of most of the later lines, because a preamble may have others; a blank if there is none."""
    figures = lines[len(lines) // 2 :]
    for separator in SEPARATORS:
        split = [cells for line in figures if len(cells := _split(line, separator)) > 1]
        if len(split) >= SNIFFED_SHARE * len(figures) and figures:
            if separator == "," and any(re.fullmatch(r"\d+\s{2,}-?\d+", cell.strip()) for cells in split for cell in cells):
                continue  # these are decimal commas in columns that blanks separate
            return separator
    return " "


def _split(line: str, separator: str) -> list[str]:
    return next(csv.reader([line.replace("\0", "")], delimiter=separator, skipinitialspace=True), [])


def _cells(text: str, separator: str) -> list[str]:
    """Returns the cells of a line, also of one that begins with #, because that may be the header."""
    cut = text.lstrip("# ") if text.startswith("#") else text
    if separator != " ":
        return [cell.strip().strip('"') for cell in _split(cut, separator)]
    cells: list[str] = []
    for word in cut.split():
        if cells and re.fullmatch(r"[(\[].*[)\]]", word):  # the unit of a header's name
            cells[-1] += f" {word}"
        else:
            cells.append(word.strip('"'))
    return cells


NAMES = re.compile(
    r"(?:device|entity|sensor|plug|host|meter|node|outlet|socket|channel|serial|gerät|steckdose|kanal)s?(?:[ _]?(?:id|name|number|nr))?"
    r"|hostname|mac|topic|name",
    re.IGNORECASE,
)
MOST_DEVICES = 20
ALTERNATING_SHARE = 0.4  # if a text changes at this share of the rows, it names different devices
CHARGING = frozenset(("charging", "lädt", "laden"))


class _Values:
    """The different values of one column, in order, and how often the value changes between rows."""

    def __init__(self, name: str) -> None:
        self.name, self.seen, self.changes, self.rows = name, dict[str, None](), 0, 0
        self._last = ""

    def add(self, cell: str) -> None:
        if len(self.seen) <= MOST_DEVICES:
            self.seen[cell] = None
        self.changes += bool(self.rows) and cell != self._last
        self.rows += 1
        self._last = cell


class OtherColumns:
    """Observes the columns of names and texts, and selects the rows of the chosen device."""

    def __init__(self, layout: TableLayout, choice: Choice, head: list[Row]) -> None:
        self._device = choice.device.lower()
        body = [row for _, row in head[layout.first :]]
        taken = {layout.time.index, *(column.index for column in layout.factors)}
        self._columns = {
            index: _Values(name)
            for index, name in enumerate(layout.header)
            if index not in taken and (NAMES.fullmatch(name.strip()) or _is_text([row[index] for row in body if index < len(row)]))
        }
        self._skipped = dict[str, None]()

    def take(self, row: list[str]) -> bool:
        """Returns whether a row is of the chosen device, or of any if none is chosen; records the texts of a row that is taken."""
        cells = [(index, row[index]) for index in self._columns if index < len(row) and row[index]]
        if self._device and not any(cell.lower() == self._device for _, cell in cells):
            self._skipped.update((cell, None) for _, cell in cells[:MOST_DEVICES] if len(self._skipped) < MOST_DEVICES)
            return False
        for index, cell in cells:
            self._columns[index].add(cell)
        return True

    def check(self, *, went_back: bool) -> None:
        """Raises MeterError for a table of several devices, or of a charging battery. `went_back`: the times start over somewhere."""
        for column in self._columns.values():
            if CHARGING & {cell.lower() for cell in column.seen}:
                raise MeterError(f"the column {column.name!r} says {' and '.join(column.seen)}: cut the table to the time without charging")
            if self._device or not 2 <= len(column.seen) <= min(MOST_DEVICES, column.rows / 2):
                continue
            if NAMES.fullmatch(column.name.strip()) or went_back or column.changes >= ALTERNATING_SHARE * column.rows:
                names = list(column.seen)
                raise MeterError(
                    f"the column {column.name!r} names {len(names)} devices ({', '.join(names[:4])}{', ...' * (len(names) > 4)});"
                    f" choose one: --columns device={names[0]}"
                )

    def check_chosen(self, rows: int) -> None:
        """Raises MeterError if the chosen device has no rows."""
        if self._device and not rows:
            raise MeterError(
                f"no row is of the device {self._device!r}; the table has {', '.join(self._skipped) or 'no column of devices'}"
            )


def _is_text(cells: list[str]) -> bool:
    return any(cell and not is_number(cell) and stamp_seconds(cell) is None for cell in cells)


JUMPS_NAMED = 3
NO_VALUE = frozenset(("unavailable", "unknown", "none"))  # Home Assistant's words for a sensor that did not answer


def import_csv(path: Path, choice: Choice = AUTOMATIC) -> Trace:
    """Reads a table separated by commas, semicolons, tabs, bars or blanks.

    Joules are preferred to watts, and watts to V × A; watt-hours come last. Times that go back a little, as with loggers that stamp whole
    packets, are replaced by the last time, and times continue if the meter's clock was set. A restarted counter is continued, missing
    readings are left out, and the sign of a current that is always negative is reversed. Notes mention all this. The facts' `source` names
    the columns. Raises MeterError for missing, ambiguous or mixed columns, and for an implausible mean power, which means that a unit is
    wrong.
    """
    try:
        return _import(path, choice)
    except MeterError as error:
        raise MeterError(f"{path}: {error}") from error.__cause__


def _import(path: Path, choice: Choice) -> Trace:
    rows = rows_of(path)
    head = list(islice(rows, PREAMBLE))
    layout = layout_of(head, choice)
    body = _Body(layout, choice, head)
    body.read(chain(head[layout.first :], rows))
    mark, columns = _marks(body, layout, choice)
    times, values = body.times.seconds(mark), _products(columns, layout.volts)
    numbers = body.lines
    if sum(b < a for a, b in pairwise(times)) > sum(b > a for a, b in pairwise(times)):  # the newest row is first
        times, values, numbers = times[::-1], values[::-1], numbers[::-1]
    timeline = Timeline()
    times = [timeline.time_of(seconds) for seconds in times]
    body.others.check(went_back=any(jump < 0 for jump in timeline.jumps))
    samples, notes = _samples(layout, numbers, times, values)
    gaps = sorted(b.time_s - a.time_s for a, b in pairwise(samples) if b.time_s > a.time_s)
    spacing = gaps[len(gaps) // 2] if gaps else 1.0
    if timeline.jumps:
        jumps = ", ".join(f"{jump:+.0f} s" for jump in timeline.jumps[:JUMPS_NAMED])
        notes.append(f"the meter's clock was set {len(timeline.jumps)} times ({jumps}); the times after it go on from before")
    facts = MeterFacts(
        name=f"csv:{path.name}",
        kind=Kind.COUNTER if layout.counter else Kind.SAMPLER,
        scope=Scope.EXTERNAL,
        source=f"{path.name}, {layout.what}",
        refresh_s=spacing,
        resolution=min((abs(b.value - a.value) for a, b in pairwise(samples) if a.value != b.value), default=0.0),
        poll_s=spacing,
        systematic="see the meter's data sheet",
        notes=(*notes, *body.notes()),
    )
    return Trace.of(facts, samples)


class _Body:
    """The contents of a table's rows: their times, the numbers of the chosen columns, and the values of other columns."""

    def __init__(self, layout: TableLayout, choice: Choice, head: list[Row]) -> None:
        self._layout = layout
        self.times = Times(layout.time)
        self.columns = [Numbers(column.name, UNITS[column.quantity], column.factor) for column in layout.factors]
        self.others = OtherColumns(layout, choice, head)
        self.lines = array("q")
        self._missing = self._stated = 0
        self._first_missing = ""

    def read(self, rows: Iterable[Row]) -> None:
        """Reads all rows. Raises MeterError for a row of another table, too many rows without figures, or fewer than two with figures."""
        for number, row in rows:
            if len(self.lines) >= MAX_ROWS:
                raise MeterError(f"it has more than {MAX_ROWS} rows; cut it to the measured part")
            if not self._is_header(number, row) and self.others.take(row):
                self._take(number, row)
        self.others.check_chosen(len(self.lines) + self._missing)
        if len(self.lines) < 2:
            first = f" ({self._first_missing})" if self._first_missing else ""
            raise MeterError(f"it has {len(self.lines)} rows of figures{first}; at least 2 are needed")
        if self._missing - self._stated > MAX_MISSING_SHARE * (self._missing + len(self.lines)):
            raise MeterError(f"{self._missing} of {self._missing + len(self.lines)} rows have no figure; {self._first_missing}")

    def notes(self) -> list[str]:
        return [f"{self._missing} rows have no figure and were left out: {self._first_missing}"] if self._missing else []

    def _is_header(self, number: int, row: list[str]) -> bool:
        """Returns whether this row repeats the header. Raises MeterError if it is the header of another table."""
        header = self._layout.header
        if [cell.lower() for cell in row] == [cell.lower() for cell in header]:
            return True
        if self.times.parse(self._cell(row, self._layout.time.index)) is None and is_header(row):
            raise MeterError(f"row {number} is the header of another table ({', '.join(row[:6])}, ...); cut the file to one of them")
        if len(row) > len(header) and any(row[len(header) :]):
            raise MeterError(
                f"row {number} has {len(row)} cells and the header {len(header)}: decimal commas in a table with commas, or another table"
            )
        return False

    @staticmethod
    def _cell(row: list[str], index: int) -> str:
        return row[index] if index < len(row) else ""

    def _take(self, number: int, row: list[str]) -> None:
        layout = self._layout
        cells = [self._cell(row, column.index) for column in layout.factors]
        for cell, column in zip(cells, layout.factors, strict=True):
            if cell.lower() in OVERLOADS:
                raise MeterError(f"row {number} holds {cell!r} in the column {column.name!r}: more than the meter can show")
        unit = self._cell(row, layout.unit_column) if layout.unit_column is not None else ""
        clock = self._cell(row, layout.time.index)
        time, figures = self.times.parse(clock), [n.parse(cell, unit) for n, cell in zip(self.columns, cells, strict=True)]
        if time is None or None in figures:
            self._missing += 1
            self._stated += any(cell.lower() in NO_VALUE for cell in (clock, *cells))
            wrong = next((column for column, figure in zip(layout.factors, figures, strict=True) if figure is None), layout.time)
            held, needed = (clock, "a time") if time is None else (self._cell(row, wrong.index), "a number")
            name = layout.time.name if time is None else wrong.name
            self._first_missing = self._first_missing or f"row {number} holds {held!r} in the column {name!r} where {needed} is needed"
            return
        self.times.add(time)
        for numbers, figure in zip(self.columns, figures, strict=True):
            if figure is not None:
                numbers.add(figure)
        self.lines.append(number)


def _marks(body: _Body, layout: TableLayout, choice: Choice) -> tuple[str, list[array[float]]]:
    """Returns the decimal mark of the times, and the numbers of the chosen columns.

    If "4,512" may be read with either mark, it takes the one with which the mean power is plausible. Raises MeterError if both or none are.
    """
    marks = decimal_mark([body.times.numbers, *body.columns], choice.decimal)
    if "?" not in marks:
        return marks[0], [column.values(mark) for column, mark in zip(body.columns, marks[1:], strict=True)]
    fitting = []
    for tried in ".,":
        used = [tried if mark == "?" else mark for mark in marks]
        columns = [column.values(mark) for column, mark in zip(body.columns, used[1:], strict=True)]
        watts = mean_watts(body.times.seconds(used[0]), _products(columns, layout.volts), counter=layout.counter)
        if plausible(watts, stated=False):
            fitting.append((used[0], columns))
    if len(fitting) != 1:
        names = ", ".join(repr(n.name) for n, mark in zip([body.times.numbers, *body.columns], marks, strict=True) if mark == "?")
        raise MeterError(
            f"the commas of the column {names} may begin decimals or separate thousands; add --columns decimal=comma or decimal=point"
        )
    return fitting[0]


def _products(columns: list[array[float]], volts: float) -> list[float]:
    return [math.prod(row) * volts for row in zip(*columns, strict=True)]


def _samples(layout: TableLayout, numbers: array[int], times: list[float], values: list[float]) -> tuple[list[Sample], list[str]]:
    """Returns the table's readings, and notes about corrections. Raises MeterError if they cannot be right."""
    what = layout.what
    check_one_device(what, times, values)
    stated = all(column.unit for column in layout.factors)
    if layout.counter:
        kept, joules, notes = counted_joules(what, numbers, times, values)
        samples = [Sample(times[i], value) for i, value in zip(kept, joules, strict=True)]
    else:
        values, notes = used_watts(what, values)
        times, values, more = without_zeros(what, times, values)
        notes += more
        samples = [Sample(time_s, watts) for time_s, watts in zip(times, values, strict=True)]
    span = samples[-1].time_s - samples[0].time_s
    watts = mean_watts([s.time_s for s in samples], [s.value for s in samples], counter=layout.counter)
    if not plausible(watts if span > 0 or not layout.counter else 0.0, stated=stated):
        raise MeterError(
            f"{what}: {watts:.3g} W on average over {span:.4g} s is no plausible power of such a device; if a unit is not what the table"
            " says, give it: --columns unit=mA (or mW, Wh, ...), or time_unit=ms"
        )
    return samples, notes
