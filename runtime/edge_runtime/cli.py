"""`edge-run`: generates text from a bundle. The text goes to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edge_runtime.comparison import compare, comparison_table
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.lossless import check_lossless
from edge_runtime.session import Generation, Session, open_session

EXAMPLES = """
\b
Examples:
  edge-run my-bundle "def fibonacci(n):"
  edge-run my-bundle --draft-length 0 "plain decoding, no drafts"
  edge-run my-bundle --verify-lossless --max-tokens 200 "class Stack:"
  edge-run my-bundle --compare "import os"
  echo "from standard input" | edge-run my-bundle -
"""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What one invocation asks for."""

    prompt: str
    max_tokens: int
    draft_length: int | None
    as_json: bool
    verify_lossless: bool


def note(text: str) -> None:
    """Says something to the person, not to the pipe."""
    click.echo(text, err=True)


def run_once(session: Session, options: RunOptions) -> None:
    """Streams one generation and says how it went."""
    generation = session.generate(options.prompt, max_tokens=options.max_tokens, draft_length=options.draft_length)
    pieces = []
    for piece in generation:
        pieces.append(piece)
        if not options.as_json:
            click.echo(piece, nl=False)
    lossless = check_lossless(session, generation) if options.verify_lossless else None
    if options.as_json:
        record: dict[str, Any] = {"prompt": options.prompt, "text": "".join(pieces), "stats": generation.stats.to_json()}
        if lossless:
            record["lossless"] = lossless.to_json()
        click.echo(json.dumps(record, ensure_ascii=False))
        return
    click.echo()
    note(summary(generation))
    if lossless:
        note(lossless.sentence())


def summary(generation: Generation) -> str:
    """One line of figures."""
    stats = generation.stats
    parts = [f"{stats.tokens} tokens", f"{stats.tokens_per_second:.1f} tok/s", f"{stats.tokens_per_round:.2f} tokens per round"]
    if stats.acceptance_rate is not None:
        by_position = " ".join(f"{share:.0%}" for share in stats.acceptance_by_position)
        parts.append(f"{stats.acceptance_rate:.1%} of drafts accepted (by position {by_position})")
    parts.append(f"first token after {stats.first_token_seconds * 1000:.0f} ms")
    return ", ".join(parts)


def run_comparison(session: Session, options: RunOptions, repeats: int) -> None:
    """Runs plainly and with drafts in turn, streams the first of each, and ends in a table."""
    comparison = compare(
        session, options.prompt, max_tokens=options.max_tokens, draft_length=options.draft_length, repeats=repeats,
        show=(lambda _: None) if options.as_json else (lambda text: click.echo(text, nl=False, err=True)),
    )  # fmt: skip
    if options.as_json:
        click.echo(json.dumps(comparison.to_json(), ensure_ascii=False))
        return
    from rich.console import Console

    Console().print(comparison_table(comparison))


@click.command(epilog=EXAMPLES, context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--draft-length", type=click.IntRange(0, 12), help="Tokens to draft per round; 0 is plain decoding.  [default: the bundle's]")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, help="Most tokens to generate; drafts never count.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all this process may use]")
@click.option("--context", type=click.IntRange(min=16), help="Tokens the KV cache holds.  [default: the bundle's]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--verify-lossless", is_flag=True, help="Rerun plainly; report equality or the first divergence with its logit gap.")
@click.option("--compare", "comparing", is_flag=True, help="Run with and without drafts and show a table.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="With --compare: runs of each; medians are shown.")
@click.option("--check/--no-check", "check_hashes", default=True, help="Check the files' sha256 before use.")
@click.version_option(package_name="edge-mtp")
def main(
    bundle: Path, prompt: str, draft_length: int | None, max_tokens: int, threads: int | None, context: int | None, as_json: bool,
    verify_lossless: bool, comparing: bool, repeats: int, check_hashes: bool,
) -> None:  # fmt: skip
    """Generate text from BUNDLE after PROMPT ('-' reads standard input), with drafts from the bundle's MTP drafter."""
    if comparing and verify_lossless:
        raise click.UsageError("--compare and --verify-lossless are two different runs; give one of them")
    text = sys.stdin.read() if prompt == "-" else prompt
    options = RunOptions(prompt=text, max_tokens=max_tokens, draft_length=draft_length, as_json=as_json, verify_lossless=verify_lossless)
    try:
        with open_session(bundle, threads=threads, context=context, check_hashes=check_hashes, notify=note) as session:
            if comparing:
                run_comparison(session, options, repeats)
            else:
                run_once(session, options)
    except EdgeRuntimeError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        note("stopped")
        sys.exit(130)
