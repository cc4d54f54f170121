"""Limits for chat templates, which come from outside: steps, seconds, and sizes of values and of the output.

jinja2's own sandbox keeps a template from Python's internals; it limits neither time nor memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

MAX_STEPS = 1_000_000
MAX_SIZE = 4_000_000
MAX_SECONDS = 10.0


class LimitError(ValueError):
    """The template exceeds a limit."""


class Budget:
    """What is left to one rendering: steps, output characters and seconds."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._output = MAX_SIZE
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        """Counts steps; raises LimitError when no steps or no time are left."""
        self._steps -= count
        if self._steps < 0:
            raise LimitError(f"it takes more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise LimitError(f"it takes longer than {MAX_SECONDS:.0f} s")

    def emit(self, text: str) -> str:
        """Counts output, including that of macros and blocks; raises LimitError when there is too much."""
        self.step()
        self._output -= len(text)
        if self._output < 0:
            raise LimitError(f"it writes more than {MAX_SIZE} characters")
        return text


BUDGET: ContextVar[Budget] = ContextVar("budget")


@contextlib.contextmanager
def budget() -> Iterator[None]:
    """Sets a new budget for the block. Compiling needs one too, since it folds constants."""
    token = BUDGET.set(Budget())
    try:
        yield
    finally:
        BUDGET.reset(token)


def measured(value: Any) -> Any:
    """Returns `value`; raises LimitError if it holds more than MAX_SIZE characters and items, nested ones included."""
    left, waiting = MAX_SIZE, [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, int) and part.bit_length() > 64:
            raise LimitError("it computes with integers of more than 64 bits")
        left -= len(part) if isinstance(part, str) else 1
        if left < 0:
            raise LimitError(f"it makes a value of more than {MAX_SIZE} characters")
        if isinstance(part, list | tuple):
            waiting += part
        elif isinstance(part, dict):
            waiting += (*part.keys(), *part.values())
    return value


def check_size(size: int) -> None:
    """Raises LimitError for a text of more than MAX_SIZE characters."""
    if size > MAX_SIZE:
        raise LimitError(f"it makes a text of {size} characters")
