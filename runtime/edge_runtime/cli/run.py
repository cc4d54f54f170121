"""`edge-run`: runs bundles. Each command is a module beside this one."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from edge_devices.command_line import LazyCommands, PanelGroup
from edge_runtime.errors import OUT_OF_MEMORY

COMMANDS = LazyCommands(
    {
        "chat": ("edge_runtime.cli.chat", "Chat with BUNDLE in the terminal."),
        "generate": ("edge_runtime.cli.generate", "Generate text after PROMPT ('-' reads standard input)."),
        "serve": ("edge_runtime.cli.serve", "Serve OpenAI's, Anthropic's and Ollama's APIs and a chat page over HTTP."),
        "compare": ("edge_runtime.cli.compare", "Run PROMPT with and without drafts in turn and print a table."),
        "prove": ("edge_runtime.cli.prove", "Check on this machine that drafts change neither the text nor the logits."),
        "demo": ("edge_runtime.cli.demo", "Stream several kinds of text with accepted drafts in colour, beside plain decoding."),
        "tune": (
            "edge_runtime.cli.doctor",
            "Measure the faster backend, its threads and what drafts cost, for later starts.",
        ),
        "plan": (
            "edge_runtime.cli.plan",
            "Predict memory, first token, speed, best draft length and joules per token, here or on a device.",
        ),
        "doctor": ("edge_runtime.cli.doctor", "Show what works on this machine and what is missing."),
        "forget": ("edge_runtime.cli.forget", "Forget texts: empty the prompt cache, and remove the history of chats."),
    }
)

EXAMPLES = """
\b
Examples:
  edge-run doctor                          what works here, what is missing
  edge-run chat my-bundle
  edge-run generate my-bundle "def fibonacci(n):" --max-tokens 64
  edge-run compare my-bundle "import os"   with and without drafts
  edge-run prove my-bundle                 do drafts leave the text as it is, here?
  edge-run serve my-bundle --sessions 4    OpenAI API and chat page
  edge-run plan my-bundle --profile raspberry-pi-5
  edge-run generate my-bundle -- "-1 + 2"  -- before a text that begins with a dash
"""


# Commands that users of ollama, llama-cli or pip may type, with what to use instead.
ELSEWHERE = {
    "run": "edge-run chat BUNDLE, or edge-run generate BUNDLE PROMPT",
    "list": "a bundle is a folder wherever you put it; edge-run chat FOLDER opens it",
    "show": "edge-run plan BUNDLE, or its manifest.json",
    "pull": "edge-export pair OWNER/TARGET --output BUNDLE downloads and exports a model with its drafter",
    "rm": "a bundle is a folder; remove it, and edge-run forget removes the texts that were kept",
    "help": "edge-run --help, or edge-run COMMAND --help",
}


class BundleFirst(PanelGroup):
    """A group in which a bundle's path may stand in place of a command. Alone it begins a chat; with a PROMPT it generates."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command that the first words mean. Raises a usage error for a word that is neither a command nor a folder."""
        if args[0] in self.commands or not (Path(args[0]).exists() or "/" in args[0] or ctx.resilient_parsing):
            return super().resolve_command(ctx, args)
        generate = self.commands["generate"]
        try:
            values, _, _ = generate.make_parser(click.Context(generate)).parse_args(list(args))
        except click.UsageError:
            values = {}  # for example, an option that only chat has
        name = "generate" if isinstance(values.get("prompt"), str) else "chat"
        return name, self.commands[name], args

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns matching commands and bundles, or lets the shell complete folders if there are none."""
        from edge_runtime.cli.options import matching_bundles

        return [*super().shell_complete(ctx, incomplete), *matching_bundles(incomplete)] or [CompletionItem(incomplete, type="dir")]


@click.group(cls=BundleFirst, commands=COMMANDS, epilog=EXAMPLES, out_of_memory=OUT_OF_MEMORY, elsewhere=ELSEWHERE)
@click.version_option(package_name="edge-mtp")
def main() -> None:
    """Run a bundle with its drafter: a chat, one prompt, or a server.

    `edge-run BUNDLE` is short for `edge-run chat BUNDLE`, `edge-run BUNDLE PROMPT` for `edge-run generate BUNDLE PROMPT`.
    """
