"""The sub-commands of `edge-run`: which options each takes, and what `edge-run --help` shows beside them."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from edge_devices.command_line import CommandWithModes
from edge_runtime.cli.doctor.screen import doctor_command
from edge_runtime.cli.options import BundlePath

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
_GENERATE = """
\b
Examples:
  edge-run generate my-bundle "class Stack:" --verify-lossless
  edge-run generate my-bundle --temperature 0.7 --top-p 0.95 --seed 1 --stop "class" "def area(r):"
  edge-run generate my-bundle --json-schema '{"type": "array", "items": {"type": "integer"}}' "primes = "
  edge-run generate my-bundle --image photo.jpg "What is this?"
  edge-run generate my-bundle --explain "what was drafted, and why"
  edge-run generate my-bundle --kv-type q8_0 --memory-limit 2GB "half the KV cache"
  edge-run generate my-bundle --max-tokens 1 --save-state notes.kv "a long text"
  edge-run generate my-bundle --load-state notes.kv "a long text, and what comes after it"
  echo "from standard input" | edge-run generate my-bundle -
  edge-run generate my-bundle -- "-1 + 2 ="
"""
_OPENING = ("drafter", "threads", "backend", "execution_provider", "keep_packed", "context", "config", "preset")
_FILES = ("check", "verify_key", "kv_type", "memory_limit")
_MEMORY = ("draft_store", "draft_store_size", "remember", "forget")
_DRAFTS = ("draft_length", "policy", "objective", "slowdown", "phase_power")
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_window",
    "logit_bias",
    "seed",
    "acceptance",
    "json_schema",
    "grammar",
    "regex",
    "stop",
    "chunk_size",
)
_LOG = ("log", "warn_rejection", "meter")


class FirstWord(BundlePath):
    """The first word of edge-run: a bundle, or a sub-command that the shell offers too."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Returns sub-commands and bundles; folders if there are neither."""
        found = super().shell_complete(ctx, param, incomplete)
        names = ctx.command.completed_modes(incomplete) if isinstance(ctx.command, CommandWithModes) else []
        return [CompletionItem(name) for name in names] + [one for one in found if not names or one.type == "plain"]


def add_modes(main: CommandWithModes) -> None:
    """Adds the sub-commands of edge-run."""
    bundle = click.Argument(["bundle"], type=BundlePath())
    prompt = click.Argument(["prompt"])
    main.add_mode(
        "chat",
        "Chat with BUNDLE in the terminal. A pipe is one message.",
        [
            bundle,
            "max_tokens",
            "as_json",
            "system",
            "thinking",
            "overflow",
            "lines",
            "no_history",
            "image_rows",
            *_DRAFTS,
            *_MEMORY,
            *_OPENING,
            *_SAMPLING,
            *_FILES,
            *_LOG,
        ],
    )
    main.add_mode(
        "generate",
        "Generate text after PROMPT ('-' reads standard input). Before a PROMPT that begins with a dash, write --.",
        [
            bundle,
            prompt,
            *("max_tokens", "as_json", "verify_lossless", "explain", "system", "thinking", "raw", "images", "sounds", "image_rows"),
            *(*_DRAFTS, *_MEMORY),
            *_OPENING,
            *_SAMPLING,
            *(*_FILES, "load_state", "save_state"),
            *_LOG,
        ],
        epilog=_GENERATE,
    )
    main.add_mode(
        "serve",
        "Serve the OpenAI and Ollama APIs and a chat page over HTTP.",
        [
            bundle,
            *("host", "port", "sessions", "deterministic", "waiting", "api_key", "allow_origin", "allow_host", "image_rows"),
            *(*_DRAFTS, *_MEMORY),
            *_OPENING,
            *_FILES,
            *_LOG,
        ],
        serve=True,
    )
    main.add_mode(
        "compare",
        "Run PROMPT with and without drafts in turn and print a table.",
        [bundle, prompt, "max_tokens", "repeats", "as_json", "system", "thinking", "raw", *_DRAFTS, *_OPENING, *_FILES, "meter"],
        comparing=True,
    )
    main.add_mode(
        "demo",
        "Stream several kinds of text with accepted drafts in colour, beside plain decoding.",
        [bundle, "max_tokens", "repeats", "as_json", "policy", *_OPENING, *_FILES, "meter"],
        demo=True,
    )
    main.add_mode(
        "plan",
        "Predict memory, speed, best draft length and joules per token, here or on a device.",
        [
            bundle,
            click.Argument(["prompt"], required=False),
            *("profile", "measure", "as_json", "phase_power", *_OPENING, *_FILES),
        ],
        plan=True,
    )
    main.modes["doctor"] = doctor_command
