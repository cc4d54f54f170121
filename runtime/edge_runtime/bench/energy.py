"""Energy of the variants by the full protocol of docs/energy.md, where there is a meter. Minutes to hours: windows follow the meter."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from edge_devices.errors import DeviceError
from edge_devices.load import BusyLoad
from edge_devices.meters.base import Meter
from edge_devices.meters.search import choose_meter, find_meters
from edge_devices.protocol import Plan, Work, Workload, characterise_meter, measure
from edge_devices.recorder import Recorder
from edge_devices.report import CALIBRATION, PREFILL, Report, make_report
from edge_devices.run_log import RunLog, read_log, write_log
from edge_devices.system import System
from edge_runtime.bench.plan import DOMAINS_PART
from edge_runtime.bench.prompts import PreparedPrompt
from edge_runtime.bench.sides import OurSide, Place
from edge_runtime.bench.variants import BASELINE, PLAIN, Variant
from edge_runtime.errors import RequestError
from edge_runtime.session import Session

REPEATS = 5
DRAFT_LENGTH = 3
# Of verifies and drafts in a calibration loop: enough that looking at the clock costs nothing.
LOOP = 20


def find_meter(name: str | None = None) -> Meter | None:
    """Returns the named meter, or the first usable one; None when there is none. Raises RequestError if the named one cannot be used."""
    try:
        return choose_meter(find_meters(System()), name)
    except DeviceError as error:
        raise RequestError(str(error)) from error


def read_energy(path: Path) -> Report:
    """Computes the figures of a log that `measure_energy` wrote. Raises RequestError if it is none, or no repeat counts."""
    try:
        return _figures(read_log(path))
    except DeviceError as error:
        raise RequestError(str(error)) from error


def measure_energy(path: Path, meter: Meter, workloads: Mapping[str, Workload], *, threads: int, system: System | None = None) -> Report:
    """Runs the protocol, writes its log and computes the figures. Raises RequestError where the machine's state forbids it."""
    system = system or System()
    try:
        characteristics = characterise_meter(system, meter, lambda: BusyLoad(threads))
        with Recorder(system, meter) as recorder:
            log = measure(system, recorder, workloads, characteristics, Plan(repeats=REPEATS))
        write_log(path, log, recorder.raw)
        return _figures(log)
    except DeviceError as error:
        raise RequestError(str(error)) from error


def _figures(log: RunLog) -> Report:
    variants = {run.variant for run in log.runs}
    return make_report(log, baseline=PLAIN if PLAIN in variants else None)


def energy_workloads(
    sides: Mapping[str, OurSide], variants: Sequence[Variant], prompts: Sequence[PreparedPrompt], tokens: int
) -> dict[str, Workload]:
    """Returns what the protocol repeats: each variant's requests, prompt after prompt, and loops of one phase alone.

    The phases of a request are prefill, draft and verify; the loop's own time is in the last.
    """
    first = next(iter(sides.values()))
    workloads = {v.label: _requests(first if v == BASELINE else sides[v.drafter], v, prompts, tokens) for v in variants}
    return workloads | _calibration_loops(first.session, prompts[0])


def _requests(side: OurSide, variant: Variant, prompts: Sequence[PreparedPrompt], tokens: int) -> Workload:
    order: Iterator[PreparedPrompt] = itertools.cycle(prompts)
    place = Place(part=DOMAINS_PART, domain="energy", prompt=0, repeat=0)

    def work() -> Work:
        run = side.run(variant, next(order), tokens, place)
        draft = 0.0 if variant.policy == PLAIN else run.draft_seconds or 0.0
        phases = {PREFILL: run.prefill_seconds or 0.0, "draft": draft, "verify": run.seconds - draft}
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

    def verify() -> Work:
        start_text()
        begin = time.perf_counter()
        for _ in range(LOOP):
            target.verify([ids[-1]] * (DRAFT_LENGTH + 1))
            target.rollback(len(ids))
        return Work(emitted_tokens=0, phases={"verify": time.perf_counter() - begin})

    loops: dict[str, Workload] = {PREFILL: prefill, "verify": verify}
    if drafter is not None:

        def draft() -> Work:
            start_text()
            begin = time.perf_counter()
            for _ in range(LOOP):
                drafter.draft(ids[-1], DRAFT_LENGTH)
            return Work(emitted_tokens=0, phases={"draft": time.perf_counter() - begin})

        loops["draft"] = draft
    return {CALIBRATION + phase: loop for phase, loop in loops.items()}
