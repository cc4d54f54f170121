"""Converts JSON to dataclasses, with checks of types, and back. Supports dataclasses, scalars, enumerations, literals, lists, dicts."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
# Seeds have up to 64 bits. Larger integers would overflow in later arithmetic.
_LARGEST = 1 << 64


class StructureError(ValueError):
    """A value does not have the type of its dataclass field. The message has the value's path."""


def to_json(value: Any) -> Any:
    """Converts dataclasses to plain JSON values, and tuples to lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, Mapping):
        return {k: to_json(v) for k, v in value.items()}
    return value


def finite_json(value: Any) -> Any:
    """As `to_json`, but with None for numbers that are not finite, because JSON has none."""
    plain = to_json(value)
    if isinstance(plain, dict):
        return {k: finite_json(v) for k, v in plain.items()}
    if isinstance(plain, list):
        return [finite_json(v) for v in plain]
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def from_json(cls: type[T], data: Any, where: str, *, exact: bool = False) -> T:
    """Builds an object of `cls` from parsed JSON.

    Unknown keys are ignored unless `exact`, because a newer minor version may add some. Missing keys are errors. Raises StructureError with
    the path of the first value that does not fit.
    """
    if not isinstance(data, dict):
        raise StructureError(f"{where} is {_kind(data)}, not an object")
    hints = _hints(typing.cast(Any, cls))
    values: dict[str, Any] = {}
    unknown = data.keys() - hints.keys()
    if exact and unknown:
        raise StructureError(f"{where} has unknown keys: {', '.join(sorted(unknown))[:80]}")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in data:
            values[field.name] = _value(hints[field.name], data[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise StructureError(f"{where}.{field.name} is missing")
    return cls(**values)


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in arguments:
            return None
        return _value(next(a for a in arguments if a is not type(None)), data, where)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type[Any], hint), data, where)
    if origin is tuple:
        if not isinstance(data, list):
            raise StructureError(f"{where} is {_kind(data)}, not a list")
        if ... not in arguments and len(data) != len(arguments):
            raise StructureError(f"{where} has {len(data)} entries, not {len(arguments)}")
        return tuple(_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin in (dict, Mapping):
        if not isinstance(data, dict):
            raise StructureError(f"{where} is {_kind(data)}, not an object")
        return {_key(arguments[0], k, where): _value(arguments[1], v, f"{where}.{k}") for k, v in data.items()}
    if origin is typing.Literal or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
        return _choice(hint, arguments or tuple(hint), data, where)
    return _scalar(hint, data, where)


def _choice(hint: Any, choices: tuple[Any, ...], data: Any, where: str) -> Any:
    if not isinstance(data, str) or data not in choices:
        raise StructureError(f"{where} is {_kind(data)}, none of {', '.join(map(str, choices))}")
    return data if typing.get_origin(hint) else hint(data)


def _key(hint: Any, key: str, where: str) -> str | int:
    """Converts a key of a dict, because keys in JSON are always strings."""
    if hint is not int:
        return key
    try:
        return int(key)
    except ValueError:
        raise StructureError(f"{where} has the key {key[:40]!r}, not a number") from None


def _scalar(hint: Any, data: Any, where: str) -> Any:
    _check_range(data, where)
    if hint is Any or isinstance(hint, TypeVar):
        return data
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if type(data) is not hint:
        raise StructureError(f"{where} is {_kind(data)}, not {hint.__name__}")
    return data


def _check_range(data: Any, where: str) -> None:
    """Raises StructureError for infinite, NaN or huge numbers, also in free-form values. No recursion, as these may nest deeply."""
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise StructureError(f"{where} is or holds {value}, not a finite number")
        elif isinstance(value, int) and abs(value) > _LARGEST:
            raise StructureError(f"{where} is or holds an integer of {value.bit_length()} bits, more than 64")


def _kind(data: Any) -> str:
    return "null" if data is None else f"{type(data).__name__} {str(data)[:40]!r}"
