"""Tables and a progress bar at the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from edge_bench.report.figures import Figures
from edge_bench.report.tables import TextTable, all_tables, machine_line, notes
from edge_bench.report.verdict import verdict
from edge_devices.errors import printable
from edge_devices.waiting import Report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

# Interval between progress lines where there is no terminal, for example on a device.
LINE_SECONDS = 5.0


def note(text: str) -> None:
    """Prints a message to standard error."""
    click.echo(printable(text), err=True)


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


class BenchProgress:
    """Implements `benchmark.Progress` with a bar on standard error; where that is no terminal, with a line every few seconds."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        # One refresh per second: the drawing thread shares the processors with the measurement.
        self._bars = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), refresh_per_second=1)
        self._task: TaskID | None = None
        self._title, self._done, self._total, self._last_line = "", 0, 0, 0.0

    def begin(self, title: str, total: int) -> None:
        """Starts a bar; the previous one is full."""
        self._task = self._bars.add_task(title, total=total)
        self._title, self._done, self._total = title, 0, total

    def advance(self) -> None:
        """Advances the bar."""
        self._done += 1
        if self._task is not None:
            self._bars.advance(self._task)
        if not self._bars.console.is_terminal and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._last_line = time.monotonic()
            note(f"{self._title}: {self._done} of {self._total}")

    @contextmanager
    def wait(self, title: str) -> Iterator[Report]:
        """Shows a wait as a bar of percent among the others while it lasts; nothing without a terminal."""
        task = self._bars.add_task(title, total=None)

        def report(share: float, step: str = "") -> None:
            self._bars.update(task, total=100, completed=round(100 * share), description=f"{title}: {step}" if step else title)

        try:
            yield report
        finally:
            self._bars.remove_task(task)

    def message(self, text: str) -> None:
        """Prints a message above the bars."""
        self._bars.console.print(printable(text), markup=False, emoji=False, highlight=False)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bars.stop()
