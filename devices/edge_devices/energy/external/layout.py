"""Finds the columns to use from the first rows of a meter's table, and checks and cleans the readings of all rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from statistics import fmean, median, pstdev

from edge_devices.energy.external.columns import (
    CLOCK,
    COARSE,
    UNITS,
    Choice,
    Column,
    Times,
    candidates,
    is_number,
    listed,
    meaning,
    named_column,
    readings_of,
    simple,
    stamp_seconds,
)
from edge_devices.errors import MeterError

PREAMBLE = 200  # the layout is found from this number of first rows
UNIT_COLUMNS = frozenset(("unit", "units", "einheit", "unit_of_measurement"))
Row = tuple[int, list[str]]  # the line's number in the file, and its cells


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """How to read the rows of a table: the column of times, and the columns whose product, times `volts`, is the figure.

    `first` is the number of rows before the figures. `unit_column` is the column with each row's unit, if there is one.
    """

    header: list[str]
    first: int
    time: Column
    factors: tuple[Column, ...]
    counter: bool
    volts: float = 1.0
    unit_column: int | None = None

    @property
    def what(self) -> str:
        """The columns of the figure, in words."""
        names = " × ".join(
            f"{column.name!r}" + ("" if column.unit or meaning(column.name).unit else " (no unit named)") for column in self.factors
        )
        return f"column{'s' * (len(self.factors) > 1)} {names}" + (f" × {self.volts:g} V" if self.volts != 1.0 else "")


def layout_of(head: Sequence[Row], choice: Choice) -> TableLayout:
    """Returns how to read the table that begins with these rows. Raises MeterError if columns are unknown or ambiguous."""
    rows = [row for _, row in head]
    at = _header_at(rows, choice)
    if at is None:
        return _without_header(rows, choice)
    header, first = rows[at], at + 1
    words = [cell.lower() for cell in header]
    if {"state", "last_changed"} <= set(words):
        choice = _home_assistant(header, rows[first:], choice)
    while first < len(rows) and not any(rows[first]):
        first += 1
    if first < len(rows) and _is_units(rows[first]):
        header = _with_units(header, rows[first])
        first += 1
    factors, counter, volts = _figure(header, choice)
    time = _time(header, rows[first:], choice)
    unit = next((index for index, word in enumerate(words) if word in UNIT_COLUMNS), None)
    layout = TableLayout(header=header, first=first, time=time, factors=factors, counter=counter, volts=volts, unit_column=unit)
    _check_mains(layout, rows[first:], choice)
    return layout


def is_header(row: Sequence[str]) -> bool:
    """Returns whether a row names columns for a time and a figure."""
    found = candidates(row)
    return "time" in found and len(found) > 1


def _header_at(rows: Sequence[Sequence[str]], choice: Choice) -> int | None:
    """Returns the index of the header, which is the last row before the figures that names what is needed; None if there is none."""
    names = {simple(name) for name in choice.names.values() if not name.isdecimal()}
    at = None
    for number, row in enumerate(rows):
        if _is_figures(row) or (at is not None and any(_is_time(row, index) for index in _time_places(rows[at]))):
            break
        if names and names <= {simple(cell) for cell in row}:
            return number
        if {"state", "last_changed"} <= {cell.lower() for cell in row} or (is_header(row) and (at is None or not _is_units(row))):
            at = number
    return at


def _time_places(header: Sequence[str]) -> list[int]:
    return [column.index for column in candidates(header).get("time", [])]


def _is_time(row: Sequence[str], index: int) -> bool:
    return index < len(row) and (is_number(row[index]) or stamp_seconds(row[index]) is not None)


def _is_figures(row: Sequence[str]) -> bool:
    """Returns whether a row holds only figures: a time and at least one number."""
    numbers = [is_number(cell) for cell in row]
    return len(row) > 1 and all(n or stamp_seconds(cell) is not None for n, cell in zip(numbers, row, strict=True)) and any(numbers[1:])


def _is_units(row: Sequence[str]) -> bool:
    """Returns whether a row below the header holds units: it has no digits, and at least one unit."""
    bare = [simple(cell).strip("()[]{} ") for cell in row]
    return not any(any(map(str.isdigit, cell)) for cell in row) and any(cell in units for cell in bare for units in UNITS.values())


def _with_units(header: Sequence[str], units: Sequence[str]) -> list[str]:
    bare = [unit.strip("()[]{} ") for unit in units]
    return [
        f"{name} [{unit}]" if unit and not meaning(name).unit else name
        for name, unit in zip(header, (*bare, *[""] * len(header)), strict=False)
    ]


def _time(header: Sequence[str], rows: Sequence[Sequence[str]], choice: Choice) -> Column:
    """Returns the column of times. Of several, it takes the one with most different cells, such as a clock beside dates."""
    if "time" in choice.names:
        return named_column(header, "time", choice.names["time"], choice.time_unit)
    best: tuple[int, Column] | None = None
    for column in candidates(header).get("time", []):
        times = [cell for row in rows if column.index < len(row) and Times(column).parse(cell := row[column.index]) is not None]
        enough = len(times) >= (1 - MAX_MISSING_SHARE) * len(rows) / 2
        if enough and (best is None or len(set(times)) > best[0]):
            best = len(set(times)), column
    if best is None:
        found = candidates(header).get("time", [])
        if not found:
            raise MeterError(_UNKNOWN.format(names=listed(header)))
        best = 0, found[0]
    return best[1].in_unit(choice.time_unit) if choice.time_unit else best[1]


_UNKNOWN = (
    "the columns {names} have no time with joules, watts, or volts and amperes; name them with"
    " --columns time=NAME,power=NAME,unit=mW (or voltage= and current=, or energy=)"
)


def _figure(header: Sequence[str], choice: Choice) -> tuple[tuple[Column, ...], bool, float]:
    """Returns the columns of the figure, whether it is a counter, and the volts by which it is multiplied. Raises MeterError."""
    found = candidates(header)
    named = {quantity: [named_column(header, quantity, name, choice.unit)] for quantity, name in choice.names.items() if quantity != "time"}
    if named:  # only named columns are used then
        found = named
    found.pop("time", None)
    if choice.unit:
        found = _of_unit(found, choice.unit)
    energy, power, voltage, current = (found.get(quantity, []) for quantity in ("energy", "power", "voltage", "current"))
    fine, coarse = ([c for c in energy if c.unit and (c.unit in COARSE) == is_coarse] for is_coarse in (False, True))
    if fine:
        return (_one(fine),), True, 1.0
    if power:
        return (_one(power),), False, 1.0
    if voltage and current:
        return (_one(voltage), _one(current)), False, 1.0
    if coarse:
        return (_one(coarse),), True, 1.0
    if energy:
        raise MeterError(f"the column {energy[0].name!r} names no unit; add it, such as --columns unit=Wh")
    if current and choice.volts:
        return (_one(current),), False, choice.volts
    if current:
        raise MeterError(
            f"the column {current[0].name!r} has amperes and no volts are in the table; give the supply's: --columns volts=5.1"
        )
    raise MeterError(_UNKNOWN.format(names=listed(header)))


def _of_unit(found: dict[str, list[Column]], unit: str) -> dict[str, list[Column]]:
    """Returns the columns that fit the unit of `--columns`, in that unit."""
    quantity = next(q for q, units in UNITS.items() if q != "time" and unit in units)
    if quantity not in found:
        raise MeterError(f"unit={unit} is a unit of {quantity}, and no column holds that; add {quantity}=NAME to --columns")
    together = ("voltage", "current") if quantity in ("voltage", "current") else (quantity,)
    return {q: [c.in_unit(unit) for c in columns] if q == quantity else columns for q, columns in found.items() if q in together}


def _one(columns: Sequence[Column]) -> Column:
    """Returns the only column. Raises MeterError if there are several."""
    if len(columns) > 1:
        key = columns[0].quantity
        names = listed([column.name for column in columns])
        raise MeterError(
            f"{len(columns)} columns may be the device's {key}: {names}; choose one: --columns {key}=NAME (or its number from 1)"
        )
    return columns[0]


def _check_mains(layout: TableLayout, rows: Sequence[Sequence[str]], choice: Choice) -> None:
    """Raises MeterError for volts and amperes of the mains, whose product is not the power, unless the user named the columns."""
    if len(layout.factors) < 2 or "voltage" in choice.names:
        return
    volts = layout.factors[0]
    values = [readings_of(row[volts.index])[0][0] for row in rows if volts.index < len(row)]
    if any(value is not None and abs(value) * volts.factor >= MAINS_VOLTS for value in values):
        raise MeterError(
            f"the columns {layout.factors[0].name!r} and {layout.factors[1].name!r} are of the mains, where volts × amperes are no watts;"
            " export the power, or name both columns with --columns"
        )


def _without_header(rows: Sequence[Sequence[str]], choice: Choice) -> TableLayout:
    """Returns the layout of a table without a header. Raises MeterError if it cannot be determined."""
    at = next((number for number, row in enumerate(rows) if _is_figures(row) or _has_chosen(row, choice)), None)
    if at is None:
        raise MeterError(_UNKNOWN.format(names=listed(rows[0]) if rows else "(none)"))
    above = rows[at - 1] if at and len(rows[at - 1]) == len(rows[at]) else None
    header = list(above or map(str, range(1, len(rows[at]) + 1)))
    if not above and not choice.names:
        choice = _guessed(rows[at:], choice)
    factors, counter, volts = _figure(header, choice)
    if "time" not in choice.names:
        raise MeterError(_UNKNOWN.format(names=listed(header)))
    time = named_column(header, "time", choice.names["time"], choice.time_unit)
    return TableLayout(header=header, first=at, time=time, factors=factors, counter=counter, volts=volts)


def _has_chosen(row: Sequence[str], choice: Choice) -> bool:
    """Returns whether a row holds a time and figures in the columns that `--columns` names by number."""
    places = {quantity: int(name) - 1 for quantity, name in choice.names.items() if name.isdecimal()}
    if len(places) < 2 or "time" not in places or len(places) < len(choice.names) or not max(places.values()) < len(row):
        return False
    return all(_is_time(row, index) if quantity == "time" else is_number(row[index]) for quantity, index in places.items())


def _guessed(rows: Sequence[Sequence[str]], choice: Choice) -> Choice:
    """Guesses the columns of a table without a header: volts and amperes after a clock time, or watts as a product of two columns."""
    width = len(rows[0])
    power = _product(rows) if width > 3 else None
    if power is not None:
        return replace(choice, names={"time": "1", "power": str(power + 1)})
    if width == 3 and CLOCK.fullmatch(rows[0][0]):  # WITRN
        return replace(choice, names={"time": "1", "voltage": "2", "current": "3"})
    raise MeterError("it has no header; say which columns are what, such as --columns time=1,current=2,voltage=3")


def _product(rows: Sequence[Sequence[str]]) -> int | None:
    """Returns the index of the column that is the product of two others in every row, as watts are of volts and amperes; else None."""
    table = [[_number(cell) for cell in row[1:]] for row in rows]
    if len(table) < 3 or any(cell is None for row in table for cell in row) or len({len(row) for row in table}) > 1:
        return None
    figures = [[cell or 0.0 for cell in row] for row in table]
    for power, a, b in permutations(range(min(8, len(figures[0]))), 3):
        if all(abs(row[a] * row[b] - row[power]) <= 0.02 * abs(row[power]) for row in figures) and any(row[power] for row in figures):
            return power + 1
    return None


def _number(cell: str) -> float | None:
    (point, comma), _ = readings_of(cell)
    return comma if "," in cell and comma is not None else point


def _home_assistant(header: Sequence[str], rows: Sequence[Sequence[str]], choice: Choice) -> Choice:
    """Returns the columns of a Home Assistant history export. The sensor's name says whether it is of power or energy."""
    words = [cell.lower() for cell in header]
    entity = words.index("entity_id") if "entity_id" in words else None
    entities = {row[entity] for row in rows if entity is not None and entity < len(row)}
    name = choice.device or next(iter(entities), "")
    if len(entities) > 1 and not choice.device:
        raise MeterError(
            f"it has {len(entities)} sensors ({', '.join(sorted(entities)[:4])}, ...); choose the power sensor: --columns device=NAME"
        )
    quantity = "energy" if "energy" in name and "power" not in name else "power"
    if quantity == "energy" and not choice.unit:
        raise MeterError(f"{name} counts energy, and its unit is not in the table; add it: --columns unit=kWh")
    return replace(choice, names={"time": "last_changed", quantity: "state"})


