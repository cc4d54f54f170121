"""Tables and a progress bar at the terminal."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from edge_runtime.bench.figures import Figures
from edge_runtime.bench.tables import TextTable, all_tables, machine_line, notes

if TYPE_CHECKING:
    from rich.progress import TaskID
    from rich.table import Table


def note(text: str) -> None:
    """Says something to the person, not to the pipe."""
    click.echo(text, err=True)


def print_report(figures: Figures) -> None:
    """Prints all tables; those wider than the terminal are wrapped there, and whole in a pipe."""
    import sys

    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False, highlight=False)
    console.print(machine_line(figures.records.header))
    for table in all_tables(figures):
        console.print(_rich(table))
        if table.note:
            console.print(table.note)
        console.print()
    for text in notes(figures):
        console.print(f"note: {text}")


def _rich(table: TextTable) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=Text(table.title, style="bold"), title_justify="left")
    for number, column in enumerate(table.columns):
        drawn.add_column(Text(column), justify="right" if number else "left")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


class BenchProgress:
    """Implements `benchmark.Progress` with a bar on standard error."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        # A few refreshes a second at most: the thread that draws shares the processors with what is measured.
        self._bars = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), refresh_per_second=1)
        self._task: TaskID | None = None

    def begin(self, title: str, total: int) -> None:
        """Starts a bar; the one before it is full."""
        self._task = self._bars.add_task(title, total=total)

    def advance(self) -> None:
        """Moves the bar."""
        if self._task is not None:
            self._bars.advance(self._task)

    def say(self, sentence: str) -> None:
        """Prints a sentence above the bars."""
        self._bars.console.print(sentence, markup=False, emoji=False, highlight=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()
