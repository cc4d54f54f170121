"""`optimum-cli export edge`: our command inside Optimum's. The only module that imports optimum.

Optimum's command line loads every module of this namespace and registers what REGISTER_COMMANDS lists.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping

import click
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand

from edge_export.cli.command import main
from edge_export.cli.export import pair


class EdgeExportCommand(BaseOptimumCLICommand):  # type: ignore[misc]  # optimum publishes no types
    """Takes the arguments of `edge-export pair` and calls it with them, so there is one list of options."""

    COMMAND = CommandInfo(name="edge", help="Export a Gemma 4 target and its MTP drafter as one edge-mtp bundle.")

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Declares every argument of `edge-export pair`."""
        for parameter in pair.params:
            _declare(parser, parameter)

    def run(self) -> None:
        """Runs `edge-export`; ends the process as that does."""
        words = [word for parameter in pair.params for word in _words(parameter, vars(self.args))]
        main.main(args=["pair", *words], prog_name="optimum-cli export edge")


def _declare(parser: ArgumentParser, parameter: click.Parameter) -> None:
    if isinstance(parameter, click.Argument):
        parser.add_argument(str(parameter.name), nargs="?", help=f"{parameter.metavar}: a checkpoint folder, a hub id or a GGUF")
        return
    assert isinstance(parameter, click.Option)
    if _is_flag(parameter):
        parser.add_argument(*parameter.opts, dest=parameter.name, action="store_true", help=_help(parameter))
        return
    choices = [str(choice) for choice in parameter.type.choices] if isinstance(parameter.type, click.Choice) else None
    metavar = None if choices else parameter.metavar
    parser.add_argument(
        *parameter.opts, dest=parameter.name, choices=choices, metavar=metavar, required=parameter.required, help=_help(parameter)
    )


def _words(parameter: click.Parameter, values: Mapping[str, object]) -> list[str]:
    """The words of a command line that give a parameter the value it was given here."""
    value = values.get(str(parameter.name))
    if value in (None, False):
        return []
    if isinstance(parameter, click.Argument):
        return [str(value)]
    return [parameter.opts[-1], *([] if _is_flag(parameter) else [str(value)])]


def _is_flag(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and bool(parameter.is_flag)


def _help(parameter: click.Option) -> str:
    """argparse reads % as a format."""
    return (parameter.help or "").replace("%", "%%")


REGISTER_COMMANDS = [(EdgeExportCommand, ExportCommand)]
