"""Columns and cells of an external meter's table: the quantity and unit of a column, and the numbers and times in its cells."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from edge_devices.errors import MeterError

_PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "nano": 1e-9, "micro": 1e-6, "milli": 1e-3, "kilo": 1e3}
_BASES: Mapping[str, Mapping[str, float]] = {
    "voltage": dict.fromkeys(("v", "volt", "volts"), 1.0),
    "current": dict.fromkeys(("a", "amp", "amps", "ampere", "amperes"), 1.0),
    "power": dict.fromkeys(("w", "watt", "watts"), 1.0),
    "energy": dict.fromkeys(("j", "joule", "joules", "ws"), 1.0) | {"wh": 3600.0},
}
_TIMES = {
    1.0: ("s", "sec", "secs", "second", "seconds"),
    1e-3: ("ms", "msec", "millis", "millisecond", "milliseconds"),
    1e-6: ("us", "usec", "micros", "microsecond", "microseconds"),
    1e-9: ("ns", "nanosecond", "nanoseconds"),
    60.0: ("min", "mins", "minute", "minutes"),
    3600.0: ("h", "hr", "hrs", "hour", "hours"),
}
UNITS: Mapping[str, Mapping[str, float]] = {
    "time": {name: factor for factor, names in _TIMES.items() for name in names},
    **{
        quantity: {prefix + base: scale * factor for prefix, scale in _PREFIXES.items() for base, factor in bases.items()}
        for quantity, bases in _BASES.items()
    },
}
_QUANTITY_OF = {unit: quantity for quantity, units in UNITS.items() for unit in units}
_WORDS: Mapping[str, tuple[str, ...]] = {
    "time": (
        *("t", "time", "times", "timestamp", "ts", "datetime", "date", "elapsed", "unixtime", "lastchanged", "runtime", "epoch", "clock"),
        *("zeit", "uhrzeit", "zeitstempel", "datum"),
    ),
    "voltage": ("v", "u", "voltage", "volt", "volts", "vbus", "vavg", "spannung"),
    "current": ("a", "i", "current", "amps", "ampere", "amperes", "intensity", "ibus", "iavg", "strom", "stromstärke"),
    "power": ("w", "p", "power", "watt", "watts", "wavg", "pbus", "leistung"),
    "energy": ("j", "e", "energy", "joule", "joules", "energie", "consumption", "verbrauch"),
}
_QUANTITY_WORDS = {word: quantity for quantity, words in _WORDS.items() for word in words}
_COMPOUNDS = {"leistung": "power", "spannung": "voltage", "energie": "energy"}  # endings of German compound nouns
_NOT_POWER = ("schein", "blind")  # beginnings of German words for apparent and reactive power
# Words for other quantities, extremes, thresholds, and energy that flows in the other direction.
_OTHERS = frozenset(
    (
        *("d", "dp", "dn", "resistance", "temp", "temperature", "capacity", "ripple", "reactive", "apparent", "aprt", "factor", "cost"),
        *("shunt", "frequency"),
        *("min", "max", "peak", "record", "minimum", "maximum", "std", "stdev", "stddev", "deviation", "variance", "count"),
        *("limit", "tdp", "target", "threshold", "alarm", "rated", "nominal", "set", "setpoint", "budget", "state", "status", "on", "off"),
        *("returned", "return", "ret", "export", "exported", "yesterday"),
    )
)
_SECOND_LINES = frozenset(("usb", "aux"))  # lines beside the supply, used only if there are no other columns
_OTHER_UNITS = frozenset(
    ("c", "f", "hz", "khz", "mhz", "ghz", "rpm", "va", "kva", "var", "ah", "mah", "ohm", "db", "dbm", "ticks", "samples", "count")
)
# A letter after one of these is a name: "Phase A" is not amperes.
_NUMBERED = frozenset(("phase", "channel", "ch", "port", "probe", "line", "sensor", "device", "output", "input"))
# Units with steps of several joules; a column of watts is preferred to them.
COARSE = frozenset(unit for unit in UNITS["energy"] if unit.endswith("wh"))
MARKS = {"comma": ",", "point": "."}
COLUMNS_HELP = (
    "Columns of the --external table, if they are not recognised: time=, voltage=, current=, power= or energy=NAME (or its number from 1),"
    " unit= of the figure, time_unit=, device=NAME of a table with several, decimal=comma or point, and volts=5.1 where only amperes are"
    " there."
)
_NAMES_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its index from 0, and the factor to SI units. `unit` is empty if the table does not name one."""

    index: int
    name: str
    quantity: str
    factor: float = 1.0
    unit: str = ""

    def in_unit(self, unit: str) -> Column:
        """Returns the column with another unit of the same quantity."""
        return Column(index=self.index, name=self.name, quantity=self.quantity, factor=UNITS[self.quantity][unit], unit=unit)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The value of `--columns`.

    `names` holds columns' names or numbers (from 1) by quantity, and `unit` the unit of the figure. `device` selects a device in a table
    with several. `decimal` is the decimal mark. `volts` is the voltage if the table has none."""

    names: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""
    time_unit: str = ""
    device: str = ""
    decimal: str = ""
    volts: float | None = None


AUTOMATIC = Choice()


def parse_choice(text: str) -> Choice:
    """Parses `time=NAME,current=NAME,unit=mA,volts=5.1`. Raises MeterError for anything else."""
    names: dict[str, str] = {}
    words = {"unit": "", "time_unit": "", "device": "", "decimal": ""}
    volts = None
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value or key not in (*UNITS, *words, "volts"):
            keys = ", ".join((*UNITS, *words))
            raise MeterError(
                f"--columns {part!r} is not KEY=NAME; keys are {keys} and volts (a name with a comma is given by the column's number)"
            )
        if key in UNITS:
            names[key] = value
        elif key == "volts":
            volts = _volts(value)
        elif key == "decimal":
            if value not in MARKS:
                raise MeterError(f"decimal={value} is no mark of decimals; use comma or point")
            words[key] = MARKS[value]
        elif key == "device":
            words[key] = value
        else:
            known = [name for quantity, own in UNITS.items() for name in own if (quantity == "time") == (key == "time_unit")]
            if (unit := simple(value)) not in known:
                short = ", ".join(name for name in known if len(name) < 4)
                raise MeterError(f"{key}={value} is not a unit that a column can have; use one of {short}")
            words[key] = unit
    return Choice(names=names, volts=volts, **words)


def _volts(text: str) -> float:
    try:
        volts = float(text)
    except ValueError:
        volts = math.nan
    if not 0.5 <= volts <= 480:
        raise MeterError(f"volts={text} is not a supply's voltage; give a number from 0.5 to 480")
    return volts


def simple(text: str) -> str:
    """Returns a name in lower case, with u instead of µ."""
    return text.lower().replace("µ", "u").replace("μ", "u").strip()


class Meaning(NamedTuple):
    """The meaning of a column's name: its quantity or None, its unit or "", and whether it is of a second line beside the supply."""

    quantity: str | None
    unit: str
    second: bool = False