WATTS_ASSUMED = (0.05, 300.0)  # plausible mean power if the columns name no unit
WATTS_STATED = (0.001, 3000.0)
RESTART_SHARE = 0.1  # if a counter falls below this share of its value, it was restarted
MANY_FALLS, FALLS_SHARE = 3, 0.02  # a column that falls in more rows than both (number and share of rows) is not a counter
GLITCH_ROWS = 5  # if a counter returns to its value within this number of rows, it was misread
NOISE_SHARE = 0.01  # share of the figures' sum that may have the other sign
MAX_MISSING_SHARE = 0.25
MAINS_VOLTS = 80.0
# The share of rows that come in equal groups of one time, and by how much the means of the places in a group may differ.
SAME_TIME_SHARE, UNLIKE = 0.8, 0.1


def plausible(watts: float, *, stated: bool) -> bool:
    """Returns whether a mean power is plausible for such a device. `stated` says that the table names the unit."""
    low, high = WATTS_STATED if stated else WATTS_ASSUMED
    return low <= watts <= high


def mean_watts(times: Sequence[float], values: Sequence[float], *, counter: bool) -> float:
    """Returns the absolute mean power of a table's readings; NaN if a reading is NaN, or for a counter without a time span."""
    if not counter:
        return abs(fmean(values))
    span = abs(times[-1] - times[0])
    return abs(values[-1] - values[0]) / span if span > 0 else math.nan


