"""`edge-run`: generates text from a bundle. The text goes to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import CONTEXT, CommandWithModes, one_sentence_errors, take
from edge_devices.waiting import terminal_wait
from edge_runtime.bundle.bundle import Bundle, open_bundle
from edge_runtime.cli.chat import MAX_INPUT, ChatValues, TerminalChat, chat_options, chat_values
from edge_runtime.cli.comparing.comparison import NOTHING_DRAFTED, compare, comparison_table
from edge_runtime.cli.comparing.demo import TOKENS as DEMO_TOKENS
from edge_runtime.cli.comparing.demo import run_demo
from edge_runtime.cli.energy_options import EnergyValues, energy_options, energy_record, energy_values
from edge_runtime.cli.media_options import MediaValues, media_options, media_values, with_media
from edge_runtime.cli.modes import EXAMPLES, FirstWord, add_modes
from edge_runtime.cli.one_prompt import OnePrompt, media_message, read_one_prompt
from edge_runtime.cli.options import (
    RUN_TOKENS,
    BackendValues,
    CacheValues,
    CheckValues,
    DraftingValues,
    MemoryValues,
    ModeValues,
    MonitoringValues,
    backend_options,
    cache_options,
    cache_values,
    check_options,
    check_values,
    config_options,
    drafting_options,
    drafting_values,
    memory_options,
    mode_options,
    monitoring_options,
    refuse_threads,
)
from edge_runtime.cli.plan import PlanValues, measure_plan, plan_options, plan_values, show_plan
from edge_runtime.cli.sampling_options import given_values, request_values, sampling_options
from edge_runtime.cli.terminal.screens import Explain, remarks, summary
from edge_runtime.cli.terminal.typed import History, history_file
from edge_runtime.config.settings import load_settings
from edge_runtime.decoding.default_sampling import default_sampling, over_defaults, sampling_sentence
from edge_runtime.drafting.phase_power import PhasePower
from edge_runtime.errors import OUT_OF_MEMORY, RequestError
from edge_runtime.planning.device_speed import device_speed
from edge_runtime.planning.speed import manifest_plan
from edge_runtime.server.options import ServeOptions, serve_options, serve_values
from edge_runtime.session.chat import MAX_TOKENS, Chat
from edge_runtime.session.generation import GREEDY_PARAMS, Generation, GenerationOptions
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.monitoring.monitor import MonitorOptions
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session
from edge_runtime.session.trials.lossless import LosslessReport, check_lossless

PLAN_PROMPT = "def area(width, height):\n"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of one invocation. `prompt` is None in a chat; `request` are keyword arguments for `Session.generate`,
    of whose sampling the command line names what is `given`.
    """

    prompt: str | None
    mode: ModeValues
    drafting: DraftingValues
    backend: BackendValues
    check: CheckValues
    cache: CacheValues
    memory: MemoryValues
    monitoring: MonitoringValues
    chat: ChatValues
    energy: EnergyValues
    plan: PlanValues
    serve: ServeOptions | None
    media: MediaValues
    request: Mapping[str, Any]
    given: frozenset[str]

    @property
    def max_tokens(self) -> int:
        """The most tokens to generate, per answer in a chat."""
        return self.mode.max_tokens or (MAX_TOKENS if self.prompt is None else RUN_TOKENS)

    @property
    def answer_tokens(self) -> int:
        """The most tokens of an answer to a message."""
        return self.mode.max_tokens or MAX_TOKENS

    def over_bundle(self, bundle: Bundle) -> RunOptions:
        """Returns these options with the bundle's sampling where the command line says nothing, and prints what that is."""
        if self.mode.comparing or self.mode.verify_lossless or self.mode.demo:
            return self
        chosen = self.request["sampling"]
        sampling = over_defaults(chosen, self.given, default_sampling(bundle.manifest.generation, GREEDY_PARAMS))
        if sampling == chosen:
            return self
        note(f"sampling as the model's generation_config says: {sampling_sentence(sampling)} (--temperature 0 is greedy)")
        return replace(self, request={**self.request, "sampling": sampling})

    def load_options(self) -> LoadOptions:
        """Returns the options for `open_session`."""
        return LoadOptions(
            **asdict(self.backend),
            **asdict(self.memory),
            context=self.drafting.context,
            drafter=self.drafting.drafter,
            config=self.drafting.configuration(self.energy.objective, self.energy.slowdown),
            preset=self.drafting.preset,
            check=self.check.check,
            public_key=self.check.verify_key,
            kv_type=self.cache.kv_type,
            memory_limit=self.cache.memory_limit,
            power=self.energy.power,
            notify=note,
            waiting=terminal_wait,
            image_rows=int(self.media.image_rows),
            monitoring=MonitorOptions(
                warn_above=self.monitoring.warn_rejection,
                log=self.monitoring.log,
                on_event=lambda event: None if self.mode.comparing or self.mode.demo else note(f"\nwarning: {event.sentence}"),
            ),
        )


