"""What all commands share: groups of options, and the way an error ends a command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, TypeVar

import click

from edge_devices.errors import OUT_OF_MEMORY, EdgeError

Command = TypeVar("Command", bound=Callable[..., Any])
Group = TypeVar("Group")
INTERRUPTED = 130


def option_group(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Returns a decorator that adds click options to a command, in the order given."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def take(values: dict[str, Any], group: type[Group]) -> Group:
    """Removes the options of `group`, a dataclass with a field per option, from a command's `values` and returns them."""
    return group(**{field.name: values.pop(field.name) for field in fields(group)})  # type: ignore[arg-type]


@contextlib.contextmanager
def one_sentence_errors(*, out_of_memory: str = OUT_OF_MEMORY, stopped: str = "stopped") -> Iterator[None]:
    """Ends the command with one sentence and exit code 1 on an EdgeError or MemoryError, with `stopped` and exit code 130 on Ctrl-C.

    A context manager, and a decorator: as such it stands below a command's options.
    """
    try:
        yield
    except EdgeError as error:
        raise click.ClickException(str(error)) from error
    except MemoryError as error:
        raise click.ClickException(out_of_memory) from error
    except KeyboardInterrupt:
        click.echo(stopped, err=True)
        raise SystemExit(INTERRUPTED) from None
