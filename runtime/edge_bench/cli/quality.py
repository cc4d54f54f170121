"""`edge-bench quality`: measures how well bundles keep a model's answers."""

from __future__ import annotations

from pathlib import Path

import click

from edge_bench.cli.outputs import Outputs
from edge_bench.measure.progress import BenchScreen
from edge_bench.measure.quality import LOADING, QualityRequest, measure_quality
from edge_devices.command_line import PanelCommand, takes
from edge_runtime.cli.options import BundlePath, refuse_threads
from edge_runtime.session.load_options import LoadOptions


@click.command(cls=PanelCommand)
@click.argument("bundles", metavar="BUNDLE...", nargs=-1, required=True, type=BundlePath())
@takes("request", QualityRequest)
@takes("load", LoadOptions, only=LOADING)
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
