"""Cells of a meter's table: numbers of any region, with a unit or without, and times."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median

from edge_devices.energy.external.columns import UNITS, Column, simple
from edge_devices.errors import MeterError

DAY_S = 86400.0
DATED_S = 1e7  # times from here on are dates; clock times are below, of which dates that are not ISO 8601 keep the hours alone
HELD_S = 60.0  # a logger that stamps packets is behind by less
EPOCHS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))  # numbers from here on are an epoch in nano-, micro- or milliseconds
SLOW_ROWS_S = 100.0  # rows further apart, and not by whole minutes, are rather milliseconds of which nobody says so
CLOCK = re.compile(r"(\d{1,3}):(\d{2})(?::(\d{2}(?:[.,:]\d{1,9})?))?\s*([ap]m)?", re.IGNORECASE)
MINUTES = re.compile(r"(\d{1,3}):(\d{2}[.,]\d{1,9})")  # mm:ss.s, as spreadsheets show it
OVERLOADS = frozenset(("ol", "inf", "+inf", "-inf", "infinity", "overload", "overflow", "ovld", "over"))
_CELL = re.compile(r"([+-]?[\d.,]*\d[.,]?(?:[eE][+-]?\d{1,3})?)\s*([a-zA-Zµμ]*)")
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?")
_SWAPPED = str.maketrans(",.", ".,")
_BLANKS = re.compile(r"(?<=\d)[\s'\u2019\u00a0\u202f](?=\d{3}(?!\d))")  # between groups of three digits
Reading = tuple[float | None, float | None]  # with decimal points, and with decimal commas; None: not a number then


def readings_of(text: str) -> tuple[Reading, str]:
    """Returns what a cell's number is under both marks of decimals, and the unit behind it."""
    cell = _CELL.fullmatch(_BLANKS.sub("", text.strip().replace("\u2212", "-")))
    if cell is None:
        return (None, None), ""
    return (_with_points(cell[1]), _with_points(cell[1].translate(_SWAPPED))), cell[2]


def _with_points(text: str) -> float | None:
    if "," in text:
        if not _GROUPED.fullmatch(text):
            return None
        text = text.replace(",", "")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def is_number(text: str) -> bool:
    """Returns whether a cell holds a number, perhaps with a unit behind it."""
    reading, unit = readings_of(text)
    return reading != (None, None) and (not unit or any(simple(unit) in units for units in UNITS.values()))


class Numbers:
    """The numbers of one column under both marks of decimals, and which marks they can only have."""

    def __init__(self, name: str, units: Mapping[str, float], factor: float) -> None:
        """`factor`: of cells that name no unit; `units`: those that a cell may name."""
        self.name, self._units, self._factor = name, units, factor
        self.marks: set[str] = set()
        self.unsure: set[str] = set()  # marks that may be either
        self._kept: dict[str, array[float]] = {".": array("d"), ",": array("d")}

    def parse(self, text: str, unit: str = "") -> Reading | None:
        """Returns a cell's number in SI units; None where it holds none. `unit`: from another column of the row."""
        (point, comma), own = readings_of(text)
        if point is None and comma is None:
            return None
        stated = simple(own or unit)
        if stated and stated not in self._units:
            return None
        if point is None or comma is None:
            self.marks.add("." if comma is None else ",")
        elif point != comma:
            self.unsure.update(mark for mark in ".," if mark in text)
        factor = self._units[stated] if stated else self._factor
        return point if point is None else point * factor, comma if comma is None else comma * factor

    def add(self, reading: Reading) -> None:
        """Appends a reading of `parse`."""
        for mark, value in zip(".,", reading, strict=True):
            self._kept[mark].append(math.nan if value is None else value)

    def values(self, mark: str) -> array[float]:
        """Returns the column's numbers with this mark of decimals."""
        return self._kept[mark]


def decimal_mark(columns: Sequence[Numbers], chosen: str) -> list[str]:
    """Returns the mark of decimals of each column: `chosen`, else what its cells can only be, else what the others' are.

    "?" where commas may be either. Raises MeterError for a column that has both.
    """
    found = []
    everywhere = set[str]().union(*(column.marks for column in columns))
    for column in columns:
        marks = {chosen} if chosen else column.marks or (everywhere if len(everywhere) == 1 else set())
        if len(column.marks | (marks if column.unsure else set())) > 1 or (column.unsure == {".", ","} and not marks):
            raise MeterError(f"the column {column.name!r} has decimal points and decimal commas; write all of its numbers alike")
        found.append(next(iter(marks)) if marks else "?" if "," in column.unsure else ".")
    return found


class Times:
    """The times of a table's rows: numbers, or dates and clock times."""

    def __init__(self, column: Column) -> None:
        self.numbers = Numbers(column.name, UNITS["time"], 1.0)
        self._column = column
        self.stamps = array("d")

    def parse(self, text: str) -> Reading | float | None:
        """Returns both readings of a number, the seconds of a stamp, or None for what is neither."""
        return self.numbers.parse(text) or stamp_seconds(text)

    def add(self, time: Reading | float) -> None:
        """Appends a time of `parse`. Raises MeterError where a column has numbers and stamps."""
        if isinstance(time, float):
            self.stamps.append(time)
        else:
            self.numbers.add(time)
        if self.stamps and self.numbers.values("."):
            raise MeterError(f"the column {self._column.name!r} has numbers and times of day; cut the table to one recording")

    def seconds(self, mark: str) -> Sequence[float]:
        """Returns the seconds of all rows. Raises MeterError for numbers that are rather milliseconds."""
        if self.stamps:
            return self.stamps
        values, column = self.numbers.values("," if mark == "," else "."), self._column
        scale = next((scale for smallest, scale in EPOCHS if values and abs(values[0]) * column.factor >= smallest), 0.0)
        if scale:  # no clock stands there in the unit that the header names
            return array("d", (value * scale for value in values))
        if not column.unit and len(values) > 2:
            steps = [b - a for a, b in pairwise(values) if b != a]
            step = abs(median(steps)) if steps else 0.0
            if step >= SLOW_ROWS_S and step % 60:
                raise MeterError(
                    f"the rows are {step:g} apart in the column {column.name!r}, which names no unit; add --columns time_unit=ms (or s)"
                )
        return array("d", (value * column.factor for value in values))


def stamp_seconds(text: str) -> float | None:
    """Returns the seconds of a date or a clock time, of which only differences count; None for anything else.

    Of a date that is not ISO 8601 the clock time is read alone; `Timeline` counts the days.
    """
    try:
        moment = datetime.fromisoformat(text.strip().replace(",", "."))
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        pass
    if minutes := MINUTES.fullmatch(text.strip()):
        return int(minutes[1]) * 60 + float(minutes[2].replace(",", "."))
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
