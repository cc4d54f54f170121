"""The report as one self-contained HTML page, with plots and tables of all figures, in dark and light colours."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment

from edge_bench.report.energy_tables import energy_tables, meter_table
from edge_bench.report.figures import Figures
from edge_bench.report.plots import Plot, all_plots, energy_plots
from edge_bench.report.tables import all_tables, machine_line, notes, verdict
from edge_bench.report.text_table import TextTable
from edge_devices.energy.report import EnergyReport, head_lines
from edge_devices.energy.run_log import RunLog
from edge_devices.meters.base import scope_words

# The plots shown before each table.
PLOT_OF_TABLE = {
    "domains": ("speed-by-domain", "speed-by-length"),
    "acceptance": ("acceptance",),
    "costs": ("cost-curve",),
    "phases": ("phases",),
    "contexts": ("contexts",),
    "energy": ("power", "energy"),
    "quality": ("quality",),
    "energy-phases": ("energy-phases",),
}


def report_page(figures: Figures) -> str:
    """Returns the page. Raises RequestError if the plotting library is missing."""
    header = figures.records.header
    title, head = f"edge-bench: {header.bundle}", [machine_line(header)]
    return _document(title, head, notes(figures), all_tables(figures), all_plots(figures), verdict(figures))


def energy_page(report: EnergyReport, log: RunLog) -> str:
    """Returns the page of an energy measurement alone. Raises RequestError if the plotting library is missing."""
    machine = log.environment
    processor = machine.get("processor") or machine.get("model") or "unknown processor"
    where = f"{processor}, {machine.get('processors', '?')} processors; {machine.get('platform', '?')}"
    head = [where, *head_lines(report)]
    return _document(
        f"Energy: {report.meter}, scope {scope_words(report.scope)}",
        head,
        report.warnings,
        [*energy_tables(report), meter_table(log)],
        energy_plots(report, log),
    )


def tables_page(title: str, tables: Sequence[TextTable], plots: Sequence[Plot] = ()) -> str:
    """Returns a page of tables, and of plots that `PLOT_OF_TABLE` puts before them."""
    return _document(title, [], [], tables, plots)


def _document(
    title: str, head: Sequence[str], remarks: Sequence[str], tables: Sequence[TextTable], drawn: Sequence[Plot], sentence: str = ""
) -> str:
    """Returns the page, which loads nothing; text of the records cannot run as a script. All values but the plots are escaped."""
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    )
    plots = {plot.name: plot for plot in drawn}
    shown = {table.name: [plots[name] for name in PLOT_OF_TABLE.get(table.name, ()) if name in plots] for table in tables}
    return template.render(title=title, head=head, remarks=remarks, tables=tables, plots=shown, sentence=sentence) + "\n"
