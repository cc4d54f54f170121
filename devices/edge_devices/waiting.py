"""Waits of seconds to minutes: what is done, how far it is, and how long it still takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable


class Report(Protocol):
    """Shows how far a wait is."""

    def __call__(self, share: float, step: str = "", /) -> None:
        """`share` of the wait that is over, 0 to 1; `step`: what is done now, if that changes."""


def no_report(_: float, __: str = "") -> None:
    """A report that shows nothing."""


# Called with what is done; the with block is the wait. Until the first report nobody can say how long it takes.
Waiting = Callable[[str], AbstractContextManager[Report]]


@contextmanager
def silent_wait(_: str) -> Iterator[Report]:
    """Shows nothing."""
    yield no_report


@contextmanager
def terminal_wait(title: str) -> Iterator[Report]:
    """Shows a bar with the time so far and the time left on standard error, and removes it at the end. Without a terminal, nothing."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield no_report
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    # Few refreshes: the drawing thread shares the processors with what is measured.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as bars:
        task = bars.add_task(title, total=None)

        def report(share: float, step: str = "") -> None:
            bars.update(task, total=1.0, completed=share, description=f"{title}: {step}" if step else title)

        yield report


@runtime_checkable
class Progress(Protocol):
    """Shows work in steps, some of which count bytes."""

    def step(self, title: str, total_bytes: int | None) -> None:
        """A step begins; `total_bytes` is an estimate, or None for a step that counts no bytes."""

    def advance(self, done_bytes: int) -> None:
        """So many more bytes of the step are done."""

    def note(self, sentence: str) -> None:
        """A message for the user."""


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
