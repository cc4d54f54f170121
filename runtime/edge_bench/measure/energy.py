"""Measures the energy of variants by the protocol of docs/measure-energy.md. It takes minutes to hours, depending on the meter."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from edge_bench.measure.records import BASELINE, PLAIN, Variant
from edge_bench.measure.request import Prompt, long_prompt
from edge_bench.measure.runners import EdgeRunner
from edge_devices.energy.external.columns import parse_choice
from edge_devices.energy.external.table import import_csv
from edge_devices.energy.intervals import MIN_TO_DETREND, t_quantile
from edge_devices.energy.protocol import (
    MAX_SOAK_S,
    PhaseLoop,
    Plan,
    Work,
    Workload,
    busy_load,
    characterise_meter,
    measure,
    planned_seconds,
    soak_seconds,
)
from edge_devices.energy.recorder import Characteristics, Recorder
from edge_devices.energy.report import CALIBRATION, EnergyReport, make_report
from edge_devices.energy.run_log import LogFile, RunLog, read_log
from edge_devices.energy.virtual_meters import EXTERNAL, PendingExternalMeter, external_meter, requested_meter, with_external_meter
from edge_devices.energy.windows import PREFILL
from edge_devices.machine.system import System
from edge_devices.meters.base import Meter
from edge_devices.meters.search import find_meters, no_meter_reason
from edge_devices.waiting import Waiting, silent_wait
from edge_runtime.session.session import Session

REPEATS = 5
FEWEST_REPEATS = 3
DRAFT_LENGTH = 3
# How many verifies or drafts a calibration loop has, so that reading the clock is negligible.
LOOP = 20
# The most tokens of a prompt whose joules are measured. A longer one would take minutes per repeat on a slow device.
LONGEST_PROMPT = 512


def find_meter(name: str | None) -> tuple[Meter | None, str]:
    """Returns the named meter, or the first usable one; None and the reason if there is none.

    Raises MeterError if the named meter cannot be used.
    """
    system = System()
    if external := external_meter(name):
        return external, ""
    findings = find_meters(system)
    meter = requested_meter(system, findings, name)
    return meter, "" if meter else no_meter_reason(findings)


def awaits_table(log: RunLog) -> bool:
    """Whether a log has no readings yet, because they are in the table of an external meter."""
    return log.facts.name == EXTERNAL and not log.trace.times


def read_energy(path: Path, external: Path | None = None, columns: str | None = None) -> tuple[EnergyReport, RunLog]:
    """Computes the figures of a log that `measure_energy` wrote. `external` is the table of an external meter; `columns` is as `--columns`.

    Raises DeviceError if the file is no such log, or if no repeat counts.
    """
    log = read_log(path)
    if external is not None:
        log = with_external_meter(log, import_csv(external, parse_choice(columns or "")))
    return energy_figures(log), log


def measure_energy(
    path: Path,
    meter: Meter,
    workloads: Mapping[str, Workload],
    *,
    threads: int,
    system: System | None = None,
    repeats: int = REPEATS,
    minutes: float | None = None,
    run: str = "",
    waiting: Waiting = silent_wait,
    notify: Callable[[str], None] = lambda _text: None,
) -> tuple[EnergyReport | None, RunLog]:
    """Runs the protocol, writes its log after each window, and computes the figures.

    `minutes` is about how long it may take. `run` is the name of the run whose speeds were measured before. `notify` gets a sentence about
    how long it takes, and what that means for the intervals.

    The report is None for an external meter, whose table is not available yet. After the first window, Ctrl-C ends the measurement, and its
    figures cover the windows so far (`RunLog.stopped`). Raises MeasurementError if the machine's state forbids measuring, or if no repeat
    counts; the log is kept even then.
    """
    system, awaited = system or System(), isinstance(meter, PendingExternalMeter)
    load = partial(busy_load, threads)
    with waiting("energy") as show:
        characteristics = Characteristics.expected(meter.facts) if awaited else characterise_meter(system, meter, load, show)
    kept: RunLog | None = None
    plan = Plan(repeats=repeats)
    if minutes is not None:
        plan, workloads = fitted(plan, workloads, characteristics, 60 * minutes)
        # If the state never becomes steady, warming up ends in time for `minutes`.
        spare_s = 60 * minutes - planned_seconds(plan, workloads, characteristics)
        plan = replace(plan, max_soak_s=min(MAX_SOAK_S, soak_seconds(plan, characteristics) + max(0.0, spare_s)))
    minutes_needed = planned_seconds(plan, workloads, characteristics) / 60
    notify(session_sentence(plan, workloads, characteristics))
    with waiting(f"energy, about {minutes_needed:.0f} min") as show, LogFile(path) as file, Recorder(system, meter) as recorder:

        def keep(log: RunLog) -> None:
            nonlocal kept
            kept = log
            log.environment["run"] = run
            file.keep(log, recorder.raw)

        def steps_seen(loads: Sequence[tuple[float, float]]) -> None:
            if isinstance(meter, PendingExternalMeter):
                notify(meter.steps_sentence(loads))

        try:
            load_step = load if awaited else None
            log = measure(system, recorder, workloads, characteristics, plan, load_step, keep, show, steps_seen)
        except KeyboardInterrupt:
            if kept is None or not kept.runs:
                raise
            log = kept
            log.stopped = True
            log.warnings.append("stopped by Ctrl-C before the end: figures have fewer repeats, and some may be missing")
            keep(log)
    return (None if awaited else energy_figures(log)), log


def fitted(
    plan: Plan, workloads: Mapping[str, Workload], characteristics: Characteristics, seconds: float
) -> tuple[Plan, Mapping[str, Workload]]:
    """Returns the longest plan that fits into `seconds`; the shortest plan if none does.

    To save time, it first has fewer repeats, then no loops of single phases, then so few repeats that intervals are wide, and at last no
    warm-up. A plan with more than the fewest repeats must leave enough time for a device that warms up slowly.
    """
    whole = without_loops(workloads)
    counts = range(plan.repeats, min(FEWEST_REPEATS, plan.repeats) - 1, -1)
    plans = [(replace(plan, repeats=count), each) for each in (workloads, whole) for count in counts]
    plans += [(replace(plan, repeats=count, soak=soak), whole) for count in (2, 1) if count < counts[-1] for soak in (plan.soak, False)]
    return next((fitting for fitting in plans if _warmed_seconds(*fitting, characteristics) <= seconds), plans[-1])


def without_loops(workloads: Mapping[str, Workload]) -> dict[str, Workload]:
    """Returns the workloads without the loops of single phases."""
    return {name: work for name, work in workloads.items() if not name.startswith(CALIBRATION)}


def _warmed_seconds(plan: Plan, workloads: Mapping[str, Workload], characteristics: Characteristics) -> float:
    longer_s = max(0.0, MAX_SOAK_S - soak_seconds(plan, characteristics)) if plan.repeats > FEWEST_REPEATS else 0.0
    return planned_seconds(plan, workloads, characteristics) + longer_s


def session_sentence(plan: Plan, workloads: Mapping[str, Workload], characteristics: Characteristics) -> str:
    """Returns how long a measurement takes, how much wider short ones make intervals, and how long it takes to get useful intervals."""
    needed = planned_seconds(plan, workloads, characteristics) / 60
    repeats = f"{plan.repeats} repeat{'s' if plan.repeats > 1 else ''} of {len(workloads)} windows"
    text = f"energy takes about {needed:.0f} min: {repeats}; the meter shows a new value every {characteristics.refresh_s:.2g} s"
    if plan.repeats == 1:
        text += "; a single repeat has no interval: how runs differ is not known"
    elif plan.repeats < REPEATS:
        times = _interval_width(plan.repeats) / _interval_width(REPEATS)
        text += f"; intervals of {plan.repeats} repeats are {times:.2g} times as wide as those of {REPEATS}"
    if not plan.soak:
        text += "; the device does not warm up first, so that it takes more later"
    useful = replace(plan, repeats=FEWEST_REPEATS, soak=True), without_loops(workloads)
    minutes = math.ceil(planned_seconds(*useful, characteristics) / 60)
    if plan.repeats < FEWEST_REPEATS or minutes < needed:
        text += f"; {FEWEST_REPEATS} repeats take {minutes} min: --minutes {minutes}"
    return text


def _interval_width(repeats: int) -> float:
    """Returns half the width of an interval from that many repeats, in standard deviations of a repeat."""
    freedom = repeats - 2 if repeats >= MIN_TO_DETREND else repeats - 1
    return t_quantile(freedom) / math.sqrt(repeats)


def energy_figures(log: RunLog) -> EnergyReport:
    """Computes a log's figures, with ratios to plain decoding if that was measured. Raises DeviceError if no repeat counts."""
    variants = {run.variant for run in log.runs}
    report = make_report(log, baseline=PLAIN if PLAIN in variants else None)
    lost = dict.fromkeys(text for run in log.runs for text in (*run.before.unknown, *run.after.unknown))
    known = log.runs[0].before.unknown if log.runs else ()
    return replace(report, warnings=[*report.warnings, *(f"no longer known: {text}" for text in lost if text not in known)])