_NOTHING = Meaning(None, "")


def meaning(name: str) -> Meaning:
    """Returns the meaning of a column's name. A unit decides; without one, the last word for a quantity does ("current power")."""
    # Separates the words of names such as powerMilliwatts, PowerW and currentmA.
    apart = re.sub(r"(?<=[a-z]{2})([numkµμ]?(?:Wh|[WAVJ]))$", r" \1", re.sub(r"(?<=[a-z]{2})(?=[A-Z][a-z])", " ", name))
    text = re.sub(r"watt[- ]?hours?|w\s?[·⋅*]\s?h\b", "wh", simple(apart))
    outside, unit, foreign = re.sub(r"[(\[{].*?[)\]}]", " ", text), "", "%" in text or "°" in text
    for content in map(str.strip, re.findall(r"[(\[{](.*?)[)\]}]", text)):
        if content in _QUANTITY_OF:
            unit = content
        elif content in _OTHER_UNITS or ("/" in content and content.split("/")[0] in _QUANTITY_OF):
            foreign = True
        else:
            outside += f" {content}"
    tokens = [token for token in re.split(r"[^a-zäöüß]+", outside) if token]
    words = [quantity for token in tokens if (quantity := _quantity_word(token, alone=len(tokens) == 1))]
    if "".join(tokens) in _QUANTITY_WORDS:  # last_changed
        words.append(_QUANTITY_WORDS["".join(tokens)])
    if len(set(words)) > 1 and "current" in words:  # "current power" is the present power, not amperes
        words = [word for word in words if word != "current"]
    quantity = words[-1] if words else None
    loose = _loose_unit(tokens)
    if not unit or (loose and _QUANTITY_OF[loose] == quantity != _QUANTITY_OF[unit]):  # in "Active energy Wh(A)", A is a phase
        unit = loose
    if foreign or any(token.startswith(_NOT_POWER) for token in tokens):
        return _NOTHING
    if unit and (len(tokens) > 1 or not tokens or tokens[0] != unit) and (quantity == "time") != (_QUANTITY_OF[unit] == "time"):
        return _NOTHING  # for example the seconds that a voltage takes to rise
    others = _OTHERS & set(tokens)
    if others and not (quantity == "time" and others <= {unit}):
        return _NOTHING
    return Meaning(_QUANTITY_OF[unit] if unit else quantity, unit, bool(_SECOND_LINES & set(tokens)))


