"""`edge-bench report`: computes the figures of records, of an energy log, or of both again; of several records in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from edge_bench.cli.outputs import Outputs
from edge_bench.devices.record_files import read_record_files
from edge_bench.measure.energy import read_energy
from edge_bench.measure.progress import note
from edge_bench.measure.records import read_records
from edge_bench.report.figures import figures
from edge_devices.command_line import PanelCommand, takes
from edge_devices.energy.external.table import COLUMNS_HELP
from edge_devices.energy.run_log import is_energy_log
from edge_runtime.errors import RequestError


@click.command(cls=PanelCommand)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--energy", type=click.Path(path_type=Path), help="The energy log of the same run, where FILE is from --runs.")
@click.option(
    "--external",
    type=click.Path(path_type=Path),
    metavar="TABLE",
    help="Use this table of an external meter in place of the energy log's readings.",
)
@click.option("--columns", metavar="KEY=NAME,...", help=COLUMNS_HELP)
@takes("outputs", Outputs)
def report(files: tuple[Path, ...], energy: Path | None, external: Path | None, columns: str | None, outputs: Outputs) -> None:
    """Compute the figures of FILEs again, which --runs or --energy wrote.

    Several FILEs, such as those that others sent, share one table; each is checked first, and what is left out is named.
    """
    outputs.check()
    if columns is not None and external is None:
        raise click.UsageError("--columns is for the table of --external; add it, or leave --columns out")
    if len(files) > 1:
        if energy or external or outputs.markdown or outputs.trace:
            raise click.UsageError("--energy, --external, --markdown and --trace are for a single FILE; give energy logs among the FILEs")
        _report_all(files, outputs)
        return
    (file,) = files
    if file.exists() and not file.is_file():
        raise RequestError(f"{file} is not a regular file; give a file that edge-bench run --runs wrote")
    if is_energy_log(file):
        if energy is not None:
            raise RequestError(f"{file} is an energy log itself; --energy is for a file from --runs")
        outputs.write_energy(*read_energy(file, external, columns))
        return
    if external is not None and energy is None and file.exists():  # a file that is not there is refused below
        raise RequestError(f"--external needs an energy log, which {file} is not; add --energy LOG")
    joules, log = read_energy(energy, external, columns) if energy else (None, None)
    records = read_records(file)
    of_run = str(log.environment.get("run", "")) if log else ""
    if records.header.run and of_run and of_run != records.header.run:
        records = replace(records, notes=(*records.notes, f"the joules are of another run: {energy}"))
    outputs.write(figures(records, joules, log))


def _report_all(files: Sequence[Path], outputs: Outputs) -> None:
    results, refused = read_record_files(files)
    outputs.write_devices(results, ())
    for text in refused:
        note(f"left out: {text}")
