"""Reads the fields of a JSON object with their types, and says which one is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edge_runtime.server.errors import ApiError, invalid

_NAMES = {bool: "true or false", int: "a whole number", str: "a string", list: "a list", dict: "an object"}


class Fields:
    """A JSON object at the place `where` in a request. null counts as left out. All readers raise ApiError (400)."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def place(self, name: str) -> str:
        """Returns the path of a field from the top of the request."""
        return f"{self._where}.{name}" if self._where else name

    def only(self, known: Collection[str]) -> None:
        """Refuses names that are not `known`, and names the nearest known one."""
        for name in self._values:
            if name not in known:
                near = difflib.get_close_matches(name[:64], known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "leave it out"
                raise invalid(f"{self.place(name[:64])!r} is not supported; {hint}", self.place(name[:64]), code="unknown_parameter")

    def refuse(self, name: str, *harmless: object, why: str = "leave it out") -> None:
        """Refuses a field that is known but cannot be honoured, unless its value asks for nothing."""
        if name in self._values and not any(type(self._values[name]) is type(one) and self._values[name] == one for one in harmless):
            raise self.wrong(name, f"is not supported; {why}", code="unsupported_parameter")

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string."""
        value: str | None = self._typed(name, str, default)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        found: bool = self._typed(name, bool, default)
        return found

    def whole(self, name: str, least: int, most: int, default: int | None = None) -> int | None:
        """A whole number from `least` to `most`."""
        value: int | None = self._typed(name, int, default)
        if value is not None and name in self._values and not least <= value <= most:
            raise self.wrong(name, f"is {_shown(value)}; it must be {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float, default: float) -> float:
        """A number from `least` to `most`."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, f"is {_shown(value)}; it must be a number")
        if not least <= value <= most:
            raise self.wrong(name, f"is {_shown(value)}; it must be {least:g} to {most:g}")
        return float(value)

    def items(self, name: str, most: int) -> Sequence[Any]:
        """A list of at most `most` items; empty when left out."""
        value: list[Any] = self._typed(name, list, [])
        if len(value) > most:
            raise self.wrong(name, f"has {len(value)} items; at most {most} are allowed")
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        """An object."""
        value: dict[str, Any] | None = self._typed(name, dict, None)
        return value

    def get(self, name: str) -> Any:
        """A value of any type; None when left out."""
        return self._values.get(name)

    def wrong(self, name: str, says: str, *, code: str | None = None) -> ApiError:
        """The error about a field, for the caller to raise."""
        return invalid(f"{self.place(name)} {says}", self.place(name), code=code)

    def _typed(self, name: str, kind: type, default: Any) -> Any:
        value = self._values.get(name, default)
        if name in self._values and type(value) is not kind:
            raise self.wrong(name, f"is {_shown(value)}; it must be {_NAMES[kind]}")
        return value


def fields_of(value: object, where: str) -> Fields:
    """Returns the fields of what must be an object."""
    if not isinstance(value, dict):
        raise invalid(f"{where} is {_shown(value)}; it must be an object", where)
    return Fields(value, where)


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of more than 40 digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
