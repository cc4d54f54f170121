"""Energy of the variants by the protocol of docs/energy.md. Takes minutes to hours, as windows depend on the meter."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from edge_devices.energy.characteristics import Characteristics
from edge_devices.energy.external_meter import import_csv, with_external_meter
from edge_devices.energy.protocol import BusyLoad, Plan, Work, Workload, characterise_meter, measure
from edge_devices.energy.recorder import Recorder
from edge_devices.energy.report import CALIBRATION, PREFILL, Report, make_report
from edge_devices.energy.run_log import MAX_LINE_CHARS, RunLog, read_log, write_log
from edge_devices.energy.virtual_meters import EXTERNAL, PendingExternalMeter, requested_meter
from edge_devices.machine.system import System
from edge_devices.meters.base import Meter
from edge_devices.meters.search import find_meters
from edge_runtime.bench.measure.prompts import PreparedPrompt
from edge_runtime.bench.measure.runners import EdgeRunner, Place
from edge_runtime.bench.measure.schedule import DOMAINS_PART
from edge_runtime.bench.measure.variants import BASELINE, PLAIN, Variant
from edge_runtime.session.session import Session

REPEATS = 5
DRAFT_LENGTH = 3
# Verifies or drafts per calibration loop: enough that reading the clock is negligible.
LOOP = 20


def find_meter(name: str | None = None) -> Meter | None:
    """Returns the named meter, or the first usable one; None when there is none. Raises MeterError if the named one cannot be used."""
    system = System()
    return PendingExternalMeter() if name == EXTERNAL else requested_meter(system, find_meters(system), name)


def is_energy_log(path: Path) -> bool:
    """Returns whether a file begins like a log of `measure_energy`."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = json.loads(file.readline(MAX_LINE_CHARS))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and first.get("kind") == "header" and "meter" in first


def read_energy(path: Path, external: Path | None = None) -> tuple[Report, RunLog]:
    """Computes the figures of a log of `measure_energy`, from the table of an `external` meter if given.

    Raises DeviceError if it is none, or no repeat counts.
    """
    log = read_log(path)
    if external is not None:
        log = with_external_meter(log, import_csv(external))
    return _figures(log), log


def measure_energy(
    path: Path, meter: Meter, workloads: Mapping[str, Workload], *, threads: int, system: System | None = None, repeats: int = REPEATS
) -> tuple[Report | None, RunLog]:
    """Runs the protocol, writes its log and computes the figures; None for an external meter, whose table is not available yet.

    Raises MeasurementError where the machine's state forbids it.
    """
    system, awaited = system or System(), isinstance(meter, PendingExternalMeter)

    def load() -> BusyLoad:
        return BusyLoad(threads)

    characteristics = Characteristics.expected(meter.facts) if awaited else characterise_meter(system, meter, load)
    with Recorder(system, meter) as recorder:
        log = measure(system, recorder, workloads, characteristics, Plan(repeats=repeats), load if awaited else None)
    write_log(path, log, recorder.raw)
    return (None if awaited else _figures(log)), log


def _figures(log: RunLog) -> Report:
    variants = {run.variant for run in log.runs}
    return make_report(log, baseline=PLAIN if PLAIN in variants else None)


def energy_workloads(
    runners: Mapping[str, EdgeRunner], variants: Sequence[Variant], prompts: Sequence[PreparedPrompt], tokens: int
) -> dict[str, Workload]:
    """Returns the workloads of the protocol: each variant's requests over the prompts in turn, and loops of a single phase.

    The phases of a request are prefill, draft and verify, or without drafts prefill and plain; the last includes the loop's own time.
    """
    first = next(iter(runners.values()))
    workloads = {v.label: _requests(first if v == BASELINE else runners[v.drafter], v, prompts, tokens) for v in variants}
    return workloads | _calibration_loops(first.session, prompts[0])


def _requests(runner: EdgeRunner, variant: Variant, prompts: Sequence[PreparedPrompt], tokens: int) -> Workload:
    order: Iterator[PreparedPrompt] = itertools.cycle(prompts)
    place = Place(part=DOMAINS_PART, domain="energy", prompt=0, repeat=0)

    def work() -> Work:
        run = runner.run(variant, next(order), tokens, place)
        draft = 0.0 if variant.policy == PLAIN else run.draft_seconds or 0.0
        forwards = "plain" if variant.policy == PLAIN else "verify"  # of one row or of several, whose watts may differ
        phases = {PREFILL: run.prefill_seconds or 0.0, "draft": draft, forwards: run.seconds - draft}
        return Work(emitted_tokens=run.tokens, prompt_tokens=run.prompt_tokens, phases={k: s for k, s in phases.items() if s > 0})

    return work


def _calibration_loops(session: Session, prompt: PreparedPrompt) -> dict[str, Workload]:
    target, drafter, ids = session.target, session.drafter, list(prompt.ids)

    def start_text() -> None:
        target.rollback(0)
        target.prefill(ids)

    def prefill() -> Work:
        begin = time.perf_counter()
        start_text()
        return Work(emitted_tokens=0, prompt_tokens=len(ids), phases={PREFILL: time.perf_counter() - begin})

    def forwards(phase: str, rows: int) -> Workload:
        def work() -> Work:
            start_text()
            begin = time.perf_counter()
            for _ in range(LOOP):
                target.verify([ids[-1]] * rows)
                target.rollback(len(ids))
            return Work(emitted_tokens=0, phases={phase: time.perf_counter() - begin})

        return work

    loops: dict[str, Workload] = {PREFILL: prefill, "plain": forwards("plain", 1), "verify": forwards("verify", DRAFT_LENGTH + 1)}
    if drafter is not None:

        def draft() -> Work:
            start_text()
            begin = time.perf_counter()
            for _ in range(LOOP):
                drafter.draft(ids[-1], DRAFT_LENGTH)
            return Work(emitted_tokens=0, phases={"draft": time.perf_counter() - begin})

        loops["draft"] = draft
    return {CALIBRATION + phase: loop for phase, loop in loops.items()}