def _quantity_word(token: str, *, alone: bool) -> str | None:
    """Returns the quantity that a word names. A single letter names one only if it is the whole name."""
    if len(token) == 1 and not alone:
        return None
    return _QUANTITY_WORDS.get(token) or next((quantity for end, quantity in _COMPOUNDS.items() if token.endswith(end)), None)


def _loose_unit(tokens: Sequence[str]) -> str:
    """Returns a unit that is not in brackets, as in "power_mW", "mA current" or "W (total)"; "" if there is none."""
    named = {quantity for token in tokens if (quantity := _quantity_word(token, alone=False))}
    for at in reversed(range(len(tokens))):
        token = tokens[at]
        if token not in _QUANTITY_OF or (token in ("min", "h") and len(tokens) == 1):
            continue
        if len(token) == 1 and ((len(tokens) > 2 and at < len(tokens) - 1) or (at and tokens[at - 1] in _NUMBERED)):
            continue
        if len(token) > 2 and len(tokens) == 1 and _QUANTITY_WORDS.get(token) not in (None, "time"):
            return token  # "watts"
        if not named or _QUANTITY_OF[token] in named:
            return token
    return ""


def candidates(header: Sequence[str]) -> dict[str, list[Column]]:
    """Returns the columns that may hold each quantity, by their names. Those of a second line are used only if there are no others."""
    found: dict[str, list[tuple[bool, Column]]] = {}
    for index, name in enumerate(header):
        means = meaning(name)
        if means.quantity:
            factor = UNITS[means.quantity].get(means.unit, 1.0)
            column = Column(index=index, name=name, quantity=means.quantity, factor=factor, unit=means.unit)
            found.setdefault(means.quantity, []).append((means.second, column))
    return {
        quantity: [column for second, column in columns if second == min(second for second, _ in columns)]
        for quantity, columns in found.items()
    }


def named_column(header: Sequence[str], quantity: str, name: str, unit: str) -> Column:
    """Returns the column with this name or number (from 1), in `unit` if that is one of its quantity. Raises MeterError."""
    places = [index for index, column in enumerate(header) if simple(column) == simple(name)]
    if len(places) > 1:
        numbers = ", ".join(str(index + 1) for index in places)
        raise MeterError(
            f"the table has {len(places)} columns {name!r}, the numbers {numbers}; choose one by its number: {quantity}=NUMBER"
        )
    if not places and re.fullmatch(r"\d{1,5}", name) and 1 <= int(name) <= len(header):
        places = [int(name) - 1]
    if not places:
        raise MeterError(f"the table has no column {name!r} for {quantity}; it has {listed(header)}, or give a number from 1")
    column = Column(index=places[0], name=header[places[0]], quantity=quantity)
    if unit in UNITS[quantity]:
        return column.in_unit(unit)
    stated = meaning(column.name)
    if stated.unit and stated.unit not in UNITS[quantity] and not re.fullmatch(r"\d+", column.name):
        raise MeterError(f"the column {column.name!r} has the unit {stated.unit}, which is none of {quantity}; give its unit with unit=")
    return column.in_unit(stated.unit) if stated.unit in UNITS[quantity] else column


def listed(names: Sequence[str]) -> str:
    """Returns names for a message; of many, only the first ones."""
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:_NAMES_SHOWN])) + more


