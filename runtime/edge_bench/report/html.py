"""The report as one self-contained HTML page, with plots and tables of all figures, in dark and light colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from edge_bench.report.figures import Figures
from edge_bench.report.plots import Plot, all_plots, energy_plots
from edge_bench.report.tables import TextTable, all_tables, energy_tables, machine_line, meter_table, notes, verdict
from edge_devices.energy.report import EnergyReport
from edge_devices.energy.run_log import RunLog
from edge_devices.energy.text import report_lines

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --line: #d0d7de; --soft: #57606a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #14181d; --line: #3a434d; --soft: #9aa5b1; } }
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
figure { margin: 1rem 0; } figure svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; } .verdict { font-size: 1.2rem; }
th:first-child, td:first-child { text-align: left; } .note, caption { color: var(--soft); font-size: .9rem; text-align: left; }
"""
# The plots shown before each table.
PLOT_OF_TABLE = {
    "domains": ("speed-by-domain", "speed-by-length"),
    "acceptance": ("acceptance",),
    "costs": ("cost-curve",),
    "phases": ("phases",),
    "contexts": ("contexts",),
    "energy": ("power", "energy"),
    "energy-phases": ("energy-phases",),
}


def report_page(figures: Figures) -> str:
    """Returns the page. Raises RequestError if the plotting library is missing."""
    header = figures.records.header
    title, head = f"edge-bench: {header.bundle}", [machine_line(header)]
    return _document(title, head, notes(figures), all_tables(figures), all_plots(figures), verdict(figures))


def energy_page(report: EnergyReport, log: RunLog) -> str:
    """Returns the page of an energy measurement alone. Raises RequestError if the plotting library is missing."""
    machine, meter = log.environment, report_lines(report)
    processor = machine.get("processor") or machine.get("model") or "unknown processor"
    where = f"{processor}, {machine.get('processors', '?')} processors; {machine.get('platform', '?')}"
    head = [where, *meter[: 2 if report.idle else 1]]
    return _document(
        f"Energy: {report.meter}, scope {report.scope}",
        head,
        report.warnings,
        [*energy_tables(report), meter_table(log)],
        energy_plots(report, log),
    )


def tables_page(title: str, tables: Sequence[TextTable]) -> str:
    """Returns a page of tables alone."""
    return _document(title, [], [], tables, [])


def _document(
    title: str, head: Sequence[str], remarks: Sequence[str], tables: Sequence[TextTable], drawn: Sequence[Plot], sentence: str = ""
) -> str:
    plots = {plot.name: plot for plot in drawn}
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # Loads nothing, and prevents text of the records from running as a script.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">",
        f"<title>{escape(title)}</title>",
        f"<style>{CSS}</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(title)}</h1>",
        *([f'<p class="verdict">{escape(sentence)}</p>'] if sentence else []),
        *(f"<p>{escape(line)}</p>" for line in head),
        *(f'<p class="note">{escape(text)}</p>' for text in remarks),
    ]
    for table in tables:
        parts.append(f'<section id="{table.name}"><h2>{escape(table.title)}</h2>')
        parts += [_figure(plots[name]) for name in PLOT_OF_TABLE.get(table.name, ()) if name in plots]
        parts += [_table(table), "</section>"]
    return "\n".join([*parts, "</body>", "</html>"]) + "\n"


def _figure(plot: Plot) -> str:
    return f'<figure id="plot-{plot.name}"><figcaption class="note">{escape(plot.title)}</figcaption>{plot.svg}</figure>'


def _table(table: TextTable) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}'
