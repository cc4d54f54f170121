"""What a value of the configuration must look like. A check raises ConfigError with the place, the value and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from edge_runtime.errors import ConfigError

Check = Callable[[str, Any], None]
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]{0,3})", re.ASCII)
_MAX_TEXT = 4096


def shown(value: Any) -> str:
    """Returns a value as a message quotes it, never more than 40 characters of it."""
    # A whole number of thousands of digits cannot even be printed.
    if type(value) is int and abs(value) >= 10**39:
        return "a number of 40 digits or more"
    return {None: "null", True: "true", False: "false"}[value] if value is None or type(value) is bool else repr(value)[:40]


def flag(place: str, value: Any) -> None:
    """true or false."""
    if type(value) is not bool:
        raise ConfigError(f"{place} is {shown(value)}; write true or false")


def always_true(reason: str) -> Check:
    """true, and nothing else: `reason` is why not."""

    def check(place: str, value: Any) -> None:
        flag(place, value)
        if not value:
            raise ConfigError(f"{place} is false, which cannot be honoured: {reason}; write true or leave it out")

    return check


def whole(low: int, high: int) -> Check:
    """A whole number from `low` to `high`."""

    def check(place: str, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(f"{place} is {shown(value)}; write a whole number from {low} to {high}")

    return check


def number(low: float, high: float) -> Check:
    """A number from `low` to `high`."""

    def check(place: str, value: Any) -> None:
        if type(value) not in (int, float) or not low <= value <= high:
            raise ConfigError(f"{place} is {shown(value)}; write a number from {low:g} to {high:g}")

    return check


def one_of(*choices: str) -> Check:
    """One of some words."""

    def check(place: str, value: Any) -> None:
        if type(value) is not str or value not in choices:
            raise ConfigError(f"{place} is {shown(value)}; " + ("choose one of " if choices[1:] else "write ") + ", ".join(choices))

    return check


def text(place: str, value: Any) -> None:
    """A text that is not empty."""
    if type(value) is not str or not 0 < len(value) <= _MAX_TEXT:
        raise ConfigError(f"{place} is {shown(value)}; write a text of 1 to {_MAX_TEXT} characters (in quotes if it looks like a number)")


def size(place: str, value: Any) -> None:
    """A number of bytes above 0, or a text such as 2GB."""
    found = _SIZE.fullmatch(value) if type(value) is str else None
    if type(value) is int and 0 < value < 1 << 63:
        return
    if found is None or found[2].upper() not in _UNITS or not 0 < bytes_of(value) < 1 << 63:
        raise ConfigError(f'{place} is {shown(value)}; write a number of bytes above 0, or a text such as "2GB" or "1.5 GiB"')


def bytes_of(value: int | str) -> int:
    """Returns the bytes that a value which passed `size` means: GB are powers of 1000, GiB of 1024."""
    if isinstance(value, int):
        return value
    found = _SIZE.fullmatch(value)
    assert found is not None, "a checked size"
    return int(float(found[1]) * _UNITS[found[2].upper()])
