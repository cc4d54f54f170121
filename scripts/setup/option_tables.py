"""Hook of mkdocs: puts tables of the commands' options, made from the code, where a page says `<!-- options: edge-run -->`.

`<!-- frequent options: edge-run -->` has those with a short form alone.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import click

MODULES = {"edge-run": "edge_runtime.cli.run", "edge-bench": "edge_bench.cli.main", "edge-export": "edge_export.cli.command"}
_MARK = re.compile(r"<!-- (frequent )?options: ([\w-]+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns the page with its tables."""
    return _MARK.sub(lambda mark: "\n".join(option_table(mark[2], frequent=bool(mark[1]))), markdown)


def option_table(name: str, *, frequent: bool = False) -> list[str]:
    """Returns a table with a row for each option of a command: its spelling, the sub-commands that take it, its help.

    `frequent`: of the options with a short form alone.
    """
    command = import_module(MODULES[name]).main
    commands = command.commands
    parameters = {each.name: each for command in commands.values() for each in command.params}
    lines = ["| option | of | what for |", "|:--|:--|:--|"]
    for parameter in parameters.values():
        takers = [taker for taker, taking in commands.items() if any(other.name == parameter.name for other in taking.params)]
        short = any(len(text) == 2 for text in parameter.opts)
        if isinstance(parameter, click.Option) and (short or not frequent):
            spelling = ", ".join(f"`{text}`" for text in (*parameter.opts, *parameter.secondary_opts))
            lines.append(f"| {spelling} | {', '.join(takers)} | {_cell(parameter.help or '')} |")
    return lines


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