def energy_workloads(
    runners: Mapping[str, EdgeRunner],
    variants: Sequence[Variant],
    prompts: Sequence[Prompt],
    tokens: int,
    prompt_lengths: Sequence[int] = (),
) -> dict[str, Workload]:
    """Returns the workloads of the protocol: requests of each variant over the prompts in turn, a prompt alone, and loops of single phases.

    The prompt alone has the longest of `prompt_lengths` up to LONGEST_PROMPT. Each workload takes minutes. The phases of a request are
    prefill, draft and verify, or without drafts, prefill and plain. The last phase includes the loop's own time.
    """
    first = next(iter(runners.values()))
    workloads = {v.label: _requests(first if v == BASELINE else runners[v.drafter], v, prompts, tokens) for v in variants}
    if length := max((length for length in prompt_lengths if length <= LONGEST_PROMPT), default=0):
        workloads[f"prompt {length}"] = _prefills(first.session, long_prompt(prompts, length))
    return workloads | _calibration_loops(first.session, prompts[0])


def _prefills(session: Session, ids: Sequence[int]) -> Workload:
    """Returns a workload that computes the whole prompt each time."""

    def work() -> Work:
        begin = time.perf_counter()
        session.target.rollback(0)
        session.target.prefill(ids)
        return Work(emitted_tokens=0, prompt_tokens=len(ids), phases={PREFILL: time.perf_counter() - begin})

    return work


