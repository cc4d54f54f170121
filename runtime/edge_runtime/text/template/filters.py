"""Filters and functions of chat templates, which come from outside, with limits: steps, seconds, and sizes of values and of the output.

jinja2's own sandbox keeps a template from Python's internals; it limits neither time nor memory."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from datetime import datetime
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType
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


WITHOUT_TEXT = (BuiltinMethodType, MethodType, FunctionType, MethodWrapperType, type, Iterator)


def counted(_context: Any, values: Iterable[Any]) -> Iterable[Any]:
    """Counts each item as a step. Values with a length are returned unchanged, because `loop.length` and `loop.last` need it."""
    if isinstance(values, Sized):
        BUDGET.get().step(len(values))
        return values
    return _counted(values)


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        BUDGET.get().step()
        yield value


def counting(lazy: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a lazy filter that counts the items it reads, since it may yield none of them."""

    @functools.wraps(lazy)
    def count(context: Any, values: Iterable[Any], *arguments: Any, **named: Any) -> Any:
        return lazy(context, _counted(values), *arguments, **named)

    return count


def measured_filter(_context: Any, value: Any) -> Any:
    """`measured` as a filter; the items of a lazy filter are counted one by one."""
    BUDGET.get().step()
    return _counted(value) if isinstance(value, Iterator) else measured(value)


def emitted(_context: Any, value: Any) -> str:
    """Returns the text of an output expression and counts it."""
    return BUDGET.get().emit(_text(value))


def joined(_context: Any, values: list[Any]) -> str:
    """Returns the texts of all values of `a ~ b`, joined."""
    return join(values)


def join(values: Iterable[Any], between: str = "", attribute: str | None = None) -> str:
    """jinja2's filter; the size is checked before the text is made."""
    if attribute is not None:
        values = [value.get(attribute, "") if isinstance(value, Mapping) else "" for value in values]
    texts = [_text(value) for value in measured(list(counted(None, values)))]
    return _join(str(between), texts)


def join_by(between: str, values: Iterable[Any]) -> str:
    """str.join; the size is checked before the text is made."""
    return _join(between, [_text(value) for value in measured(list(values))])


def _text(value: Any) -> str:
    """Returns the text of a value; refuses what Python would write as an address."""
    waiting = [measured(value)]
    while waiting:
        part = waiting.pop()
        if isinstance(part, WITHOUT_TEXT):
            raise LimitError(f"it writes a {type(part).__name__}, which has no text")
        if isinstance(part, list | tuple):
            waiting += part
        elif isinstance(part, dict):
            waiting += part.values()
    return str(value)


def _join(between: str, texts: list[str]) -> str:
    check_size(sum(map(len, texts)) + len(between) * len(texts))
    return between.join(texts)


def replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    """jinja2's filter and str.replace; the size is checked before the text is made."""
    content, old, new = str(measured(text)), str(old), str(new)
    check_size(len(content) + content.count(old) * len(new))
    return content.replace(old, new, -1 if count is None else count)


METHODS: dict[str, Callable[..., str]] = {"replace": replace, "join": join_by}


def indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """jinja2's filter: indents the lines after the first; the first and blank ones only on request. The size is checked first."""
    if not isinstance(width, str):
        check_size(width)
        width = " " * width
    lines = str(measured(text)).splitlines(keepends=True)
    check_size(sum(map(len, lines)) + len(width) * len(lines))
    return "".join(width + line if (i or first) and (blank or line.strip()) else line for i, line in enumerate(lines))


def tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Returns JSON without HTML escapes, with the options that transformers gives templates."""
    if not (indent is None or (isinstance(indent, int) and 0 <= indent <= 16)):
        raise LimitError(f"it indents JSON by {indent!r}")
    measured([value, list(separators or ())])
    return str(measured(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)))


def raise_exception(message: Any) -> None:
    """Raises ValueError: the template refuses the conversation."""
    raise ValueError(str(message)[:1000])


def strftime_now(pattern: str) -> str:
    """Returns the local time in this format."""
    if len(pattern) > 100:
        raise LimitError(f"it formats the time with a pattern of {len(pattern)} characters")
    return datetime.now().strftime(pattern)
