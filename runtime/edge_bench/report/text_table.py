"""Text tables of figures, for the terminal, pages and model cards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from edge_devices.errors import markdown_text, printable

if TYPE_CHECKING:
    from rich.table import Table

NONE = "-"
Item = TypeVar("Item")
# Heading of each column, and its cell for an item.
Columns = Sequence[tuple[str, Callable[[Item], str]]]


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A text table; the first column names the row. `note` explains how to read it."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def table_of(name: str, title: str, items: Iterable[Item], columns: Columns[Item], note: str = "") -> TextTable:
    """Returns a table with a row for each item."""
    rows = tuple(tuple(cell(item) for _, cell in columns) for item in items)
    return TextTable(name=name, title=title, columns=tuple(heading for heading, _ in columns), rows=rows, note=note)


def grid(name: str, title: str, cells: Mapping[tuple[str, str], str], note: str = "") -> TextTable:
    """Returns a table of cells by row and column, in the order in which their names come first."""
    columns = tuple(dict.fromkeys(column for _, column in cells))
    rows = tuple((row, *(cells.get((row, column), NONE) for column in columns)) for row in dict.fromkeys(row for row, _ in cells))
    return TextTable(name=name, title=title, columns=("", *columns), rows=rows, note=note)


def markdown_lines(table: TextTable) -> list[str]:
    """Returns the lines of a table in Markdown, with its title and note."""
    rows = [table.columns, [":--", *["--:"] * (len(table.columns) - 1)], *table.rows]
    lines = ["", f"### {markdown_text(table.title)}", "", *(f"| {' | '.join(map(markdown_text, row))} |" for row in rows)]
    return [*lines, "", markdown_text(table.note)] if table.note else lines


def print_tables(tables: Sequence[TextTable], *, head: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
    """Prints lines, tables and notes; in a terminal wide tables are wrapped, in a pipe they are not."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False, highlight=False)
    for line in filter(None, head):
        console.print(printable(line))
    for table in tables:
        console.print(_rich(table))
        if table.note:
            console.print(printable(table.note))
        console.print()
    for text in notes:
        console.print(printable(f"note: {text}"), soft_wrap=True)  # a command among them is to be copied


def _rich(table: TextTable) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(printable(table.title), style="bold"), title_justify="left")
    for number, column in enumerate(table.columns):
        drawn.add_column(Text(printable(column)), justify="right" if number else "left")
    for row in table.rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    return drawn
