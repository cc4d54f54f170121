"""The outputs of a command's results: tables on standard output, a JSON file, a page."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_bench.devices.results import DeviceResult, comparison_tables
from edge_bench.measure.records import trace_lines
from edge_bench.report.energy_tables import energy_tables
from edge_bench.report.figures import ROWS, Figures
from edge_bench.report.tables import markdown, print_report, verdict
from edge_bench.report.text_table import TextTable, print_tables
from edge_devices.energy.report import EnergyReport
from edge_devices.energy.run_log import RunLog
from edge_devices.files.atomic_write import write_text
from edge_devices.option_fields import option
from edge_runtime.errors import RequestError

if TYPE_CHECKING:
    from edge_bench.measure.quality import QualityResult

STDOUT = "-"


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where results go besides the tables; `json_path` "-" is standard output, in place of the tables."""

    json_path: str | None = option(
        "--json", panel="Results", help="Write the figures to this file; - is standard output, in place of the tables."
    )
    csv_path: Path | None = option(
        "--csv", panel="Results", help="Write the rows of all variants, domains and prompt lengths to this file, as a table."
    )
    trace: Path | None = option(panel="Results", help="Write each round of this program's runs to this file, one JSON line each.")
    markdown: Path | None = option(
        panel="Results", help="Write the report as Markdown to this file, which edge-export publish --figures adds to a model card."
    )
    html: Path | None = option(panel="Results", help="Write a page with plots to this file. Needs edge-mtp[report].")
    wide: bool = option(default=False, panel="Results", help="Also print every figure of joules, in tables of many columns.")

    def check(self) -> None:
        """Raises RequestError before anything is measured if the library for a page with plots is missing."""
        if self.html is not None:
            from edge_bench.report.plots import require_library

            require_library()

    def show_speeds(self, result: Figures) -> None:
        """Prints the tables of a measurement whose joules are still to come."""
        if self.json_path != STDOUT:
            print_report(result)

    def write(self, result: Figures, *, speeds_shown: bool = False) -> None:
        """Writes the figures to all outputs; prints the tables of joules alone where those of speeds are shown already."""
        if self.html is not None:
            from edge_bench.report.html import report_page

            write_text(self.html, [report_page(result)])
        if self.markdown is not None:
            write_text(self.markdown, [markdown(result)])
        if self.trace is not None:
            lines = list(trace_lines(result.records.runs))
            if not lines:
                raise RequestError("these records hold no rounds, as those of earlier versions and of a peer alone; leave --trace out")
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
        """Writes an energy measurement to all outputs. Raises RequestError for those that need the records of --runs."""
        if self.markdown is not None or self.trace is not None:
            raise RequestError("an energy log holds no rounds and no speeds; leave --markdown and --trace out, or give FILE of --runs")
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
        """Writes how well bundles keep a model's answers to all outputs."""
        from edge_bench.report.quality import quality_plots, quality_tables

        tables = quality_tables(result)
        if self.html is not None:
            from edge_bench.report.html import tables_page

            write_text(self.html, [tables_page("edge-bench: quality", tables, quality_plots(result))])
        if self.write_json(result.to_json()):
            print_tables(tables)

    def write_csv(self, lines: Sequence[dict[str, Any]]) -> None:
        """Writes the table if requested: a line for each row, and a column for each path to a plain value, such as `speed_up.low`."""
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
            # Half of a character, which a stranger's record may hold, is none in UTF-8.
            text = json.dumps(record, ensure_ascii=False, allow_nan=False, indent=1).encode("utf-8", "replace").decode() + "\n"
            if self.json_path == STDOUT:
                click.echo(text, nl=False)
            else:
                write_text(Path(self.json_path), [text])
        return self.json_path != STDOUT


def _row_lines(figures: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"part": part, **row} for part in ROWS for row in figures[part]]


def _plain_values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the plain values within a value, each with its path."""
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
