"""Checks of configuration values. A failed check raises ConfigError with the key, the value and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge_runtime.errors import ConfigError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", start=1)}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]{0,3})", re.ASCII)
_MAX_SIZE = 1 << 63
_MAX_TEXT = 4096


@dataclass(frozen=True)
class Check:
    """Accepts the values for which `is_valid` is true; `advice` ends the message about any other."""

    is_valid: Callable[[Any], bool]
    advice: str

    def __call__(self, key: str, value: Any) -> None:
        """Raises ConfigError unless the value of `key` is valid."""
        if not self.is_valid(value):
            raise ConfigError(f"{key} is {shown(value)}{self.advice}")


def integer(low: int, high: int) -> Check:
    """Accepts an integer from `low` to `high`."""
    return Check(lambda value: type(value) is int and low <= value <= high, f"; write an integer from {low} to {high}")


def number(low: float, high: float) -> Check:
    """Accepts a number from `low` to `high`."""
    return Check(lambda value: type(value) in (int, float) and low <= value <= high, f"; write a number from {low:g} to {high:g}")


def one_of(*choices: str) -> Check:
    """Accepts one of some words."""
    return Check(
        lambda value: type(value) is str and value in choices, f"; {'choose one of' if choices[1:] else 'write'} {', '.join(choices)}"
    )


def shown(value: Any) -> str:
    """Returns a value as a message quotes it, at most 40 characters of it."""
    # Python refuses to print an integer of thousands of digits.
    if type(value) is int and abs(value) >= 10**39:
        return "a number of 40 digits or more"
    return {None: "null", True: "true", False: "false"}[value] if value is None or type(value) is bool else repr(value)[:40]


def bytes_of(value: int | str) -> int:
    """Returns the bytes of a value that SIZE accepts: GB are powers of 1000, GiB of 1024."""
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value)
    assert match is not None, "a checked size"
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _is_size(value: Any) -> bool:
    if type(value) is str:
        match = _SIZE.fullmatch(value)
        return match is not None and match[2].upper() in _UNITS and 0 < bytes_of(value) < _MAX_SIZE
    return type(value) is int and 0 < value < _MAX_SIZE


FLAG = Check(lambda value: type(value) is bool, "; write true or false")
TEXT = Check(
    lambda value: type(value) is str and 0 < len(value) <= _MAX_TEXT,
    f"; write a text of 1 to {_MAX_TEXT} characters (in quotes if it looks like a number)",
)
SIZE = Check(_is_size, '; write a number of bytes above 0, or a text such as "2GB" or "1.5 GiB"')
