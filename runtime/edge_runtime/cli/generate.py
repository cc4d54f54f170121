"""`edge-run generate`: generates text after one PROMPT. The text goes to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import PanelCommand, takes
from edge_devices.energy.live import RunEnergy
from edge_devices.meters.search import NO_METER
from edge_devices.option_fields import option
from edge_devices.waiting import terminal_wait
from edge_runtime.cli.options import (
    BundlePath,
    Opening,
    TextLimits,
    energy_record,
    note,
    opens_bundle,
    refuse_greedy_filters,
    sampling_of,
    takes_sampling,
)
from edge_runtime.cli.prompts import MediaFiles, MessageOptions, hub_bundle, printable, read_prompt, sent_prompt
from edge_runtime.cli.terminal import NOTHING_DRAFTED, Explain, remarks, summary
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.session.chat import MAX_TOKENS
from edge_runtime.session.generation import Generation, GenerationOptions
from edge_runtime.session.self_checks import LosslessReport, check_lossless
from edge_runtime.session.session import Session

RUN_TOKENS = 128
EXAMPLES = """
\b
Examples:
  edge-run generate my-bundle "class Stack:" --verify-lossless
  edge-run generate my-bundle --temperature 0.7 --top-p 0.95 --seed 1 --stop "class" "def area(r):"
  edge-run generate my-bundle --json-schema '{"type": "array", "items": {"type": "integer"}}' "primes = "
  edge-run generate my-bundle --image photo.jpg "What is this?"
  edge-run generate my-bundle --explain "what was drafted, and why"
  edge-run generate my-bundle --kv-type q8_0 --memory-limit 2GB "half the KV cache"
  echo "from standard input" | edge-run generate my-bundle -
  edge-run generate my-bundle -- "-1 + 2 ="
"""
PROVISIONAL = "computed from the bundle's sizes, then learned from steps; edge-run tune measures them"


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is generated and printed."""

    max_tokens: int | None = option(
        "-n",
        low=1,
        panel="Output",
        help=f"Maximum number of tokens to generate.  [default: {RUN_TOKENS}; {MAX_TOKENS} for an answer through the chat template]",
    )
    as_json: bool = option("--json", default=False, panel="Output", help="Print one JSON object instead of text.")
    verify_lossless: bool = option(
        default=False, panel="Output", help="Run again without drafts; report whether the output is equal, else the first difference."
    )
    explain: bool = option(
        default=False,
        panel="Output",
        help="Print one line per step: decision, expected and actual tokens, cost, time, gain and confidence. The text follows them.",
    )


USUAL = (
    *("max_tokens", "system", "images", "temperature", "top_p", "seed"),
    *("stop", "json_schema", "draft_length", "backend", "context", "as_json"),
)


@click.command(cls=PanelCommand, epilog=EXAMPLES, usual=USUAL)
@click.argument("bundle", type=BundlePath())
@click.argument("prompt")
@takes("output", OutputOptions)
@takes("message", MessageOptions)
@takes("files", MediaFiles)
@takes_sampling
@takes("limits", TextLimits)
@opens_bundle("image_rows", prompt_cache=True)
def generate(
    bundle: Path,
    prompt: str,
    output: OutputOptions,
    message: MessageOptions,
    files: MediaFiles,
    sampling: SamplingParams,
    limits: TextLimits,
    opening: Opening,
) -> None:
    """Generate text after PROMPT ('-' reads standard input). Before a PROMPT that begins with a dash, write --."""
    refuse_greedy_filters(sampling)
    if output.verify_lossless and not GenerationOptions(sampling=sampling).repeatable:
        raise click.UsageError("--verify-lossless needs temperature 0 or a --seed; other runs differ by chance")
    constraint, text = limits.constraint(), read_prompt(prompt)
    if not (text or files.images or files.sounds):
        raise click.UsageError("PROMPT is empty; give a text, or - for standard input")
    with opening.session(hub_bundle(bundle)) as session:
        if not output.verify_lossless:
            sampling = sampling_of(sampling, session.bundle)
        media = files.read(session, opening.load.image_rows)
        sent = sent_prompt(session, text, message, media=media)
        generation = session.generate(
            sent.sent,
            max_tokens=output.max_tokens or (RUN_TOKENS if sent.template is None else MAX_TOKENS),
            draft_length=opening.draft_length,
            # Standard kernels compute rows with other last bits in pieces of other lengths.
            reuse_prefix=session.row_kernels is not None,
            on_round=explain_round(session, opening) if output.explain else None,
            sampling=sampling,
            constraint=sent.constraint(session, constraint),
            stop=tuple(limits.stop),
        )
        pieces = []
        shown = printable if sys.stdout is not None and sys.stdout.isatty() else str
        with opening.energy.watch() as watch:
            for piece in sent.text(session, generation, limits.stop):
                pieces.append(piece)
                if not output.as_json and not output.explain:
                    click.echo(shown(piece), nl=False)
        energy = watch.energy(generation.stats.tokens)
        session.record(generation)
        if not output.as_json:
            click.echo(shown("".join(pieces)) if output.explain else "")
        lossless = check_again(session, generation) if output.verify_lossless else None
        if output.as_json:
            record = {"prompt": text, "text": "".join(pieces), "templated": sent.template is not None}
            click.echo(json.dumps(record | figures(session, generation, energy, lossless), ensure_ascii=False))
        else:
            print_figures(session, generation, energy, lossless)


def explain_round(session: Session, opening: Opening) -> Explain:
    """Returns the callback of --explain."""
    profit = session.profit() if opening.draft_length is None else None
    if session.costs_are_provisional:
        note(f"costs are provisional: {PROVISIONAL}")
    return Explain(lambda: profit.last if profit else None, session.settings.objective, note)


def check_again(session: Session, generation: Generation) -> LosslessReport:
    """Runs the same request without drafts and compares the tokens. This takes as long again."""
    with terminal_wait("the same again without drafts"):
        return check_lossless(session, generation)


def figures(session: Session, generation: Generation, energy: RunEnergy, lossless: LosslessReport | None) -> dict[str, Any]:
    """Returns the figures of a finished generation as plain values under stable keys."""
    record: dict[str, Any] = {
        "backend": session.backend,
        "row_kernels": session.row_kernels,
        "device": session.device,
        "drafter": session.drafter_kind,
        "costs": {None: None, True: "provisional", False: "measured"}[session.costs_are_provisional],
        "stats": generation.stats.to_json(),
        "finish_reason": generation.finish_reason,
        **energy_record(energy),
    }
    if generation.options.constraint:
        record["whole"] = generation.complete
    if lossless:
        record["lossless"] = lossless.to_json() | {"drafted_tokens": generation.stats.drafted}
    record["rows"] = session.row_equality(waiting=terminal_wait).to_json()
    return record


def print_figures(session: Session, generation: Generation, energy: RunEnergy, lossless: LosslessReport | None) -> None:
    """Prints remarks, then the figures, on standard error."""
    for sentence in remarks(generation):
        note(sentence)
    note(summary(generation.stats, session.drafter_kind))
    if energy.facts is not None or energy.reason != NO_METER:  # a machine without a meter is not mentioned each time
        note(": ".join(energy.row()))
    if not generation.complete:
        note("the text ended before the grammar was complete; raise --max-tokens, or leave --stop out")
    if lossless:
        note(lossless.sentence() if generation.stats.drafted else f"{lossless.sentence()}; {NOTHING_DRAFTED}")
        note(session.row_equality(waiting=terminal_wait).sentence())
