"""`edge-bench run`: measures a bundle on this machine and reports the figures."""

from __future__ import annotations

from pathlib import Path

import click

from edge_bench.cli.outputs import Outputs
from edge_bench.measure.command import RecordOptions, measure_bundle
from edge_bench.measure.request import LOADING, BenchRequest
from edge_bench.report.figures import figures
from edge_devices.command_line import PanelCommand, takes
from edge_runtime.cli.options import BundlePath
from edge_runtime.session.load_options import LoadOptions


@click.command(cls=PanelCommand)
@click.argument("bundle", type=BundlePath())
@takes("request", BenchRequest)
@takes("load", LoadOptions, only=LOADING)
@takes("files", RecordOptions)
@takes("outputs", Outputs)
def run(bundle: Path, request: BenchRequest, load: LoadOptions, files: RecordOptions, outputs: Outputs) -> None:
    """Measure BUNDLE on this machine, plainly and with drafts in turn."""
    outputs.check()
    measured = measure_bundle(bundle, request, load, files)
    outputs.write(figures(measured.records, measured.energy, measured.log if measured.energy else None))
    measured.end(files.energy)
