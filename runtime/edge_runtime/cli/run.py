"""`edge-run`: generates text from a bundle. The text goes to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import one_sentence_errors
from edge_devices.machine.cpu_affinity import MOST_THREADS
from edge_runtime.backends.selection import BACKENDS, BackendKind
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.cli.bundle_path import BundlePath
from edge_runtime.cli.cache_options import CacheValues, cache_options, cache_values, remarks
from edge_runtime.cli.chat import MAX_INPUT, TerminalChat, chat_options, chat_values
from edge_runtime.cli.comparison import compare, comparison_table
from edge_runtime.cli.doctor import doctor_option
from edge_runtime.cli.energy_options import EnergyValues, energy_options, energy_record, energy_values
from edge_runtime.cli.options import check_options, check_values
from edge_runtime.cli.plan import PlanValues, plan_options, plan_values, show_plan
from edge_runtime.cli.plan_measuring import measure_plan
from edge_runtime.cli.sampling_options import request_options, sampling_options
from edge_runtime.cli.screens import Explain
from edge_runtime.cli.summary import summary
from edge_runtime.config.presets import expanded
from edge_runtime.config.schema import PRESET_NAMES, SpeculativeConfig, TuningConfig
from edge_runtime.config.settings import load_settings
from edge_runtime.config.yaml_file import read_config
from edge_runtime.drafting.acceptance_window import WARN_ABOVE
from edge_runtime.drafting.drafter_kinds import DRAFTER_KINDS, DrafterKind
from edge_runtime.drafting.phase_power import PhasePower
from edge_runtime.drafting.policies import POLICIES
from edge_runtime.errors import OUT_OF_MEMORY, RequestError
from edge_runtime.planning.device_speed import device_speed
from edge_runtime.planning.speed import manifest_plan
from edge_runtime.server.options import serve_options, serve_values
from edge_runtime.session.chat import MAX_TOKENS, Chat
from edge_runtime.session.generation import GREEDY_PARAMS, GenerationOptions
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.lossless import check_lossless
from edge_runtime.session.monitor import MonitorOptions
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

RUN_TOKENS = 128
PLAN_PROMPT = "def area(width, height):\n"
EXAMPLES = """
\b
Examples:
  edge-run --doctor                       (what works here, what is missing)
  edge-run my-bundle                      (a chat)
  edge-run my-bundle "def fibonacci(n):"
  edge-run my-bundle --draft-length 0 "plain decoding, no drafts"
  edge-run my-bundle --verify-lossless --max-tokens 200 "class Stack:"
  edge-run my-bundle --compare "import os"
  edge-run my-bundle --temperature 0.7 --top-p 0.95 --seed 1 --stop "class" "def area(r):"
  edge-run my-bundle --json-schema '{"type": "array", "items": {"type": "integer"}}' "primes = "
  edge-run my-bundle --explain "what was drafted, and why"
  edge-run my-bundle --objective energy --phase-power watts.json "fewest joules per token"
  edge-run my-bundle --plan --profile raspberry-pi-5
  edge-run my-bundle --plan --measure      (predictions beside what this machine does)
  edge-run my-bundle --drafter lookup "drafts copied from the text itself"
  edge-run my-bundle --backend onnx "the same through onnxruntime"
  edge-run my-bundle --kv-type q8_0 --memory-limit 2GB "half the KV cache"
  edge-run my-bundle --max-tokens 1 --save-state notes.kv "a long text"
  edge-run my-bundle --load-state notes.kv "a long text, and what comes after it"
  echo "from standard input" | edge-run my-bundle -
  edge-run my-bundle --serve --sessions 4     (OpenAI API and chat page at http://127.0.0.1:8080)
"""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What one invocation asks for."""

    prompt: str
    max_tokens: int
    draft_length: int | None
    as_json: bool
    verify_lossless: bool
    request: Mapping[str, Any]
    cache: CacheValues
    energy: EnergyValues


def read_prompt() -> str:
    """Returns standard input. Raises RequestError if it is closed, no text, or endless."""
    if sys.stdin is None:
        raise RequestError("standard input is closed; give the prompt as an argument")
    try:
        text = sys.stdin.read(MAX_INPUT + 1)
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not UTF-8 text ({error}); convert it") from error
    if len(text) > MAX_INPUT:
        raise RequestError(f"standard input has more than {MAX_INPUT} characters, too many for a prompt; give less")
    return text


def note(text: str) -> None:
    """Says something to the person, not to the pipe."""
    click.echo(text, err=True)


def run_once(session: Session, options: RunOptions) -> None:
    """Streams one generation and says how it went."""
    if options.cache.load:
        session.load_state(options.cache.load)
    generation = session.generate(
        options.prompt,
        max_tokens=options.max_tokens,
        draft_length=options.draft_length,
        reuse_prefix=options.cache.load is not None,
        **options.request,
    )
    pieces = []
    with options.energy.watch() as watch:
        for piece in generation:
            pieces.append(piece)
            if not options.as_json and not options.energy.explain:
                click.echo(piece, nl=False)
    energy = watch.energy(generation.stats.tokens)
    session.record(generation)
    if options.cache.save:
        session.save_state(options.cache.save)
    lossless = check_lossless(session, generation) if options.verify_lossless else None
    if options.as_json:
        record: dict[str, Any] = {
            "prompt": options.prompt,
            "text": "".join(pieces),
            "drafter": session.drafter_kind,
            "stats": generation.stats.to_json(),
            "finish_reason": generation.finish_reason,
            **energy_record(energy),
        }
        if generation.options.constraint:
            record["whole"] = generation.complete
        if lossless:
            record["lossless"] = lossless.to_json()
        click.echo(json.dumps(record, ensure_ascii=False))
        return
    click.echo("".join(pieces) if options.energy.explain else "")
    for sentence in remarks(generation, loaded=options.cache.load is not None):
        note(sentence)
    note(summary(generation.stats, session.drafter_kind))
    note(energy.sentence())
    if not generation.complete:
        note("the text ended before the grammar did; raise --max-tokens, or leave --stop out")
    if lossless:
        note(lossless.sentence())


def run_chat(session: Session, options: RunOptions, chat: Mapping[str, Any]) -> None:
    """Talks until the input ends; each answer is at most `max_tokens` long."""
    talk = Chat(session, max_tokens=options.max_tokens, draft_length=options.draft_length, **chat, **options.request)
    TerminalChat(talk, as_json=options.as_json, watch=options.energy.watch).run()


def run_comparison(session: Session, options: RunOptions, repeats: int) -> None:
    """Runs plainly and with drafts in turn, streams the first of each, and ends in a table."""
    comparison = compare(
        session,
        options.prompt,
        max_tokens=options.max_tokens,
        draft_length=options.draft_length,
        repeats=repeats,
        show=(lambda _: None) if options.as_json else (lambda text: click.echo(text, nl=False, err=True)),
    )
    if options.as_json:
        click.echo(json.dumps(comparison.to_json(), ensure_ascii=False))
        return
    from rich.console import Console

    Console().print(comparison_table(comparison))


def run_plan(folder: Path, options: RunOptions, asked: PlanValues, measuring: bool, load: LoadOptions) -> None:
    """Prints what to expect of the bundle, and what it does here if that is wanted too."""
    bundle = open_bundle(folder, check=load.check, public_key=load.public_key)
    settings = load_settings(bundle, config=load.config, preset=load.preset, context=load.context, notify=note)
    measured = None
    # Before the machine is probed, which takes memory of its own.
    if measuring:
        with open_session(folder, load) as session:
            measured = measure_plan(session, options.prompt or PLAN_PROMPT)
    power = options.energy.power
    plan = manifest_plan(
        bundle.manifest,
        device_speed(asked.profile, load.threads),
        context=settings.context,
        kv_type=load.kv_type or settings.kv_type,
        longest=min(settings.longest, settings.longest_draft),
        drafter=load.drafter or settings.drafter,
        power=power if isinstance(power, PhasePower) else None,
    )
    show_plan(plan, measured, as_json=options.as_json)


def explained(session: Session, options: RunOptions) -> RunOptions:
    """Returns the options with a listener that says a line about each round, if that was asked for."""
    if not options.energy.explain:
        return options
    profit = session.profit() if options.draft_length is None else None
    explain = Explain(lambda: profit.last if profit else None, session.settings.objective, note)
    return replace(options, request={**options.request, "on_round": explain})


def command_config(config: Path | None, policy: str | None, draft_length: int | None, objective: str | None) -> SpeculativeConfig:
    """Returns the configuration file with what the command line says of draft lengths over it."""
    said = SpeculativeConfig(tuning=TuningConfig(policy=policy, initial_horizon=draft_length, objective=objective))
    return said if config is None else said.over(expanded(read_config(config)))


def check_combination(
    request: Mapping[str, Any], policy: str | None, draft_length: int | None, *, comparing: bool, verify_lossless: bool
) -> None:
    """Raises a usage error for options that contradict each other."""
    if comparing and verify_lossless:
        raise click.UsageError("--compare and --verify-lossless are two different runs; give one of them")
    if comparing and (request["sampling"] != GREEDY_PARAMS or request["stop"] or request["constraint"]):
        raise click.UsageError("--compare is greedy, with no stop strings and no grammar; leave those options out")
    if policy in ("profit", "stepped") and draft_length is not None:
        raise click.UsageError(f"--policy {policy} has its own draft lengths; leave --draft-length out")
    if policy == "rolling" and draft_length == 0:
        raise click.UsageError("--policy rolling drafts at least 1 token; give a longer --draft-length")
    if verify_lossless and not GenerationOptions(sampling=request["sampling"], acceptance=request["acceptance"]).repeatable:
        raise click.UsageError("--verify-lossless needs temperature 0, or --acceptance match with a --seed: other runs differ by chance")


@click.command(epilog=EXAMPLES, context_settings={"show_default": True})
@click.argument("bundle", type=BundlePath())
@click.argument("prompt", required=False)
@click.option(
    "--draft-length",
    type=click.IntRange(0, 12),
    help="Tokens to draft per round; 0 is plain decoding. With --policy rolling the first length.  [default: the configuration's]",
)
@click.option("--policy", type=click.Choice(POLICIES), help="How the draft length follows the acceptance.  [default: the configuration's]")
@click.option(
    "--drafter",
    type=click.Choice(DRAFTER_KINDS),
    help="dense: llama.cpp's; split: with the sparse head; lookup: copies from the text.  [default: the configuration's, else the faster of dense and split]",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    help=f"Most tokens to generate; drafts never count.  [default: {RUN_TOKENS}, in a chat {MAX_TOKENS} per answer]",
)
@click.option("--backend", type=click.Choice(BACKENDS), help="llama.cpp or onnxruntime.  [default: what the bundle has and is installed]")
@click.option("--execution-provider", metavar="NAME", help="onnx: where the graphs run, e.g. cpu, openvino, openvino:NPU.  [default: cpu]")
@click.option(
    "--uniform-rows", is_flag=True, help="onnx: the same kernels for one row as for several, so that drafts hardly ever change a token."
)
@click.option(
    "--keep-packed", is_flag=True, help="onnx: keep weights packed for this CPU on disk, twice their size: opens faster, maps memory."
)
@click.option(
    "--threads", type=click.IntRange(1, MOST_THREADS), help="CPU threads.  [default: as many as each phase runs fastest on, measured once]"
)
@click.option("--context", type=click.IntRange(min=16), help="Tokens the KV cache holds.  [default: the configuration's]")
@click.option("--config", type=click.Path(path_type=Path), help="YAML file that goes over --preset and the bundle's own config.yaml.")
@click.option("--preset", type=click.Choice(PRESET_NAMES), help="Draft lengths for a kind of work; goes over the bundle's config.yaml.")
@click.option("--log", type=click.Path(path_type=Path), help="Append one JSON line of figures about each request to this file.")
@click.option(
    "--warn-rejection",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    multiple=True,
    default=WARN_ABOVE,
    help="Say it when more than this share of the newest drafts is rejected. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, is_eager=True, help="Print one JSON object instead of text; in a chat one per turn.")
@doctor_option
@click.option("--verify-lossless", is_flag=True, help="Rerun plainly; report equality or the first divergence with its logit gap.")
@click.option("--compare", "comparing", is_flag=True, help="Run with and without drafts and show a table.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="With --compare: runs of each; medians are shown.")
@check_options
@sampling_options
@cache_options
@chat_options
@energy_options
@click.option("--measure", is_flag=True, help="With --plan: also run the bundle here, and say how far off each prediction is.")
@plan_options
@serve_options
@click.version_option(package_name="edge-mtp")
def main(
    bundle: Path,
    prompt: str | None,
    draft_length: int | None,
    policy: str | None,
    drafter: DrafterKind | None,
    max_tokens: int | None,
    threads: int | None,
    context: int | None,
    config: Path | None,
    preset: str | None,
    log: Path | None,
    warn_rejection: tuple[float, ...],
    as_json: bool,
    verify_lossless: bool,
    comparing: bool,
    repeats: int,
    backend: BackendKind | None,
    execution_provider: str | None,
    uniform_rows: bool,
    keep_packed: bool,
    measure: bool,
    **values: Any,
) -> None:
    """Generate text from BUNDLE after PROMPT ('-' reads standard input), with drafts from the bundle's MTP drafter.

    Without PROMPT: a chat, with the bundle's chat template. It reads turns from the terminal, or one per line from a pipe.
    """
    with one_sentence_errors(out_of_memory=OUT_OF_MEMORY):
        planning = plan_values(values)
        if measure and (not planning.plan or planning.profile is not None):
            raise click.UsageError("--measure is for --plan on this machine; leave --profile out and give --plan")
        serving, trust = serve_values(values), check_values(values)
        chat = chat_values(values, chatting=prompt is None)
        cache = cache_values(values, once=prompt is not None and not comparing)
        energy = energy_values(values, note, policy=policy, draft_length=draft_length)
        request = request_options(values)
        if prompt is None and (comparing or verify_lossless):
            raise click.UsageError("--compare and --verify-lossless need a PROMPT")
        check_combination(request, policy, draft_length, comparing=comparing, verify_lossless=verify_lossless)
        if energy.explain and (prompt is None or comparing):
            raise click.UsageError("--explain is for a PROMPT that runs once, not for a chat or --compare; leave it out")
        options = RunOptions(
            prompt=read_prompt() if prompt == "-" else prompt or "",
            as_json=as_json,
            verify_lossless=verify_lossless,
            request=request,
            draft_length=None if policy == "rolling" else draft_length,
            max_tokens=max_tokens or (MAX_TOKENS if prompt is None else RUN_TOKENS),
            cache=cache,
            energy=energy,
        )
        monitoring = MonitorOptions(
            warn_above=warn_rejection, log=log, on_event=lambda event: None if comparing else note(f"\nwarning: {event.sentence}")
        )
        load = LoadOptions(
            threads=threads,
            context=context,
            drafter=drafter,
            notify=note,
            **trust,
            backend=backend,
            execution_provider=execution_provider,
            uniform_rows=uniform_rows,
            keep_packed=keep_packed,
            kv_type=cache.kv_type,
            memory_limit=cache.memory_limit,
            power=energy.power,
            config=command_config(config, policy, draft_length, energy.objective),
            preset=preset,
            monitoring=monitoring,
        )
        if planning.plan:
            run_plan(bundle, options, planning, measure, load)
            return
        if serving is not None:
            from edge_runtime.server.serve import serve

            serve(bundle, serving, load, note, energy.shared_watch())
            return
        with open_session(bundle, load) as session:
            options = explained(session, options)
            if prompt is None:
                run_chat(session, options, chat)
            elif comparing:
                run_comparison(session, options, repeats)
            else:
                run_once(session, options)
