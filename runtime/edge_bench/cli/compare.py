"""`edge-bench compare`: shows the results of several devices side by side."""

from __future__ import annotations

from pathlib import Path

import click

from edge_bench.cli.outputs import Outputs
from edge_bench.devices.results import find_results
from edge_bench.measure.progress import note
from edge_devices.command_line import PanelCommand, takes


@click.command(cls=PanelCommand)
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path))
@takes("outputs", Outputs, only=["json_path", "csv_path", "html", "wide"])
def compare(folders: tuple[Path, ...], outputs: Outputs) -> None:
    """Compare the results of devices below the FOLDERs."""
    results, failures = find_results(folders)
    outputs.write_devices(results, folders)
    for text in failures:
        note(f"left out: {text}")
