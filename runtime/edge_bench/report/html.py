"""The HTML pages, which load nothing else: the report with plots and tables of all figures, energy, and the quality of bundles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from jinja2 import Environment

from edge_bench.measure.quality import BundleQuality, QualityResult
from edge_bench.report.figures import Figures
from edge_bench.report.plots import COLOURS, INK, MARKERS, Plot, all_plots, draw_svg, energy_plots, label_text, legend
from edge_bench.report.tables import (
    Columns,
    TextTable,
    all_tables,
    energy_tables,
    machine_line,
    megabytes,
    meter_table,
    notes,
    share,
    table_of,
    verdict,
)
from edge_devices.energy.report import EnergyReport, head_lines
from edge_devices.energy.run_log import RunLog
from edge_devices.meters.base import scope_words
from edge_runtime.decoding.quality import RowFigures

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_NOTE = (
    "Mean KL(reference || bundle) of the next token in nats, with its standard error as if tokens were independent. In brackets the"
    " reference's perplexity. Same first choice: the likeliest token is the reference's own, or ties with it. The texts are old English"
    " prose, and code and documentation of this project. A model that saw little text guesses there and has a perplexity of thousands:"
    " compare it with the reference's, not with that of another model."
)


@dataclass(frozen=True, kw_only=True)
class _Line:
    of: BundleQuality
    text: str
    rows: RowFigures


_COLUMNS: Columns[_Line] = (
    ("", lambda line: line.of.label),
    ("model MB", lambda line: megabytes(line.of.target_bytes)),
    ("text", lambda line: line.text),
    ("tokens", lambda line: str(line.rows.quality.rows)),
    ("mean KL", lambda line: f"{line.rows.quality.mean_kl:.3g} ± {line.rows.kl_error:.1g}"),
    ("perplexity", lambda line: f"{line.rows.quality.perplexity:.4g} ({line.rows.quality.reference_perplexity:.4g})"),
    ("same first choice", lambda line: share(line.rows.quality.greedy_agreement)),
)


def quality_tables(result: QualityResult) -> list[TextTable]:
    """Returns a table with rows for each bundle on each engine: all texts together, then each kind of text."""
    lines = [_Line(of=each, text=text, rows=rows) for each in result.bundles for text, rows in {"all": each.overall, **each.texts}.items()]
    note = " ".join([_NOTE, *(f"Warning: {text}." for text in result.warnings)])
    return [table_of("quality", f"Answers beside {result.reference}", lines, _COLUMNS, note)]


def quality_plots(result: QualityResult) -> list[Plot]:
    """Returns the plot of KL over bytes; an empty list for a single measurement. Raises RequestError if the plotting library is missing."""
    if len(result.bundles) < 2:
        return []

    def draw(axes: Axes) -> None:
        with legend(axes):
            for number, each in enumerate(result.bundles):
                style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "linestyle": "none"}
                kl, error = each.overall.quality.mean_kl, each.overall.kl_error
                axes.errorbar(each.target_bytes / 1e6, kl, yerr=error, ecolor=INK, label=label_text(each.label), **style)
        axes.set_xlabel("bytes of the model, MB")
        axes.set_ylabel("mean KL, nats")
        axes.set_ylim(bottom=0)

    return [draw_svg("quality", f"Mean KL over bytes, beside {result.reference}", draw)]


# The plots that are shown before each table.
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
    """Returns the page of a benchmark. Raises RequestError if the plotting library is missing."""
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
    """Returns a page of tables, with the plots that `PLOT_OF_TABLE` puts before them."""
    return _document(title, [], [], tables, plots)


def _document(
    title: str, head: Sequence[str], remarks: Sequence[str], tables: Sequence[TextTable], drawn: Sequence[Plot], sentence: str = ""
) -> str:
    """Returns the page, which loads nothing. All values except plots are escaped, so that no text of the records can run as a script."""
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    )
    plots = {plot.name: plot for plot in drawn}
    shown = {table.name: [plots[name] for name in PLOT_OF_TABLE.get(table.name, ()) if name in plots] for table in tables}
    return template.render(title=title, head=head, remarks=remarks, tables=tables, plots=shown, sentence=sentence) + "\n"
