"""Typed access to the fields of a JSON object; errors name the field."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edge_runtime.server.errors import ApiError, invalid

_NAMES = {bool: "true or false", int: "an integer", str: "a string", list: "a list", dict: "an object"}


class Fields:
    """A JSON object at the path `where` of a request. A null field counts as absent. All readers raise ApiError (400).

    `remarks` are sentences for the operator about what the request has and the server leaves out; inner objects add to the same list.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "", remarks: list[str] | None = None) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._where = where
        self.remarks = [] if remarks is None else remarks

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def place(self, name: str) -> str:
        """Returns the path of a field from the top of the request."""
        return f"{self._where}.{name}" if self._where else name

    def only(self, known: Collection[str], foreign: Mapping[str, Sequence[Any] | None] | None = None) -> None:
        """Refuses names that are not `known`; the error suggests the nearest known one.

        `foreign` fields are ignored, with a remark, if their values are among the given ones (None: any), and refused otherwise.
        """
        for name, value in self._values.items():
            if name in known:
                continue
            if foreign is None or name not in foreign:
                near = difflib.get_close_matches(name[:64], known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "leave it out"
                raise invalid(f"{self.place(name[:64])!r} is not supported; {hint}", self.place(name[:64]), code="unknown_parameter")
            harmless = foreign[name]
            if harmless is not None and not _among(value, harmless):
                reason = f"is {_shown(value)}, which would change the answer and is not supported; leave it out"
                raise self.wrong(name, reason, code="unsupported_parameter")
            self.remarks.append(f"the field {self.place(name)!r} is ignored; it changes no answer of this server")

    def refuse(self, name: str, *harmless: object, why: str = "leave it out") -> None:
        """Refuses a known field that is not supported, unless its value is one of the `harmless` ones, which change nothing."""
        if name in self._values and not _among(self._values[name], harmless):
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
        return Fields(self.object(name) or {}, self.place(name), self.remarks)

    def objects(self, name: str, limit: int) -> list[Fields]:
        """Returns the fields of each object of a list of at most `limit`."""
        return [self._inner_of(item, f"{name}[{i}]") for i, item in enumerate(self.items(name, limit))]

    def parts(self, name: str, limit: int) -> list[str | Fields]:
        """Returns a list of at most `limit` texts and fields of objects."""
        items = enumerate(self.items(name, limit))
        return [item if isinstance(item, str) else self._inner_of(item, f"{name}[{i}]") for i, item in items]

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

    def _inner_of(self, value: Any, name: str) -> Fields:
        if not isinstance(value, dict):
            raise self.wrong(name, f"is {_shown(value)}; it must be an object")
        return Fields(value, self.place(name), self.remarks)

    def _typed(self, name: str, kind: type, default: Any) -> Any:
        value = self._values.get(name, default)
        if name in self._values and type(value) is not kind:
            raise self.wrong(name, f"is {_shown(value)}; it must be {_NAMES[kind]}")
        return value


def _among(value: object, values: Sequence[object]) -> bool:
    """Whether a JSON value is one of these; true and false are no numbers."""
    return any(isinstance(value, bool) == isinstance(other, bool) and value == other for other in values)


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of more than 40 digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
