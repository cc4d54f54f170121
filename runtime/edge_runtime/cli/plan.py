"""`edge-run plan`: predicts memory, speed and energy of a pair on a device, and measures them on this machine on request."""

from __future__ import annotations

import json
import shlex
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from edge_devices.command_line import PanelCommand, takes
from edge_devices.machine.detection import profiles
from edge_devices.machine.memory import peak_memory_bytes
from edge_devices.option_fields import option
from edge_runtime.backends.interface import CPU
from edge_runtime.backends.selection import AUTO, KINDS, check_device
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.calibration.first_use import measure_costs
from edge_runtime.cli.options import BundlePath, Opening, note, opens_bundle, refuse_threads
from edge_runtime.cli.prompts import read_prompt
from edge_runtime.config.settings import load_settings
from edge_runtime.drafting.energy_objective import PhasePower
from edge_runtime.errors import BundleError, RequestError
from edge_runtime.media.encoder_inputs import DEFAULT_BUDGET
from edge_runtime.planning.speed import Range, SpeedPlan, deviation, manifest_plan, of_backend
from edge_runtime.planning.speed_profile import speed_profile
from edge_runtime.session.self_checks import square, time_image
from edge_runtime.session.session import Session

PROMPT = "def area(width, height):\n"
WIDE = 3.0  # from this ratio of highest to lowest predicted speed on, the plan advises to measure
MEASURE_REPEATS = 3
PREFILL_TOKENS, DECODE_TOKENS = 256, 64
# Names of the rows that a decision needs, in addition to the verdict.
_DECIDING = ("memory", "anonymous", "of files", "first token", "plain", "drafted", "draft length")
_Row = tuple[str, str, Range, float | None]  # name, unit, prediction, measurement


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to plan for, and what to print. `profile` None is this machine."""

    profile: str | None = option(
        metavar="NAME",
        panel="Plan",
        shell_complete=lambda _context, _parameter, start: [name for name in profiles() if name.startswith(start)],
        help="The device, such as raspberry-pi-5.  [default: this machine]",
    )
    measure: bool = option(default=False, panel="Plan", help="Also run the bundle here and print the deviation of each prediction.")
    how: bool = option(default=False, panel="Plan", help="Print every figure, and how each was derived.")
    as_json: bool = option("--json", default=False, panel="Plan", help="Print one JSON object instead of text.")

    def __post_init__(self) -> None:
        if self.measure and self.profile is not None:
            raise click.UsageError("--measure is for this machine; leave --profile out")


@click.command(cls=PanelCommand)
@click.argument("bundle", type=BundlePath())
@click.argument("prompt", default=PROMPT)
@takes("options", PlanOptions)
@opens_bundle("check", tuning=(), energy=("phase_power",))
def plan(bundle: Path, prompt: str, options: PlanOptions, opening: Opening) -> None:
    """Predict memory, first token, speed, best draft length and joules per token, here or on a device.

    --measure generates after PROMPT.
    """
    if options.profile is None:
        refuse_threads(opening.load.threads)
    load, prompt = opening.options(), read_prompt(prompt)
    try:
        opened = open_bundle(bundle, check=load.check, public_key=load.public_key)
    except BundleError as error:
        if bundle.exists():
            raise
        raise BundleError(f"{error}; to plan a model before its export: edge-export plan {shlex.quote(str(bundle))}") from error
    settings = load_settings(opened, config=load.config, preset=load.preset, context=load.context, notify=note)
    accelerator = None if load.device is None or load.device.lower() in (CPU, AUTO) else load.device
    if accelerator is not None and options.profile is None:
        check_device(opened, load.backend, accelerator)
    elif accelerator is not None and accelerator.lower() not in KINDS:
        raise RequestError(f"a profile has the devices {CPU}, {', '.join(KINDS)}, and none named {accelerator!r}; choose one of them")
    measured = None
    # Measured first, because the probes of the machine's speed take memory too.
    if options.measure:
        with opening.session(bundle) as session:
            measured = measure_plan(session, prompt)
    power = opening.energy.power
    predicted = manifest_plan(
        of_backend(opened.manifest, load.backend),
        speed_profile(options.profile, load.threads, accelerator=accelerator),
        context=settings.context,
        kv_type=load.kv_type or settings.kv_type,
        longest=min(settings.longest, settings.longest_draft),
        drafter=load.drafter or settings.drafter,
        power=power if isinstance(power, PhasePower) else None,
        packed_cache=load.packed_cache,
    )
    show_plan(predicted, measured, as_json=options.as_json, how=options.how)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Medians of measurements. Speeds are in tokens per second; `draft_length` is the mean number of drafted tokens per round.

    `memory_bytes` is the peak of the process. `verify_seconds` has the time of a verify of 1, 2, ... rows. `image_seconds` has the seconds
    to encode and to prefill an image.
    """

    memory_bytes: int
    prefill: float
    plain: float
    drafted: float
    step_seconds: float
    verify_seconds: tuple[float, ...]
    draft_length: float
    image_seconds: tuple[float, float] | None = None