def used_watts(what: str, values: Sequence[float]) -> tuple[list[float], list[str]]:
    """Returns the watts with consumption above 0, and a note if the sign was reversed. Raises MeterError if the sign alternates."""
    used, charged = sum(v for v in values if v > 0), -sum(v for v in values if v < 0)
    if min(used, charged) > NOISE_SHARE * (used + charged):
        share = min(used, charged) / (used + charged)
        raise MeterError(
            f"{what} changes its sign ({share:.0%} of it has the other one), as that of a battery which charges and feeds in turn;"
            " measure while it feeds alone, or at the device's own input"
        )
    if charged > used:
        return [-v for v in values], [f"{what} is negative throughout and was taken with the other sign"]
    return list(values), []


def without_zeros(what: str, times: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float], list[str]]:
    """Returns times and watts without exact zeros, and notes.

    A running device always takes power, so zeros between other figures are failed readings, and zeros before the first and after the last
    figure mean that the device was off. Raises MeterError if there are many in between.
    """
    kept = [i for i, value in enumerate(values) if value]
    if len(kept) == len(values) or not kept:
        return list(times), list(values), []
    zeros = kept[-1] - kept[0] + 1 - len(kept)
    if zeros > MAX_MISSING_SHARE * (zeros + len(kept)):
        raise MeterError(
            f"{what} is 0 in {zeros} of {zeros + len(kept)} rows between others: readings are missing, or the power is below what the meter"
            " shows; take another column with --columns, or a finer meter"
        )
    note = [f"{what} is 0 in {zeros} rows between others: taken as readings that failed"] if zeros else []
    return [times[i] for i in kept], [values[i] for i in kept], note


