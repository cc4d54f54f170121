"""Tables and a progress bar at the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from edge_runtime.bench.report.figures import Figures
from edge_runtime.bench.report.tables import TextTable, all_tables, machine_line, notes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

# Between two lines of progress: whoever follows a run from afar sees the last one.
LINE_SECONDS = 5.0


def note(text: str) -> None:
    """Says something to the person, not to the pipe."""
    click.echo(text, err=True)


def print_report(figures: Figures) -> None:
    """Prints all tables; those wider than the terminal are wrapped there, and whole in a pipe."""
    console = _console()
    console.print(machine_line(figures.records.header))
    _print_tables(console, all_tables(figures))
    for text in notes(figures):
        console.print(f"note: {text}")


def print_tables(tables: Sequence[TextTable]) -> None:
    """Prints tables alone."""
    _print_tables(_console(), tables)


def _console() -> Console:
    import sys

    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, markup=False, emoji=False, highlight=False)


def _print_tables(console: Console, tables: Sequence[TextTable]) -> None:
    for table in tables:
        console.print(_rich(table))
        if table.note:
            console.print(table.note)
        console.print()


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
    """Implements `benchmark.Progress` with a bar on standard error; where that is no terminal, with a line now and then."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        # A few refreshes a second at most: the thread that draws shares the processors with what is measured.
        self._bars = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), refresh_per_second=1)
        self._task: TaskID | None = None
        self._title, self._done, self._total, self._told = "", 0, 0, 0.0

    def begin(self, title: str, total: int) -> None:
        """Starts a bar; the one before it is full."""
        self._task = self._bars.add_task(title, total=total)
        self._title, self._done, self._total = title, 0, total

    def advance(self) -> None:
        """Moves the bar."""
        self._done += 1
        if self._task is not None:
            self._bars.advance(self._task)
        if not self._bars.console.is_terminal and time.monotonic() - self._told >= LINE_SECONDS:
            self._told = time.monotonic()
            note(f"{self._title}: {self._done} of {self._total}")

    def say(self, sentence: str) -> None:
        """Prints a sentence above the bars."""
        self._bars.console.print(sentence, markup=False, emoji=False, highlight=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()
