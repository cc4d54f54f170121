"""`edge-run`: generates text from a bundle; each command is a file beside this one."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from edge_devices.command_line import PanelGroup
from edge_runtime.cli.chat import chat
from edge_runtime.cli.compare import compare
from edge_runtime.cli.demo import demo
from edge_runtime.cli.doctor import doctor
from edge_runtime.cli.generate import generate
from edge_runtime.cli.options import matching_bundles
from edge_runtime.cli.plan import plan
from edge_runtime.cli.serve import serve
from edge_runtime.cli.tune import tune
from edge_runtime.errors import OUT_OF_MEMORY

EXAMPLES = """
\b
Examples:
  edge-run doctor                          what works here, what is missing
  edge-run chat my-bundle
  edge-run generate my-bundle "def fibonacci(n):" --max-tokens 64
  edge-run compare my-bundle "import os"   with and without drafts
  edge-run serve my-bundle --sessions 4    OpenAI API and chat page
  edge-run plan my-bundle --profile raspberry-pi-5
  edge-run generate my-bundle -- "-1 + 2"  -- before a text that begins with a dash
"""


class BundleFirst(PanelGroup):
    """A group in which a bundle's path may stand in place of a command: alone for a chat, before PROMPT to generate."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command that the first words mean. Raises a usage error for a word that is neither a command nor a folder."""
        if args[0] in self.commands or not (Path(args[0]).exists() or "/" in args[0] or ctx.resilient_parsing):
            return super().resolve_command(ctx, args)
        try:
            values, _, _ = generate.make_parser(click.Context(generate)).parse_args(list(args))
        except click.UsageError:
            values = {}  # as of an option of a chat
        name = "generate" if isinstance(values.get("prompt"), str) else "chat"
        return name, self.commands[name], args

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns commands and bundles; folders if there are neither."""
        return [*super().shell_complete(ctx, incomplete), *matching_bundles(incomplete)] or [CompletionItem(incomplete, type="dir")]


@click.group(cls=BundleFirst, epilog=EXAMPLES, out_of_memory=OUT_OF_MEMORY)
@click.version_option(package_name="edge-mtp")
def main() -> None:
    """Run a bundle with its drafter: a chat, one prompt, or a server.

    `edge-run BUNDLE` is short for `edge-run chat BUNDLE`, `edge-run BUNDLE PROMPT` for `edge-run generate BUNDLE PROMPT`.
    """


for command in (chat, generate, serve, compare, demo, tune, plan, doctor):
    main.add_command(command)