def counted_joules(
    what: str, rows: Sequence[int], times: Sequence[float], values: Sequence[float]
) -> tuple[list[int], list[float], list[str]]:
    """Returns the indices of a counter's valid readings, their joules continued over restarts, and notes.

    Raises MeterError if the counter goes back, if a step is larger than any supply can give, or if the column is not a counter.
    """
    spacing = median([b - a for a, b in pairwise(times) if b > a] or [1.0])
    kept, joules, notes = list[int](), list[float](), list[str]()
    base, at = 0.0, 0
    falls = restarts = misread = 0
    while at < len(values):
        value, last = values[at], values[kept[-1]] if kept else -math.inf
        if value < last:
            falls += 1
            back = next((j for j in range(at + 1, min(at + 1 + GLITCH_ROWS, len(values))) if values[j] >= last), None)
            if back is not None:
                misread += back - at
                at = back
                continue
            if value > RESTART_SHARE * last:
                raise MeterError(f"row {rows[at]} of {what} has less energy than the row before ({value:g} after {last:g} J)")
            base, restarts = base + last, restarts + 1
        elif kept and value - last > WATTS_STATED[1] * max(spacing, times[at] - times[kept[-1]]):
            raise MeterError(
                f"row {rows[at]} of {what} counts {value - last:.4g} J in {times[at] - times[kept[-1]]:.3g} s, more than any device takes;"
                " the counter was misread or set: cut the table there"
            )
        kept.append(at)
        joules.append(base + value)
        at += 1
    if falls > max(MANY_FALLS, FALLS_SHARE * len(values)):
        raise MeterError(f"{what} goes back {falls} times: it rather holds the energy of each row's time than a counter; export the watts")
    if restarts:
        notes.append(f"the counter began again {restarts} times and was continued")
    if misread:
        notes.append(f"{what} goes back for {misread} rows and returns: taken as readings that failed")
    return kept, joules, notes


def check_one_device(what: str, times: Sequence[float], values: Sequence[float]) -> None:
    """Raises MeterError if rows come in groups with the same time whose places have different figures, as rows of several devices do."""
    groups: list[list[float]] = []
    for at, value in enumerate(values):
        if at and times[at] == times[at - 1]:
            groups[-1].append(value)
        else:
            groups.append([value])
    size = int(median(map(len, groups)))
    alike = [group for group in groups if len(group) == size]
    if size < 2 or len(alike) < 3 or len(alike) < SAME_TIME_SHARE * len(groups):
        return
    places = list(zip(*alike, strict=True))
    means = [fmean(place) for place in places]
    scatter = max(pstdev(place) for place in places) / math.sqrt(len(alike))
    if max(means) - min(means) > max(UNLIKE * abs(fmean(means)), 4 * scatter):
        shown = ", ".join(f"{mean:.3g}" for mean in means[:4])
        raise MeterError(
            f"{size} rows have the same time each, with other figures in {what} ({shown}): they are of several devices; export one of them"
        )
