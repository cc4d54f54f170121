"""`edge-bench report` and `edge-bench compare`, and the outputs that all commands share: tables, files and a page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_bench.devices.results import DeviceResult, comparison_tables, find_results, read_record_files
from edge_bench.measure.energy import read_energy
from edge_bench.measure.progress import note
from edge_bench.measure.records import read_records, trace_lines
from edge_bench.report.figures import ROWS, Figures, figures
from edge_bench.report.tables import TextTable, energy_tables, markdown, print_report, print_tables, verdict
from edge_devices.command_line import PanelCommand, takes
from edge_devices.energy.external.columns import COLUMNS_HELP
from edge_devices.energy.report import EnergyReport
from edge_devices.energy.run_log import RunLog, is_energy_log
from edge_devices.files.atomic_write import write_text
from edge_devices.option_fields import option
from edge_runtime.errors import RequestError

if TYPE_CHECKING:
    from edge_bench.measure.quality import QualityResult


STDOUT = "-"


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where results go besides the tables. `json_path` "-" is standard output, in place of the tables."""

    json_path: str | None = option(
        "--json", panel="Results", help="Write the figures to this file; - is standard output, in place of the tables."
    )
    csv_path: Path | None = option(
        "--csv", panel="Results", help="Write the rows of all variants, domains and prompt lengths to this file, as a table."
    )
    trace: Path | None = option(panel="Results", help="Write each step of this program's runs to this file, one JSON line each.")
    markdown: Path | None = option(
        panel="Results", help="Write the report as Markdown to this file, which edge-export publish --figures adds to a model card."
    )
    html: Path | None = option(panel="Results", help="Write a page with plots to this file. Needs edge-mtp[report].")
    wide: bool = option(default=False, panel="Results", help="Also print every figure of joules, in tables of many columns.")

    def check(self) -> None:
        """Raises RequestError if the library for plots is needed and missing. Called before anything is measured."""
        if self.html is not None:
            from edge_bench.report.plots import require_library

            require_library()

    def show_speeds(self, result: Figures) -> None:
        """Prints the tables of a measurement before its joules are measured."""
        if self.json_path != STDOUT:
            print_report(result)

    def write(self, result: Figures, *, speeds_shown: bool = False) -> None:
        """Writes the figures to all outputs. With `speeds_shown`, prints only the tables of joules."""
        if self.html is not None:
            from edge_bench.report.html import report_page

            write_text(self.html, [report_page(result)])
        if self.markdown is not None:
            write_text(self.markdown, [markdown(result)])
        if self.trace is not None:
            lines = list(trace_lines(result.records.runs))
            if not lines:
                raise RequestError("these records hold no steps, as those of earlier versions and of a peer alone; leave --trace out")
            write_text(self.trace, lines)
        record = result.to_json()
        self.write_csv(_row_lines(record))
        if not self.write_json(record):
            return
        if speeds_shown and result.energy is not None:
            tables = energy_tables(result.energy, wide=self.wide)
            print_tables(tables, head=[verdict(result)], notes=result.energy.warnings)
        elif not speeds_shown:
            print_report(result, wide=self.wide)

    def write_energy(self, report: EnergyReport, log: RunLog) -> None:
        """Writes an energy measurement to all outputs. Raises RequestError for outputs that need the records of --runs."""
        if self.markdown is not None or self.trace is not None:
            raise RequestError("an energy log holds no steps and no speeds; leave --markdown and --trace out, or give FILE of --runs")
        if self.html is not None:
            from edge_bench.report.html import energy_page

            write_text(self.html, [energy_page(report, log)])
        record = report.to_json()
        self.write_csv(record["variants"])
        if self.write_json(record):
            print_tables(energy_tables(report, wide=self.wide), notes=report.warnings)

    def write_devices(self, results: Sequence[DeviceResult], places: Sequence[Path]) -> None:
        """Writes the comparison of results, and of the fleets below `places`, to all outputs. Raises RequestError."""
        results = sorted(results, key=lambda result: (result.run, result.device))  # as when they are read again later
        tables = [*comparison_tables(results, wide=self.wide), *_fleet_tables(places)]
        if self.html is not None:
            from edge_bench.report.html import tables_page

            whole = [*comparison_tables(results, wide=True), *_fleet_tables(places)]
            write_text(self.html, [tables_page("edge-bench: devices", whole)])
        records = [result.to_json() for result in results]
        self.write_csv([{"device": each["device"], "run": each["run"], **line} for each in records for line in _row_lines(each["figures"])])
        if self.write_json({"devices": records}):
            print_tables(tables)

    def write_quality(self, result: QualityResult) -> None:
        """Writes the quality of bundles to all outputs."""
        from edge_bench.report.html import quality_plots, quality_tables

        tables = quality_tables(result)
        if self.html is not None:
            from edge_bench.report.html import tables_page

            write_text(self.html, [tables_page("edge-bench: quality", tables, quality_plots(result))])
        if self.write_json(result.to_json()):
            print_tables(tables)

    def write_csv(self, lines: Sequence[dict[str, Any]]) -> None:
        """Writes the CSV file if requested. It has a column for each path to a plain value, such as `speed_up.low`."""
        if self.csv_path is None:
            return
        flat = [dict(_plain_values(line)) for line in lines]
        with io.StringIO() as file:
            table = csv.DictWriter(file, list(dict.fromkeys(key for line in flat for key in line)), lineterminator="\n")
            table.writeheader()
            table.writerows(flat)
            write_text(self.csv_path, [file.getvalue()])

    def write_json(self, record: dict[str, Any]) -> bool:
        """Writes the JSON if requested; returns whether standard output remains for the tables."""
        if self.json_path:
            # A record from elsewhere may hold lone surrogates, which UTF-8 cannot encode.
            text = json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1).encode("utf-8", "replace").decode() + "\n"
            if self.json_path == STDOUT:
                click.echo(text, nl=False)
            else:
                write_text(Path(self.json_path), [text])
        return self.json_path != STDOUT


def _row_lines(figures: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"part": part, **row} for part in ROWS for row in figures[part]]


def _plain_values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the plain values inside a nested value, each with its path."""
    if not isinstance(value, dict | list | tuple):
        yield path, value
        return
    for name, each in value.items() if isinstance(value, dict) else enumerate(value, start=1):
        yield from _plain_values(each, f"{path}.{name}" if path else str(name))


def _fleet_tables(places: Sequence[Path]) -> list[TextTable]:
    """Returns the tables of a fleet's Parquet folders below the folders `places`."""
    folders = [place / "parquet" for place in places if (place / "parquet").is_dir()]
    if not folders:
        return []
    from edge_bench.devices.parquet import fleet_tables

    return [table for folder in folders for table in fleet_tables(folder)]


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
    if external is not None and energy is None and file.exists():  # a missing file is refused below
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


@click.command(cls=PanelCommand)
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path))
@takes("outputs", Outputs, only=["json_path", "csv_path", "html", "wide"])
def compare(folders: tuple[Path, ...], outputs: Outputs) -> None:
    """Compare the results of devices below the FOLDERs."""
    results, failures = find_results(folders)
    outputs.write_devices(results, folders)
    for text in failures:
        note(f"left out: {text}")