def read_options(prompt: str | None, values: dict[str, Any]) -> RunOptions:
    """Sorts a command's option values into their groups. Raises a usage error for options that contradict each other, and RequestError."""
    plan, mode = plan_values(values), take(values, ModeValues)
    if mode.measure and (not plan.plan or plan.profile is not None):
        raise click.UsageError("--measure needs --plan on this machine; add --plan and leave --profile out")
    if plan.profile is None:
        refuse_threads(values["threads"])
    serve, check = serve_values(values), check_values(values)
    chat = chat_values(values, chatting=prompt is None)
    cache = cache_values(values, once=prompt is not None and not mode.comparing)
    energy = energy_values(values, note, policy=values["policy"], draft_length=values["draft_length"])
    options = RunOptions(
        prompt=prompt,
        mode=mode,
        plan=plan,
        serve=serve,
        check=check,
        chat=chat,
        cache=cache,
        energy=energy,
        given=given_values(),
        request=request_values(values),
        media=media_values(values, once=prompt is not None and not mode.comparing and not plan.plan and serve is None),
        drafting=drafting_values(values),
        backend=take(values, BackendValues),
        memory=take(values, MemoryValues),
        monitoring=take(values, MonitoringValues),
    )
    if values:
        raise TypeError(f"options that belong to no group: {', '.join(values)}")
    check_mode(options)
    return options


def check_mode(options: RunOptions) -> None:
    """Raises a usage error for a mode that contradicts other options."""
    mode, request = options.mode, options.request
    if mode.demo and (options.prompt is not None or mode.comparing):
        raise click.UsageError("--demo has its own prompts; leave PROMPT and --compare out")
    if options.prompt is None and (mode.comparing or mode.verify_lossless):
        raise click.UsageError("--compare and --verify-lossless need a PROMPT")
    if mode.comparing and mode.verify_lossless:
        raise click.UsageError("--compare and --verify-lossless exclude each other; give one of them")
    if mode.comparing and (request["sampling"] != GREEDY_PARAMS or request["stop"] or request["constraint"]):
        raise click.UsageError("--compare is greedy, without stop strings and grammars; leave those options out")
    if mode.verify_lossless and not GenerationOptions(sampling=request["sampling"], acceptance=request["acceptance"]).repeatable:
        raise click.UsageError("--verify-lossless needs temperature 0, or --acceptance match with a --seed; other runs differ by chance")
    if options.energy.explain and (options.prompt is None or mode.comparing):
        raise click.UsageError("--explain needs a PROMPT that runs once, not a chat or --compare; leave it out")


def read_prompt() -> str:
    """Returns standard input. Raises RequestError if it is closed, not UTF-8 text, or too long."""
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
    """Prints a message to standard error."""
    click.echo(text, err=True)


def run_once(session: Session, options: RunOptions, prompt: str) -> None:
    """Streams one generation, then prints its figures."""
    cache, energy = options.cache, options.energy
    as_json, explain = options.mode.as_json, energy.explain
    if cache.load_state:
        session.load_state(cache.load_state)
    one = sent_prompt(session, options, prompt)
    generation = session.generate(
        one.sent,
        max_tokens=options.max_tokens if one.template is None else options.answer_tokens,
        draft_length=options.drafting.fixed_length,
        reuse_prefix=cache.load_state is not None,
        on_round=explain_round(session, options) if explain else None,
        **options.request,
    )
    pieces = []
    with energy.watch() as watch:
        for piece in one.text(session, generation, options.request["stop"]):
            pieces.append(piece)
            if not as_json and not explain:
                click.echo(piece, nl=False)
    run_energy = watch.energy(generation.stats.tokens)
    session.record(generation)
    if cache.save_state:
        session.save_state(cache.save_state)
    if not as_json:
        click.echo("".join(pieces) if explain else "")
    lossless = check_again(session, generation) if options.mode.verify_lossless else None
    if as_json:
        record: dict[str, Any] = {
            "prompt": prompt,
            "text": "".join(pieces),
            "templated": one.template is not None,
            "backend": session.backend,
            "row_kernels": session.row_kernels,
            "drafter": session.drafter_kind,
            "stats": generation.stats.to_json(),
            "finish_reason": generation.finish_reason,
            **energy_record(run_energy),
        }
        if generation.options.constraint:
            record["whole"] = generation.complete
        if lossless:
            record["lossless"] = lossless.to_json() | {"drafted_tokens": generation.stats.drafted}
        click.echo(json.dumps(record, ensure_ascii=False))
        return
    for sentence in remarks(generation, loaded=cache.load_state is not None):
        note(sentence)
    note(summary(generation.stats, session.drafter_kind))
    note(": ".join(run_energy.row()))
    if not generation.complete:
        note("the text ended before the grammar was complete; raise --max-tokens, or leave --stop out")
    if lossless:
        note(lossless.sentence() if generation.stats.drafted else f"{lossless.sentence()}; {NOTHING_DRAFTED}")


