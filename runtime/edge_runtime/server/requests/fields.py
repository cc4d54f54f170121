"""Typed access to the fields of a JSON object; errors name the field."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edge_runtime.server.errors import ApiError, invalid

_NAMES = {bool: "true or false", int: "an integer", str: "a string", list: "a list", dict: "an object"}


class Fields:
    """A JSON object at the path `where` of a request. A null field counts as absent. All readers raise ApiError (400)."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def place(self, name: str) -> str:
        """Returns the path of a field from the top of the request."""
        return f"{self._where}.{name}" if self._where else name

    def only(self, known: Collection[str]) -> None:
        """Refuses names that are not `known`; the error suggests the nearest known one."""
        for name in self._values:
            if name not in known:
                near = difflib.get_close_matches(name[:64], known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "leave it out"
                raise invalid(f"{self.place(name[:64])!r} is not supported; {hint}", self.place(name[:64]), code="unknown_parameter")

    def refuse(self, name: str, *harmless: object, why: str = "leave it out") -> None:
        """Refuses a known field that is not supported, unless its value is one of the `harmless` ones, which change nothing."""
        if name in self._values and not any(type(self._values[name]) is type(value) and self._values[name] == value for value in harmless):
            raise self.wrong(name, f"is not supported; {why}", code="unsupported_parameter")

    def text(self, name: str, default: str | None = None) -> str | None:
        value: str | None = self._typed(name, str, default)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value: bool = self._typed(name, bool, default)
        return value

    def integer(self, name: str, lowest: int, highest: int, default: int | None = None) -> int | None:
        """Returns an integer from `lowest` to `highest`."""
        value: int | None = self._typed(name, int, default)
        if value is not None and name in self._values and not lowest <= value <= highest:
            raise self.wrong(name, f"is {_shown(value)}; it must be {lowest} to {highest}")
        return value

    def number(self, name: str, lowest: float, highest: float, default: float) -> float:
        """Returns a number from `lowest` to `highest`."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, f"is {_shown(value)}; it must be a number")
        if not lowest <= value <= highest:
            raise self.wrong(name, f"is {_shown(value)}; it must be {lowest:g} to {highest:g}")
        return float(value)

    def items(self, name: str, limit: int) -> Sequence[Any]:
        """Returns a list of at most `limit` items; empty if absent."""
        value: list[Any] = self._typed(name, list, [])
        if len(value) > limit:
            raise self.wrong(name, f"has {len(value)} items; at most {limit} are allowed")
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value: dict[str, Any] | None = self._typed(name, dict, None)
        return value

    def inner(self, name: str) -> Fields:
        """Returns the fields of an object; none if absent."""
        return Fields(self.object(name) or {}, self.place(name))

    def objects(self, name: str, limit: int) -> list[Fields]:
        """Returns the fields of each object of a list of at most `limit`."""
        return [fields_of(item, self.place(f"{name}[{i}]")) for i, item in enumerate(self.items(name, limit))]

    def choice(self, name: str, allowed: Collection[str], default: str = "", *, code: str | None = None) -> str:
        """Returns one of the allowed strings."""
        value = self.text(name, default)
        if value not in allowed:
            raise self.wrong(name, f"is {str(self.get(name))[:40]!r}; it must be one of {', '.join(allowed)}", code=code)
        return str(value)

    def get(self, name: str) -> Any:
        """Returns a value of any type; None if absent."""
        return self._values.get(name)

    def wrong(self, name: str, message: str, *, code: str | None = None) -> ApiError:
        """Returns the error about a field, for the caller to raise."""
        return invalid(f"{self.place(name)} {message}", self.place(name), code=code)

    def _typed(self, name: str, kind: type, default: Any) -> Any:
        value = self._values.get(name, default)
        if name in self._values and type(value) is not kind:
            raise self.wrong(name, f"is {_shown(value)}; it must be {_NAMES[kind]}")
        return value


def fields_of(value: object, where: str) -> Fields:
    """Returns the fields of a value that must be an object."""
    if not isinstance(value, dict):
        raise invalid(f"{where} is {_shown(value)}; it must be an object", where)
    return Fields(value, where)


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of more than 40 digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
