"""Options declared once, as fields of a dataclass: commands, their help and the tables of the documentation follow from them.

A dataclass of the library declares options without click; `command_line.takes` makes options of a command of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPTION = "option"


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a field says about its option; the type of its values is the field's.

    `flags` are a short spelling, or a long one that is not the field's name. `low` and `high` bound a number, `choices` are all values.
    `attributes` are further arguments of `click.Option`, such as `metavar`, `show_default`, or a `type` in place of the field's.
    """

    flags: tuple[str, ...]
    help: str
    panel: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def spelling(self, name: str) -> tuple[str, ...]:
        """Returns the flags of the field `name`: those declared, after --name unless one of them is long."""
        return self.flags if any(flag.startswith("--") for flag in self.flags) else (f"--{name.replace('_', '-')}", *self.flags)


def declaration(*flags: str, **declared: Any) -> dict[str, Any]:
    """Returns the metadata of a field that is an option; the arguments are those of `Declaration`, whose `attributes` are given by name."""
    own = {each.name for each in dataclasses.fields(Declaration)} & declared.keys()
    attributes = {name: value for name, value in declared.items() if name not in own}
    return {OPTION: Declaration(flags=flags, attributes=attributes, **{name: declared[name] for name in own})}


def option(*flags: str, default: Any = None, **declared: Any) -> Any:
    """Returns the field of a dataclass that is an option too. A bool is a flag, a Literal a choice, a tuple or Sequence repeatable."""
    return dataclasses.field(default=default, metadata=declaration(*flags, **declared))
