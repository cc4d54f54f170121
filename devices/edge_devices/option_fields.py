"""Options declared once, as fields of a dataclass: commands, their help and the tables of the documentation follow from them.

A dataclass of the library declares options without click; `command_line.takes` makes options of a command of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

OPTION = "option"


class Declaration(NamedTuple):
    """What `declaration` was given."""

    flags: tuple[str, ...]
    attributes: dict[str, Any]


def declaration(*flags: str, **attributes: Any) -> dict[str, Any]:
    """Returns the metadata of a field that is an option; the type of its values is the field's.

    `flags` are a short spelling, or a long one that is not the field's name. `low` and `high` bound a number, `choices` are all values,
    `panel` is the part of the help that lists it. Further attributes are arguments of `click.Option`, such as `metavar`, or a `type` in
    place of the field's.
    """
    return {OPTION: Declaration(flags, attributes)}


def option(*flags: str, default: Any = None, **attributes: Any) -> Any:
    """Returns the field of a dataclass that is an option too. A bool is a flag, a Literal a choice, a tuple or Sequence repeatable."""
    return dataclasses.field(default=default, metadata=declaration(*flags, **attributes))


def spelling(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Returns the flags of a field that is an option: those declared, after --name unless one of them is long."""
    flags: tuple[str, ...] = field.metadata[OPTION].flags
    return flags if any(flag.startswith("--") for flag in flags) else (f"--{field.name.replace('_', '-')}", *flags)
