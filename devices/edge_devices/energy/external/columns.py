"""Which columns of a meter's table hold time, volts, amperes, watts or joules, and in which unit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge_devices.errors import MeterError

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
    names, unit, time_unit, volts = {}, "", "", None
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise MeterError(f"--columns {part!r} is not KEY=NAME; keys are {', '.join(UNITS)}, unit, time_unit and volts")
        if key in UNITS:
            names[key] = value
        elif key in ("unit", "time_unit"):
            known = [name for quantity, units in UNITS.items() for name in units if (quantity == "time") == (key == "time_unit")]
            if simple(value) not in known:
                raise MeterError(f"{key}={value} is not a unit that a column can have; use one of {', '.join(known)}")
            unit, time_unit = (simple(value), time_unit) if key == "unit" else (unit, simple(value))
        elif key == "volts":
            volts = _volts(value)
        else:
            raise MeterError(f"--columns has no key {key!r}; keys are {', '.join(UNITS)}, unit, time_unit and volts")
    return Choice(names=names, unit=unit, time_unit=time_unit, volts=volts)


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
        columns[quantity] = _chosen(header, quantity, name)
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


def _chosen(header: Sequence[str], quantity: str, name: str) -> Column:
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