DAY_S = 86400.0
DATED_S = 1e7  # larger times are dates, smaller ones are clock times; of dates that are not ISO 8601, only the clock time is read
HELD_S = 60.0  # a logger that stamps whole packets goes back in time by less
EPOCHS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))  # numbers of at least this size are nano-, micro- or milliseconds since 1970
SLOW_ROWS_S = 100.0  # if rows are further apart, and not by whole minutes, times are probably milliseconds
CLOCK = re.compile(r"(\d{1,3}):(\d{2})(?::(\d{2}(?:[.,:]\d{1,9})?))?\s*([ap]m)?", re.IGNORECASE)
MINUTES = re.compile(r"(\d{1,3}):(\d{2}[.,]\d{1,9})")  # mm:ss.s, as spreadsheets show times
OVERLOADS = frozenset(("ol", "inf", "+inf", "-inf", "infinity", "overload", "overflow", "ovld", "over"))
_CELL = re.compile(r"([+-]?[\d.,]*\d[.,]?(?:[eE][+-]?\d{1,3})?)\s*([a-zA-Zµμ]*)")
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?")
_SWAPPED = str.maketrans(",.", ".,")
_BLANKS = re.compile(r"(?<=\d)[\s'\u2019\u00a0\u202f](?=\d{3}(?!\d))")  # between groups of three digits
Reading = tuple[float | None, float | None]  # a number read with decimal points, and with decimal commas; None if it is not one


def readings_of(text: str) -> tuple[Reading, str]:
    """Returns a cell's number read with either decimal mark, and the unit after it."""
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
    """Returns whether a cell holds a number, perhaps followed by a unit."""
    reading, unit = readings_of(text)
    return reading != (None, None) and (not unit or any(simple(unit) in units for units in UNITS.values()))


class Numbers:
    """The numbers of one column, read with both decimal marks, and the marks that its cells prove."""

    def __init__(self, name: str, units: Mapping[str, float], factor: float) -> None:
        """`units` are those that a cell may name; `factor` applies to cells without a unit."""
        self.name, self._units, self._factor = name, units, factor
        self.marks: set[str] = set()
        self.unsure: set[str] = set()  # marks that may be decimal or separate thousands
        self._kept: dict[str, array[float]] = {".": array("d"), ",": array("d")}

    def parse(self, text: str, unit: str = "") -> Reading | None:
        """Returns a cell's number in SI units; None if it holds none. `unit` is from another column of the row."""
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
        """Returns the column's numbers read with this decimal mark."""
        return self._kept[mark]


def decimal_mark(columns: Sequence[Numbers], chosen: str) -> list[str]:
    """Returns the decimal mark of each column.

    It is `chosen`, else what its own cells prove, else what the other columns prove. It is "?" if commas may be either. Raises MeterError
    for a column that has both marks.
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
    """The times of a table's rows, which are numbers, or dates and clock times."""

    def __init__(self, column: Column) -> None:
        self.numbers = Numbers(column.name, UNITS["time"], 1.0)
        self._column = column
        self.stamps = array("d")

    def parse(self, text: str) -> Reading | float | None:
        """Returns both readings of a number, or the seconds of a date or clock time, or None."""
        return self.numbers.parse(text) or stamp_seconds(text)

    def add(self, time: Reading | float) -> None:
        """Appends a time of `parse`. Raises MeterError if the column has both numbers and dates or clock times."""
        if isinstance(time, float):
            self.stamps.append(time)
        else:
            self.numbers.add(time)
        if self.stamps and self.numbers.values("."):
            raise MeterError(f"the column {self._column.name!r} has numbers and times of day; cut the table to one recording")

    def seconds(self, mark: str) -> Sequence[float]:
        """Returns the seconds of all rows. Raises MeterError for numbers that are probably milliseconds."""
        if self.stamps:
            return self.stamps
        values, column = self.numbers.values("," if mark == "," else "."), self._column
        scale = next((scale for smallest, scale in EPOCHS if values and abs(values[0]) * column.factor >= smallest), 0.0)
        if scale:  # such large numbers are an epoch, whatever unit the header names
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
    """Returns the seconds of a date or a clock time; None for anything else.

    Only differences of the result are meaningful. Of a date that is not ISO 8601, only the clock time is read; `Timeline` counts the days.
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
    """Turns the times of a table's rows into times that never go back.

    It continues after midnight, over packets whose rows have the same stamp, and where the meter's clock was set. `jumps` are the seconds
    by which it was set, above 0 if forward.
    """

    def __init__(self) -> None:
        self.jumps: list[float] = []
        self._added = self._spacing = 0.0
        self._last: float | None = None

    def time_of(self, seconds: float) -> float:
        """Returns the time of the next row, whose cell has these seconds. It is never before that of the last row.

        A time that is a little earlier is replaced by the last time (packets). A clock time after midnight is taken as the next day's.
        Larger steps, back by more than a minute or forward by half a day, mean that the clock was set; then the row follows the last one at
        the previous spacing.
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
