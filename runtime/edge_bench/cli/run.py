"""`edge-bench run` and `edge-bench quality`: measure the speed of bundles on this machine, and how well they keep a model's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from edge_bench.cli.report import Outputs
from edge_bench.devices.results import ENERGY, RUNS, DeviceResult
from edge_bench.measure.command import BenchResult, RecordOptions, measure_bundle
from edge_bench.measure.progress import BenchScreen, note
from edge_bench.measure.quality import QUALITY_LOADING, QualityRequest, measure_quality
from edge_bench.measure.request import LOADING, BenchRequest, DeviceList
from edge_bench.report.figures import Figures, figures
from edge_devices.command_line import PanelCommand, takes
from edge_devices.errors import EdgeError, errors_as
from edge_runtime.backends.selection import check_device
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.cli.options import BundlePath, refuse_threads
from edge_runtime.errors import RequestError
from edge_runtime.session.load_options import LoadOptions


@click.command(cls=PanelCommand)
@click.argument("bundle", type=BundlePath())
@takes("request", BenchRequest)
@takes("load", LoadOptions, only=LOADING)
@takes("files", RecordOptions)
@takes("outputs", Outputs)
@takes("chosen", DeviceList)
def run(bundle: Path, request: BenchRequest, load: LoadOptions, *, files: RecordOptions, outputs: Outputs, chosen: DeviceList) -> None:
    """Measure BUNDLE on this machine, plainly and with drafts in turn."""
    outputs.check()
    if chosen.devices:
        run_on_each(chosen.devices, bundle, request, load, files=files, outputs=outputs)
        return
    measured = measure_bundle(bundle, request, load, files, lambda records: outputs.show_speeds(figures(records)))
    outputs.write(_figures(measured), speeds_shown=measured.speeds_shown)
    measured.end(files.energy)


def run_on_each(
    devices: Sequence[str], bundle: Path, request: BenchRequest, load: LoadOptions, *, files: RecordOptions, outputs: Outputs
) -> None:
    """Measures on each device and shows all side by side. Each device has its own folder of records.

    Ctrl-C or an error ends all of it, but what was measured before is shown. Raises RequestError for a device that does not exist.
    """
    if outputs.trace is not None and len(devices) > 1:
        raise click.UsageError("--trace is for the runs of a single device; leave it out, or name one device")
    opened = open_bundle(bundle, check="none")  # each measurement checks it
    for name in devices:
        check_device(opened, load.backend, name)
    measured, results, failures = list[tuple[BenchResult, Path | None]](), list[DeviceResult](), list[BaseException]()
    for name in devices:
        note(f"device {name}")
        try:
            its_files = _files_of(name, files)
            measured.append((measure_bundle(bundle, request, replace(load, device=name), its_files), its_files.energy))
        except (EdgeError, MemoryError, KeyboardInterrupt) as failure:
            if not measured:
                raise
            failures.append(failure)
            break
        figures = _figures(measured[-1][0])
        results.append(DeviceResult(device=name, run=figures.records.header.created_at, figures=figures))
        if measured[-1][0].stopped:
            break
    outputs.write_devices(results, ())
    _end(measured, failures)


def _files_of(name: str, files: RecordOptions) -> RecordOptions:
    """Returns the files of a device, in its own folders, which are created."""
    places = [None if folder is None else folder / name.replace(":", "-") for folder in (files.runs, files.energy)]
    for place in filter(None, places):
        with errors_as(RequestError, f"{place} cannot be created", "choose another folder"):
            place.mkdir(parents=True, exist_ok=True)
    runs, energy = (place and place / file for place, file in zip(places, (RUNS, ENERGY), strict=True))
    return replace(files, runs=runs, energy=energy)


def _end(measured: Sequence[tuple[BenchResult, Path | None]], failures: Sequence[BaseException]) -> None:
    """Reports which measurements failed. Raises the last error, since only that may be Ctrl-C; the errors before it become notes."""
    ends = list[BaseException]()
    for each, energy in measured:
        try:
            each.end(energy)
        except (EdgeError, SystemExit) as failure:
            ends.append(failure)
    ends += failures
    for before in ends[:-1]:
        note(str(before))
    if ends:
        raise ends[-1]


def _figures(measured: BenchResult) -> Figures:
    return figures(measured.records, measured.energy, measured.log if measured.energy else None)


@click.command(cls=PanelCommand)
@click.argument("bundles", metavar="BUNDLE...", nargs=-1, required=True, type=BundlePath())
@takes("request", QualityRequest)
@takes("load", LoadOptions, only=QUALITY_LOADING)
@takes("outputs", Outputs, only=["json_path", "html"])
def quality(bundles: tuple[Path, ...], request: QualityRequest, load: LoadOptions, outputs: Outputs) -> None:
    """Compare the answers of BUNDLEs with those of their checkpoint, or of another bundle, on English, code and chat.

    Each is run on every engine that it has files for, unless --backend names one.
    """
    outputs.check()
    refuse_threads(request.threads)
    with BenchScreen() as screen:
        result = measure_quality(bundles, request, screen.shows(load))
    outputs.write_quality(result)
