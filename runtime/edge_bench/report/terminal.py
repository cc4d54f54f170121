"""Tables at the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_bench.report.figures import Figures
from edge_bench.report.tables import TextTable, all_tables, machine_line, notes
from edge_bench.report.verdict import verdict
from edge_devices.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_report(figures: Figures) -> None:
    """Prints all tables; in a terminal wide ones are wrapped, in a pipe they are not."""
    console = _console()
    console.print(printable(machine_line(figures.records.header)))
    if sentence := verdict(figures):
        console.print(printable(sentence))
    _print_tables(console, all_tables(figures))
    for text in notes(figures):
        console.print(printable(f"note: {text}"))


def print_tables(tables: Sequence[TextTable]) -> None:
    """Prints tables without remarks."""
    _print_tables(_console(), tables)


def _console() -> Console:
    import sys

    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False, highlight=False)


def _print_tables(console: Console, tables: Sequence[TextTable]) -> None:
    for table in tables:
        console.print(_rich(table))
        if table.note:
            console.print(printable(table.note))
        console.print()


def _rich(table: TextTable) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(printable(table.title), style="bold"), title_justify="left")
    for number, column in enumerate(table.columns):
        drawn.add_column(Text(printable(column)), justify="right" if number else "left")
    for row in table.rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    return drawn