def measure_plan(session: Session, prompt: str) -> Measured:
    """Measures what a plan predicts: prefill, draft steps, verifies, and requests with and without drafts in turn.

    Empties the KV cache.
    """
    target = session.target
    token = max(session.vocabulary.encode(prompt))
    count = min(PREFILL_TOKENS, target.context // 2)
    filled = []
    for _ in range(MEASURE_REPEATS + 1):  # the first is a warm-up
        target.rollback(0)
        begin = time.perf_counter()
        target.prefill([token] * count)
        filled.append(time.perf_counter() - begin)
    target.rollback(0)
    costs = measure_costs(target, session.drafter, token, max_rows=session.settings.longest_draft + 1)
    speeds_of: dict[int | None, list[float]] = {0: [], None: []}
    lengths = []
    for _ in range(MEASURE_REPEATS):
        for draft_length, speeds in speeds_of.items():
            generation = session.generate(prompt, max_tokens=DECODE_TOKENS, draft_length=draft_length)
            for _ in generation:
                pass
            speeds.append(generation.stats.tokens_per_second)
        lengths.append(generation.stats.drafted / max(1, generation.stats.rounds))
    image_seconds = _image_seconds(session)
    target.rollback(0)
    return Measured(
        memory_bytes=peak_memory_bytes(),
        prefill=count / statistics.median(filled[1:]),
        plain=statistics.median(speeds_of[0]),
        drafted=statistics.median(speeds_of[None]),
        step_seconds=costs.mean_step,
        verify_seconds=costs.verify,
        draft_length=statistics.median(lengths),
        image_seconds=image_seconds,
    )


def _image_seconds(session: Session) -> tuple[float, float] | None:
    """Returns the median seconds to encode and to prefill an image of the plan's size; None without an encoder or room for it."""
    if session.bundle.manifest.media is None or session.target.context < DEFAULT_BUDGET + DECODE_TOKENS:
        return None
    timings = [time_image(session, square(DEFAULT_BUDGET, seed)) for seed in range(MEASURE_REPEATS + 1)]
    later = timings[1:]  # the first loads the encoder
    scale, encode = DEFAULT_BUDGET / later[0].media_rows, statistics.median(stats.encode_seconds for stats in later)
    return scale * encode, scale * statistics.median(stats.prefill_seconds - stats.encode_seconds for stats in later)


def show_plan(plan: SpeedPlan, measured: Measured | None, *, as_json: bool, how: bool) -> None:
    """Prints the plan, and the measurement if there is one."""
    if as_json:
        record = {"plan": plan.to_json()} | ({} if measured is None else {"measured": asdict(measured)})
        click.echo(json.dumps(record, ensure_ascii=False))
        return
    for line in plan_lines(plan, measured) if how or measured is not None else short_lines(plan):
        click.echo(line)


def short_lines(plan: SpeedPlan) -> list[str]:
    """Returns lines with the verdict and the figures that a decision needs."""
    shown = [_row_line(row) for row in _rows(plan, None) if row[0] in _DECIDING]
    return [*_verdict(plan), *shown, "  The brackets hold the range; --how prints every figure and how it was derived."]


def plan_lines(plan: SpeedPlan, measured: Measured | None = None) -> list[str]:
    """Returns the plan as lines: each figure with its range, its measurement and deviation, then how each was derived."""
    lines = [*_verdict(plan), *map(_row_line, _rows(plan, measured))]
    lines.append(_joules_line("J/token", plan.joules_per_token))
    lines.append(_joules_line("J/prompt tok", plan.joules_per_prompt_token))
    if (image := plan.image) is not None:
        lines.append(_joules_line("J/image", image.joules))
        lines.append(f"  an image of {image.rows} tokens; its encoder takes {image.encoder_bytes / 1e6:.0f} MB from the first image on")
    if measured is None and (text := _narrower(plan)):
        lines.append(f"  narrower      {text}")
    derived = plan.derived if image is None else plan.derived | {"image": image.derived}
    return lines + ["how:"] + [f"  {name}: {how}" for name, how in derived.items()]


def _verdict(plan: SpeedPlan) -> list[str]:
    lines = [f"{plan.device}:", f"  worth it      {plan.decision()[1]}"]
    if plan.answers:
        lines.append(f"  answers       {plan.answers}")
    if plan.load:
        lines.append(f"  this machine is busy, so it is faster than these figures say: {plan.load}")
    return lines


def _rows(plan: SpeedPlan, measured: Measured | None) -> list[_Row]:
    low, best, high = plan.draft_length
    memory = plan.memory
    low_reserved = (memory.reserved - memory.prompts) / 1e6
    rows: list[_Row] = [
        (
            "memory",
            "MB",
            Range(low=low_reserved, middle=memory.with_short_prompts / 1e6, high=1.1 * memory.total / 1e6),
            measured.memory_bytes / 1e6 if measured else None,
        ),
        ("anonymous", "MB", Range(low=low_reserved, middle=low_reserved, high=memory.reserved / 1e6), None),
        ("of files", "MB", Range(low=memory.of_files / 1e6, middle=memory.of_files / 1e6, high=memory.of_files / 1e6), None),
        (
            "enough",
            "MB",
            Range(low=memory.minimum(plan.read_bytes) / 1e6, middle=memory.enough / 1e6, high=memory.total / 1e6),
            None,
        ),
        ("prefill", "tok/s", plan.prefill, measured.prefill if measured else None),
        _first_token(plan),
        ("plain", "tok/s", plan.plain, measured.plain if measured else None),
        ("drafted", "tok/s", plan.drafted, measured.drafted if measured else None),
        ("draft step", "ms", plan.step_seconds.times(1000), measured.step_seconds * 1000 if measured else None),
        ("draft length", "", Range(low=low, middle=best, high=high), measured.draft_length if measured else None),
    ]
    if (image := plan.image) is not None:
        encode, prefill = (measured and measured.image_seconds) or (None, None)
        rows += [
            ("image encode", "ms", image.encode_seconds.times(1000), None if encode is None else encode * 1000),
            ("and prefill", "ms", image.prefill_seconds.times(1000), None if prefill is None else prefill * 1000),
        ]
    return rows


def _row_line(row: _Row) -> str:
    name, unit, value, measurement = row
    between = "" if value.low == value.high else f"[{_text(value.low)}, {_text(value.high)}] "
    text = f"  {name:<13}{_text(value.middle):>8}  {between}{unit}".rstrip()
    return text if measurement is None else f"{text:<48}  measured {_text(measurement)} (prediction {deviation(measurement, value)})"


def _narrower(plan: SpeedPlan) -> str:
    """Returns advice to measure if the range of a predicted speed is wider than a factor of WIDE; otherwise an empty string."""
    speeds = {"prefill": plan.prefill, "plain": plan.plain, "drafted": plan.drafted}
    name, widest = max(speeds.items(), key=lambda item: item[1].high / item[1].low)
    if widest.high < WIDE * widest.low:
        return ""
    measure = "`edge-run plan BUNDLE --measure` on the device measures all of them"
    remote = "on a phone, `edge-bench devices BUNDLE --package DIR --adb all --repeats 1 --lengths 3`"
    return f"{name} is known within a factor of {widest.high / widest.low:.0f} only: {measure}; {remote}"


def _first_token(plan: SpeedPlan) -> tuple[str, str, Range, None]:
    """Returns the row of the first token, in seconds; from two minutes on, in minutes."""
    seconds, prompt = plan.first_token_seconds, f"after a prompt of {plan.prompt_tokens} tokens"
    if seconds.middle < 120:
        return "first token", f"s {prompt}", seconds, None
    return "first token", f"min {prompt}", seconds.times(1 / 60), None


def _joules_line(name: str, value: Range | None) -> str:
    return f"  {name:<13}" + (f"{_text(value.middle):>8}  [{_text(value.low)}, {_text(value.high)}]" if value else "not known")


def _text(value: float) -> str:
    """Returns a figure with three digits and no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