def _requests(runner: EdgeRunner, variant: Variant, prompts: Sequence[Prompt], tokens: int) -> Workload:
    order: Iterator[Prompt] = itertools.cycle(prompts)

    def work() -> Work:
        run = runner.run(variant, next(order), tokens)
        draft = 0.0 if variant.policy == PLAIN else run.draft_seconds or 0.0
        forwards = "plain" if variant.policy == PLAIN else "verify"  # forwards of one row and of several may differ in watts
        phases = {PREFILL: run.prefill_seconds or 0.0, "draft": draft, forwards: run.seconds - draft}
        return Work(emitted_tokens=run.tokens, prompt_tokens=run.prompt_tokens, phases={k: s for k, s in phases.items() if s > 0})

    return work


def _calibration_loops(session: Session, prompt: Prompt) -> dict[str, Workload]:
    """Returns loops of one phase each. The prefill that they need runs before the window, so that its joules do not count as theirs."""
    target, drafter, ids = session.target, session.drafter, list(prompt.ids)

    def start_text() -> None:
        target.rollback(0)
        target.prefill(ids)

    def forwards(phase: str, rows: int) -> Workload:
        def work() -> Work:
            begin = time.perf_counter()
            for _ in range(LOOP):
                target.verify([ids[-1]] * rows)
                target.rollback(len(ids))
            return Work(emitted_tokens=0, phases={phase: time.perf_counter() - begin})

        return PhaseLoop(start_text, work)

    loops: dict[str, Workload] = {
        PREFILL: _prefills(session, ids),
        "plain": forwards("plain", 1),
        "verify": forwards("verify", DRAFT_LENGTH + 1),
    }
    if drafter is not None:

        def draft() -> Work:
            begin = time.perf_counter()
            for _ in range(LOOP):
                drafter.draft(ids[-1], DRAFT_LENGTH)
            return Work(emitted_tokens=0, phases={"draft": time.perf_counter() - begin})

        loops["draft"] = PhaseLoop(start_text, draft)  # a draft needs a row of the newest forward
    return {CALIBRATION + phase: loop for phase, loop in loops.items()}
