"""The measurement of a bundle, as the commands run it, and the `edge-bench run` on a device, which writes records but no report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import click

from edge_bench.measure.benchmark import Benchmark
from edge_bench.measure.conditions import ConditionsWatch
from edge_bench.measure.energy import find_meter, measure_energy
from edge_bench.measure.progress import BenchScreen, note
from edge_bench.measure.records import (
    Concurrency,
    CostRecord,
    Header,
    ImageCost,
    KvTypeCost,
    Note,
    Record,
    RecordFile,
    Records,
    Run,
    collect,
)
from edge_bench.measure.request import LOADING, BenchRequest, MeterOptions
from edge_devices.command_line import PanelGroup, takes
from edge_devices.energy.report import EnergyReport
from edge_devices.energy.run_log import RunLog
from edge_devices.energy.virtual_meters import EXTERNAL
from edge_devices.errors import INTERRUPTED, DeviceError
from edge_devices.machine.processors import LoadWatch, load_now
from edge_devices.meters.base import Meter
from edge_devices.option_fields import option
from edge_runtime.cli.options import BundlePath, refuse_threads
from edge_runtime.errors import OUT_OF_MEMORY, RequestError
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.open import default_threads

NO_ENERGY = "energy was not measured; use --energy FILE"


@dataclass(frozen=True, kw_only=True)
class RecordOptions(MeterOptions):
    """The files that measurements are written to."""

    runs: Path | None = option(panel="Results", help="Write each measurement to this file at once, one JSON line each.")
    energy: Path | None = option(
        panel="Energy", help="Also measure energy by the protocol of docs/measure-energy.md (takes long); write its log here."
    )


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What one run of the command measured. `failure` is why requested energy was not measured.

    `speeds_shown` says that the speeds were shown before the joules were measured.
    """

    records: Records
    energy: EnergyReport | None = None
    log: RunLog | None = None
    stopped: bool = False
    failure: DeviceError | None = None
    speeds_shown: bool = False

    def end(self, energy_file: Path | None) -> None:
        """Reports what is missing, after the results are written. Raises `failure`, or exits with the code of Ctrl-C."""
        if self.failure is not None:
            raise self.failure
        if self.log is not None and self.energy is None:
            note(f"the {EXTERNAL} meter's table is still needed: on the computer, edge-bench report {energy_file} --external TABLE")
        if self.stopped:
            note("stopped; the figures cover what was measured until then")
            sys.exit(INTERRUPTED)


def measure_bundle(
    bundle: Path,
    request: BenchRequest,
    load: LoadOptions,
    files: RecordOptions,
    show_speeds: Callable[[Records], None] | None = None,
) -> BenchResult:
    """Measures speeds, and then energy if `files` names a log for it. `show_speeds` gets the records in between.

    Raises EdgeError before anything is measured, or if nothing could be measured.
    """
    refuse_threads(request.threads)
    request.prompts()  # raises for unusable prompts before minutes of measuring
    if files.minutes and not files.energy:
        raise click.UsageError("--minutes is for --energy; add it, or leave --minutes out")
    meter, reason = find_meter(files.meter)
    if files.energy and meter is None:
        raise RequestError(
            f"{reason}; leave --energy out, see edge-devices meters, or use --meter {EXTERNAL} with a meter that writes a table"
        )
    records, stopped = measure_speeds(bundle, request, load, files.runs, "" if files.energy else reason or NO_ENERGY)
    if meter is None or not files.energy or stopped:
        return BenchResult(records=collect(records), stopped=stopped)
    speeds = collect(records)
    if show_speeds is not None:
        show_speeds(speeds)
    shown = show_speeds is not None
    try:
        joules, log = measure_joules(bundle, request, load, files.energy, meter, files.minutes, speeds.header.run)
    except KeyboardInterrupt:
        return BenchResult(records=speeds, stopped=True, speeds_shown=shown)
    except DeviceError as error:  # keeps the speeds, which were measured
        failed = replace(speeds, notes=(*speeds.notes, f"no energy figures: {error}"))
        return BenchResult(records=failed, failure=error, speeds_shown=shown)
    return BenchResult(records=speeds, energy=joules, log=log, stopped=log.stopped, speeds_shown=shown)


def measure_speeds(
    bundle: Path, request: BenchRequest, load: LoadOptions, runs: Path | None, remark: str = ""
) -> tuple[list[Record], bool]:
    """Returns all records, and whether the measurement was interrupted.

    Notes with `remark` and the load before the first run follow the header.
    """
    records: list[Record] = []
    with ExitStack() as stack, BenchScreen() as screen:
        file = stack.enter_context(RecordFile(runs)) if runs else None

        def keep(record: Record) -> None:
            if isinstance(record, Run | Concurrency | ImageCost):
                record = replace(record, load=watch.next())
            if isinstance(record, Run | Concurrency | ImageCost | CostRecord | KvTypeCost):
                record = replace(record, conditions=machine.next())
            records.append(record)
            if file:
                file.add(record)

        def note_all(texts: Iterable[str]) -> None:
            for text in filter(None, texts):
                keep(Note(text=text))

        machine, busy, watch = ConditionsWatch(waiting=screen.wait), busy_before(screen), LoadWatch()
        try:
            for record in Benchmark(bundle, request, screen.shows(load)).records():
                keep(record)
                if isinstance(record, Header):
                    note_all((remark, busy, *machine.remarks))
            note_all([machine.rested()])
        except KeyboardInterrupt:
            if not records:
                raise
            note_all((machine.rested(), "stopped by Ctrl-C before the end: some figures have fewer repeats, or are missing"))
            return records, True
    return records, False


def measure_joules(
    bundle: Path, request: BenchRequest, load: LoadOptions, path: Path, meter: Meter, minutes: int | None, run: str
) -> tuple[EnergyReport | None, RunLog]:
    """Runs the energy protocol over the same variants, as a part of the run named `run`. Raises DeviceError if that is not possible."""
    with ExitStack() as stack, BenchScreen() as screen:
        busy_before(screen)
        benchmark = Benchmark(bundle, request, screen.shows(load))
        ConditionsWatch(waiting=screen.wait)  # lets a warm machine rest: the protocol refuses one that throttles
        recording = "; its recording must run from now until the end" if meter.facts.name == EXTERNAL else ""
        screen.message(f"energy: {meter.facts.name}; measuring idle, warm-up and repeats{recording}")
        threads = request.threads or default_threads()
        workloads = benchmark.energy_workloads(stack)
        return measure_energy(path, meter, workloads, threads=threads, minutes=minutes, run=run, waiting=screen.wait, notify=screen.message)


def busy_before(screen: BenchScreen) -> str:
    """Shows and returns a sentence if the machine is busy before the first run. Otherwise returns an empty string."""
    before = load_now()
    text = f"before the first run, {before.sentence()}" if before.is_busy else ""
    if text:
        screen.message(text)
    return text


@click.group(cls=PanelGroup, out_of_memory=OUT_OF_MEMORY)
@click.version_option(package_name="edge-mtp")
def main() -> None:
    """Measure bundles on this device. Tables and pages are made of the records elsewhere: edge-bench report FILE."""


@main.command()
@click.argument("bundle", type=BundlePath())
@takes("request", BenchRequest)
@takes("load", LoadOptions, only=LOADING)
@takes("files", RecordOptions)
def run(bundle: Path, request: BenchRequest, load: LoadOptions, files: RecordOptions) -> None:
    """Measure BUNDLE on this machine, plainly and with drafts in turn."""
    measure_bundle(bundle, request, load, files).end(files.energy)
