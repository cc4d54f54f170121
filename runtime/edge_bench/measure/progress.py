"""The progress of a benchmark on standard error: bars in a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

import click

from edge_devices.errors import printable
from edge_devices.waiting import Report
from edge_runtime.session.load_options import LoadOptions

# The interval between progress lines without a terminal, for example on a device.
LINE_SECONDS = 5.0


def note(text: str) -> None:
    """Prints a message to standard error."""
    click.echo(printable(text), err=True)


def duration(seconds: float) -> str:
    """Returns a duration in words, rounded as befits an estimate."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


class BenchScreen:
    """Bars for nested waits, with messages above them. `wait` is a `Waiting`."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
        # One refresh per second: the drawing thread shares the processors with the measurement.
        self._bars = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), refresh_per_second=1)
        self._last_line = 0.0

    @contextmanager
    def wait(self, title: str) -> Iterator[Report]:
        """Shows a wait while it lasts."""
        task, begin = self._bars.add_task(title, total=None), time.monotonic()

        def report(share: float, step: str = "") -> None:
            text = f"{title}: {step}" if step else title
            self._bars.update(task, total=100, completed=round(100 * share), description=text)
            if step and not self._bars.console.is_terminal and time.monotonic() - self._last_line >= LINE_SECONDS:
                self._last_line = time.monotonic()
                left = (time.monotonic() - begin) * (1 / share - 1) if share else 0.0
                note(f"{text}, about {duration(left)} left" if left else text)

        try:
            yield report
        finally:
            self._bars.remove_task(task)

    def shows(self, load: LoadOptions) -> LoadOptions:
        """Returns the options with messages and waits on this screen."""
        return replace(load, notify=self.message, waiting=self.wait)

    def message(self, text: str) -> None:
        """Prints a message above the bars, in one line, because the last line of a device's log is shown elsewhere."""
        self._bars.console.print(printable(text), markup=False, emoji=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()
