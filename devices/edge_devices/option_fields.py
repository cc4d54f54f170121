"""Declares options once, as fields of a dataclass. Commands, their help and the tables of the documentation are made from these.

A dataclass of the library can declare options without importing click. `command_line.takes` turns them into options of a command.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

OPTION = "option"


class Declaration(NamedTuple):
    """The arguments of `declaration`."""

    flags: tuple[str, ...]
    attributes: dict[str, Any]


def declaration(*flags: str, **attributes: Any) -> dict[str, Any]:
    """Returns the metadata of a field that is an option. The field's type is the type of the option's values.

    `flags` are a short spelling, or a long one if it is not the field's name. `low` and `high` are bounds of a number, `choices` are all
    allowed values, and `panel` is the part of the help that lists the option. Further attributes are arguments of `click.Option`, such as
    `metavar`, or `type` to replace the field's type.
    """
    return {OPTION: Declaration(flags, attributes)}


def option(*flags: str, default: Any = None, **attributes: Any) -> Any:
    """Returns a dataclass field that is also an option. A bool is a flag, a Literal a choice, and a tuple or Sequence is repeatable."""
    return dataclasses.field(default=default, metadata=declaration(*flags, **attributes))


def spelling(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Returns the flags of a field that is an option: the declared ones, and before them --name unless one of them is long."""
    flags: tuple[str, ...] = field.metadata[OPTION].flags
    return flags if any(flag.startswith("--") for flag in flags) else (f"--{field.name.replace('_', '-')}", *flags)