def sent_prompt(session: Session, options: RunOptions, prompt: str) -> OnePrompt:
    """Returns the prompt as it is sent: bare, as a message, or as a message with images and sound."""
    media = with_media(session, prompt, options.media, options.chat)
    if media is not None:
        return media_message(session, media)
    return read_one_prompt(session, prompt, options.chat, bare=bool(options.cache.load_state or options.cache.save_state))


def check_again(session: Session, generation: Generation) -> LosslessReport:
    """Runs the same request without drafts and compares, which takes as long again."""
    with terminal_wait("the same again without drafts"):
        return check_lossless(session, generation)


def explain_round(session: Session, options: RunOptions) -> Explain:
    """Returns the callback of --explain."""
    profit = session.profit() if options.drafting.fixed_length is None else None
    return Explain(lambda: profit.last if profit else None, session.settings.objective, note)


def run_chat(session: Session, options: RunOptions) -> None:
    """Runs a chat to the end of its input; each answer has at most `max_tokens` tokens."""
    chat = Chat(
        session,
        max_tokens=options.max_tokens,
        draft_length=options.drafting.fixed_length,
        **options.chat.to_chat(),
        **options.request,
    )
    history = None if options.chat.no_history else History(history_file())
    TerminalChat(
        chat,
        as_json=options.mode.as_json,
        watch=options.energy.watch,
        lines=options.chat.lines,
        history=history,
        image_rows=int(options.media.image_rows),
    ).run()


def run_comparison(session: Session, options: RunOptions, prompt: str) -> None:
    """Runs with and without drafts in turn, streams the first run of each, and prints a table."""
    as_json = options.mode.as_json
    comparison = compare(
        session,
        read_one_prompt(session, prompt, options.chat, bare=False).sent,
        max_tokens=options.max_tokens,
        draft_length=options.drafting.fixed_length,
        repeats=options.mode.repeats,
        show=(lambda _: None) if as_json else (lambda text: click.echo(text, nl=False, err=True)),
        shown_prompt=prompt,
        watch=options.energy.or_estimate().watch,
        waiting=terminal_wait,
    )
    if as_json:
        click.echo(json.dumps(comparison.to_json(), ensure_ascii=False))
        return
    from rich.console import Console

    Console().print(comparison_table(comparison))
    for sentence in comparison.remarks():
        note(sentence)


def run_plan(folder: Path, options: RunOptions, prompt: str) -> None:
    """Prints the plan of the bundle and, with --measure, the same measured here."""
    load = options.load_options()
    bundle = open_bundle(folder, check=load.check, public_key=load.public_key)
    settings = load_settings(bundle, config=load.config, preset=load.preset, context=load.context, notify=note)
    measured = None
    # First, as the probes of the machine's speed take memory of their own.
    if options.mode.measure:
        with open_session(folder, load) as session:
            measured = measure_plan(session, prompt or PLAN_PROMPT)
    power = options.energy.power
    plan = manifest_plan(
        bundle.manifest,
        device_speed(options.plan.profile, load.threads),
        context=settings.context,
        kv_type=load.kv_type or settings.kv_type,
        longest=min(settings.longest, settings.longest_draft),
        drafter=load.drafter or settings.drafter,
        power=power if isinstance(power, PhasePower) else None,
    )
    show_plan(plan, measured, as_json=options.mode.as_json)


@click.command(cls=CommandWithModes, epilog=EXAMPLES, context_settings=CONTEXT)
@click.argument("bundle", type=FirstWord())
@click.argument("prompt", required=False)
@mode_options
@drafting_options
@backend_options
@config_options
@monitoring_options
@memory_options
@check_options
@sampling_options
@media_options
@cache_options
@chat_options
@energy_options
@plan_options
@serve_options
@click.version_option(package_name="edge-mtp")
def main(bundle: Path, prompt: str | None, **values: Any) -> None:
    """Run BUNDLE with its drafter: a chat, one PROMPT, or a server.

    Without a command, BUNDLE alone starts a chat, and BUNDLE PROMPT generates text ('-' reads standard input).
    """
    with one_sentence_errors(out_of_memory=OUT_OF_MEMORY):
        options = read_options(prompt, values)
        text = read_prompt() if prompt == "-" else prompt or ""
        if options.plan.plan:
            run_plan(bundle, options, text)
        elif options.serve is not None:
            from edge_runtime.server.serve import serve

            serve(bundle, options.serve, options.load_options(), note, options.energy.shared_watch())
        else:
            with open_session(bundle, options.load_options()) as session:
                options = options.over_bundle(session.bundle)
                if options.mode.demo:
                    run_demo(
                        session,
                        max_tokens=options.mode.max_tokens or DEMO_TOKENS,
                        repeats=options.mode.repeats,
                        as_json=options.mode.as_json,
                        watch=options.energy.or_estimate().watch,
                    )
                elif prompt is None:
                    run_chat(session, options)
                elif options.mode.comparing:
                    run_comparison(session, options, text)
                else:
                    run_once(session, options, text)


add_modes(main)
