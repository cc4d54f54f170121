"""`edge-run`: generates text from a bundle. The text goes to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edge_runtime.backends.choice import BACKENDS, BackendKind
from edge_runtime.comparison import compare, comparison_table
from edge_runtime.drafters import DRAFTER_KINDS, DrafterKind
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.generation import GREEDY_PARAMS, GenerationOptions
from edge_runtime.lossless import check_lossless
from edge_runtime.policies import POLICIES, draft_length_policy
from edge_runtime.sampling_options import request_options, sampling_options
from edge_runtime.session import Generation, Session, open_session

EXAMPLES = """
\b
Examples:
  edge-run my-bundle "def fibonacci(n):"
  edge-run my-bundle --draft-length 0 "plain decoding, no drafts"
  edge-run my-bundle --verify-lossless --max-tokens 200 "class Stack:"
  edge-run my-bundle --compare "import os"
  edge-run my-bundle --temperature 0.7 --top-p 0.95 --seed 1 --stop "class" "def area(r):"
  edge-run my-bundle --drafter lookup "drafts copied from the text itself"
  edge-run my-bundle --backend onnx "the same through onnxruntime"
  echo "from standard input" | edge-run my-bundle -
"""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What one invocation asks for."""

    prompt: str
    max_tokens: int
    draft_length: int | None
    policy: str
    as_json: bool
    verify_lossless: bool
    request: Mapping[str, Any]


def note(text: str) -> None:
    """Says something to the person, not to the pipe."""
    click.echo(text, err=True)


def run_once(session: Session, options: RunOptions) -> None:
    """Streams one generation and says how it went."""
    policy = draft_length_policy(options.policy, session.draft_length_for(options.draft_length))
    generation = session.generate(options.prompt, max_tokens=options.max_tokens, policy=policy, **options.request)
    pieces = []
    for piece in generation:
        pieces.append(piece)
        if not options.as_json:
            click.echo(piece, nl=False)
    lossless = check_lossless(session, generation) if options.verify_lossless else None
    if options.as_json:
        record: dict[str, Any] = {
            "prompt": options.prompt, "text": "".join(pieces), "drafter": session.drafter_kind, "stats": generation.stats.to_json(),
        }  # fmt: skip
        if lossless:
            record["lossless"] = lossless.to_json()
        click.echo(json.dumps(record, ensure_ascii=False))
        return
    click.echo()
    note(summary(generation, session.drafter_kind))
    if lossless:
        note(lossless.sentence())


def summary(generation: Generation, drafter: DrafterKind) -> str:
    """One line of figures; `drafter` is named where it drafted."""
    stats = generation.stats
    parts = [f"{stats.tokens} tokens", f"{stats.tokens_per_second:.1f} tok/s", f"{stats.tokens_per_round:.2f} tokens per round"]
    if stats.acceptance_rate is not None:
        by_position = " ".join(f"{share:.0%}" for share in stats.acceptance_by_position)
        parts.append(f"{stats.acceptance_rate:.1%} of {drafter} drafts accepted (by position {by_position})")
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


def check_combination(request: Mapping[str, Any], policy: str, draft_length: int | None, *, comparing: bool, verify_lossless: bool) -> None:
    """Raises a usage error for options that contradict each other."""
    if comparing and verify_lossless:
        raise click.UsageError("--compare and --verify-lossless are two different runs; give one of them")
    if comparing and (policy != "fixed" or request["sampling"] != GREEDY_PARAMS or request["stop"]):
        raise click.UsageError("--compare is greedy, with a fixed draft length and no stop strings; leave those options out")
    if policy == "stepped" and draft_length is not None:
        raise click.UsageError("--policy stepped has its own draft lengths; leave --draft-length out")
    if verify_lossless and not GenerationOptions(sampling=request["sampling"], acceptance=request["acceptance"]).repeatable:
        raise click.UsageError("--verify-lossless needs temperature 0, or --acceptance match with a --seed: other runs differ by chance")


@click.command(epilog=EXAMPLES, context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt")
@click.option("--draft-length", type=click.IntRange(0, 12), help="Tokens to draft per round; 0 is plain decoding.  [default: the bundle's]")
@click.option("--policy", type=click.Choice(POLICIES), default="fixed", help="How the draft length follows the acceptance.")
@click.option(
    "--drafter", type=click.Choice(DRAFTER_KINDS),
    help="dense: llama.cpp's; split: with the sparse head; lookup: copies from the text.  [default: the faster of dense and split]",
)  # fmt: skip
@click.option("--backend", type=click.Choice(BACKENDS), help="llama.cpp or onnxruntime.  [default: what the bundle has and is installed]")
@click.option("--execution-provider", metavar="NAME", help="onnx: where the graphs run, e.g. cpu, openvino.  [default: cpu]")
@click.option("--uniform-rows", is_flag=True, help="onnx: the same kernels for one row as for several, so that drafts never change a bit.")
@click.option(
    "--keep-packed", is_flag=True, help="onnx: keep weights packed for this CPU on disk, twice their size: opens faster, maps memory."
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, help="Most tokens to generate; drafts never count.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: all this process may use]")
@click.option("--context", type=click.IntRange(min=16), help="Tokens the KV cache holds.  [default: the bundle's]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--verify-lossless", is_flag=True, help="Rerun plainly; report equality or the first divergence with its logit gap.")
@click.option("--compare", "comparing", is_flag=True, help="Run with and without drafts and show a table.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="With --compare: runs of each; medians are shown.")
@click.option("--check/--no-check", "check_hashes", default=True, help="Check the files' sha256 before use.")
@sampling_options
@click.version_option(package_name="edge-mtp")
def main(
    bundle: Path, prompt: str, draft_length: int | None, policy: str, drafter: DrafterKind | None, max_tokens: int, threads: int | None,
    context: int | None, as_json: bool, verify_lossless: bool, comparing: bool, repeats: int, check_hashes: bool,
    backend: BackendKind | None, execution_provider: str | None, uniform_rows: bool, keep_packed: bool, **sampling: Any,
) -> None:  # fmt: skip
    """Generate text from BUNDLE after PROMPT ('-' reads standard input), with drafts from the bundle's MTP drafter."""
    try:
        request = request_options(sampling)
        check_combination(request, policy, draft_length, comparing=comparing, verify_lossless=verify_lossless)
        options = RunOptions(
            prompt=sys.stdin.read() if prompt == "-" else prompt, max_tokens=max_tokens, draft_length=draft_length, policy=policy,
            as_json=as_json, verify_lossless=verify_lossless, request=request,
        )  # fmt: skip
        with open_session(
            bundle, threads=threads, context=context, drafter=drafter, backend=backend, execution_provider=execution_provider,
            uniform_rows=uniform_rows, keep_packed=keep_packed, check_hashes=check_hashes, notify=note,
        ) as session:  # fmt: skip
            if comparing:
                run_comparison(session, options, repeats)
            else:
                run_once(session, options)
    except EdgeRuntimeError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        note("stopped")
        sys.exit(130)
