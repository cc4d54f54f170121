"""Whether a table is of one device: what the columns beside the time and the figure say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from edge_devices.energy.external.cells import is_number, stamp_seconds
from edge_devices.errors import MeterError

if TYPE_CHECKING:
    from edge_devices.energy.external.columns import Choice
    from edge_devices.energy.external.layout import Row, TableLayout

NAMES = re.compile(
    r"(?:device|entity|sensor|plug|host|meter|node|outlet|socket|channel|serial|gerät|steckdose|kanal)s?(?:[ _]?(?:id|name|number|nr))?"
    r"|hostname|mac|topic|name",
    re.IGNORECASE,
)
MOST_DEVICES = 20
ALTERNATING_SHARE = 0.4  # of the rows at which a text changes: it tells apart what the rows are of
CHARGING = frozenset(("charging", "lädt", "laden"))


class _Values:
    """The values of one column: those seen, in order, and how often one follows another."""

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
    """Follows the columns of names and texts, and takes the rows of the chosen device."""

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
        """Returns whether a row counts: without a chosen device each does. Follows its texts."""
        cells = [(index, row[index]) for index in self._columns if index < len(row) and row[index]]
        if self._device and not any(cell.lower() == self._device for _, cell in cells):
            self._skipped.update((cell, None) for _, cell in cells[:MOST_DEVICES] if len(self._skipped) < MOST_DEVICES)
            return False
        for index, cell in cells:
            self._columns[index].add(cell)
        return True

    def check(self, *, went_back: bool) -> None:
        """Raises MeterError for a table of several devices, or of a battery that charges. `went_back`: the times begin again somewhere."""
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
        """Raises MeterError where the chosen device has no row."""
        if self._device and not rows:
            raise MeterError(
                f"no row is of the device {self._device!r}; the table has {', '.join(self._skipped) or 'no column of devices'}"
            )


def _is_text(cells: list[str]) -> bool:
    return any(cell and not is_number(cell) and stamp_seconds(cell) is None for cell in cells)
