"""Writes the tables of commands and options in docs/commands.md, from the code: `.venv/bin/python scripts/setup/option_tables.py`."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import click

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
MODULES = {
    "edge-export": "edge_export.cli.command",
    "edge-run": "edge_runtime.cli.run",
    "edge-bench": "edge_bench.cli.main",
    "edge-devices": "edge_devices.cli",
}
MARK = "<!-- From here on: scripts/setup/option_tables.py, from the code. -->"


def page(text: str) -> str:
    """Returns the page with everything behind its mark made anew."""
    head, mark, _ = text.partition(MARK)
    return head + mark + "".join(f"\n\n## {name}\n\n{chr(10).join(tables(name))}" for name in MODULES) + "\n"


def tables(name: str) -> list[str]:
    """Returns a table of a command's sub-commands, and one with a row for each option: its spelling, who takes it, its help."""
    commands = import_module(MODULES[name]).main.commands
    lines = ["| command | what for |", "|:--|:--|"]
    lines += [f"| `{name} {each}` | {_cell(command.get_short_help_str(200))} |" for each, command in commands.items()]
    options: dict[str, tuple[click.Option, list[str]]] = {}
    for each, command in commands.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                options.setdefault(parameter.name or "", (parameter, []))[1].append(each)
    lines += ["", "| option | of | what for |", "|:--|:--|:--|"]
    for option, takers in options.values():
        spelling = ", ".join(f"`{text}`" for text in (*option.opts, *option.secondary_opts))
        lines.append(f"| {spelling} | {', '.join(takers)} | {_cell(option.help or '')} |")
    return lines


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


@click.command()
def main() -> None:
    """Write the tables of commands and options in docs/commands.md anew."""
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
