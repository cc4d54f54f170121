"""Shows waits of seconds to minutes: what is being done, how far it is, and how long it will still take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable


class Report(Protocol):
    """Shows the progress of a wait."""

    def __call__(self, share: float, step: str = "", /) -> None:
        """`share` is the share of the wait that is over, from 0 to 1. `step` says what is being done now, if that changes."""


def no_report(_: float, __: str = "") -> None:
    """A report that shows nothing."""


# A function that is called with the title of a wait. The with block is the wait. Until the first report, its length is unknown.
Waiting = Callable[[str], AbstractContextManager[Report]]


@contextmanager
def silent_wait(_: str) -> Iterator[Report]:
    """A wait that shows nothing."""
    yield no_report


@contextmanager
def terminal_wait(title: str) -> Iterator[Report]:
    """Shows a bar with elapsed and remaining time on standard error, and removes it at the end. Without a terminal, it shows nothing."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield no_report
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    # There are few refreshes, because the drawing thread shares the processors with what is measured.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bars:
        task = bars.add_task(title, total=None)

        def report(share: float, step: str = "") -> None:
            bars.update(task, total=1.0, completed=share, description=f"{title}: {step}" if step else title)

        yield report


@runtime_checkable
class Progress(Protocol):
    """Shows work in steps, some of which count bytes."""

    def step(self, title: str, total_bytes: int | None) -> None:
        """Begins a step. `total_bytes` is an estimate, or None if the step does not count bytes."""

    def advance(self, done_bytes: int) -> None:
        """Reports that `done_bytes` more bytes of the step are done."""

    def note(self, sentence: str) -> None:
        """Shows a message to the user."""


class ProgressLines:
    """A `Progress` that calls a function with a line for each step and each message."""

    def __init__(self, write: Callable[[str], None] = lambda _: None) -> None:
        self._write = write

    def step(self, title: str, total_bytes: int | None) -> None:
        self._write(f"{title} (about {total_bytes / 1e6:.0f} MB)" if total_bytes else title)

    def advance(self, done_bytes: int) -> None:
        pass

    def note(self, sentence: str) -> None:
        self._write(sentence)
