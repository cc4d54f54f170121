"""Parses JSON from clients: objects only, with limits on their values and depth, and only finite numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from edge_runtime.server.errors import ApiError, invalid

Json = dict[str, Any]

# Limits memory and time: Python needs up to 230 bytes for a list or an object of 3 bytes, and seconds to create millions of them.
# Large requests stay far below: 2048 messages with parts and calls have 30,000 values, and 128 tools with schemas of 200 values 25,600.
MAX_VALUES = 1 << 17
MAX_DEPTH = 64
# Characters, or bytes, that one call of C code processes. A call on all of a large body would hold the interpreter lock for tens of
# milliseconds, and for hundreds if the system preempts the thread meanwhile.
PIECE = 1 << 18


def parse_object(text: str, what: str, param: str | None = None, *, values: int) -> dict[str, Any]:
    """Parses a JSON object of at most `values` values; `what` names it in errors. Raises ApiError for other text, or beyond a limit."""
    _check_values(text, what, param, values)
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise _too_deep(what, param) from error
    except ValueError as error:
        raise invalid(f"{what} is not JSON ({error}); send an object", param, code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid(f"{what} is a JSON {type(value).__name__}; send an object", param, code="invalid_json")
    _check_depth(value, what, param)
    return value


def count_values(text: str) -> int:
    """Returns the number of commas, lists and objects of a JSON text, without those in strings: about its number of values."""
    return sum(map(_separators, _outside_strings(text)))


def values_of(waiting: list[Any]) -> Iterator[Any]:
    """Yields all values and field names in `waiting`, at any depth. Empties `waiting`."""
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, Mapping):
            waiting += (*value.keys(), *value.values())
        elif isinstance(value, list | tuple):
            waiting += value


def _outside_strings(text: str) -> Iterator[str]:
    """Yields the parts of a JSON text that are outside strings."""
    start, inside = 0, 0
    while start < len(text):
        piece = text[start : start + PIECE]
        if (len(piece) - len(piece.rstrip("\\"))) % 2:  # it ends in an escape, so the escaped character belongs to it
            piece = text[start : start + PIECE + 1]
        parts = piece.replace("\\\\", "").replace('\\"', "").split('"')
        yield from parts[inside::2]
        start, inside = start + len(piece), (inside + len(parts) - 1) % 2


def _separators(text: str) -> int:
    if len(text) <= PIECE:
        return text.count(",") + text.count("[") + text.count("{")
    return sum(text.count(mark, start, start + PIECE) for start in range(0, len(text), PIECE) for mark in ",[{")


def _check_values(text: str, what: str, param: str | None, values: int) -> None:
    """Checks the number of values before the text is parsed. Counts exactly only if a cheap upper bound exceeds the limit."""
    if _separators(text) <= values:
        return
    strings = (text.count('"') - text.count('\\"')) // 2  # a lower bound
    if strings > 2 * values or count_values(text) > values:
        raise invalid(f"{what} has more than {values} JSON values; send fewer", param)


def _check_depth(value: object, what: str, param: str | None) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner for outer in level if isinstance(outer, dict | list) for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise _too_deep(what, param)


def _too_deep(what: str, param: str | None) -> ApiError:
    return invalid(f"{what} is nested more than {MAX_DEPTH} levels deep; reduce the nesting", param)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:20]} is beyond the range of a 64-bit float")
    return value
