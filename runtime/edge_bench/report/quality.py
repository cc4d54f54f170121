"""What bundles keep of a model's answers, as a table and as a plot over bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_bench.measure.quality import BundleQuality, QualityResult
from edge_bench.report.plots import COLOURS, INK, MARKERS, Plot, draw_svg, label_text, legend
from edge_bench.report.tables import megabytes, share
from edge_bench.report.text_table import Columns, TextTable, table_of
from edge_runtime.decoding.quality import RowFigures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NOTE = (
    "Mean KL(reference || bundle) of the next token in nats, with its standard error as if rows were independent. In brackets the"
    " reference's perplexity. Same first choice: the likeliest token is the reference's own, or ties with it."
)


@dataclass(frozen=True, kw_only=True)
class _Line:
    of: BundleQuality
    text: str
    rows: RowFigures


_COLUMNS: Columns[_Line] = (
    ("", lambda line: line.of.label),
    ("target MB", lambda line: megabytes(line.of.target_bytes)),
    ("text", lambda line: line.text),
    ("rows", lambda line: str(line.rows.quality.rows)),
    ("mean KL", lambda line: f"{line.rows.quality.mean_kl:.3g} ± {line.rows.kl_error:.1g}"),
    ("perplexity", lambda line: f"{line.rows.quality.perplexity:.4g} ({line.rows.quality.reference_perplexity:.4g})"),
    ("same first choice", lambda line: share(line.rows.quality.greedy_agreement)),
)


def quality_tables(result: QualityResult) -> list[TextTable]:
    """Returns the table: of each bundle on each engine all texts together, then each kind of text."""
    lines = [_Line(of=each, text=text, rows=rows) for each in result.bundles for text, rows in {"all": each.overall, **each.texts}.items()]
    note = " ".join([_NOTE, *(f"Warning: {text}." for text in result.warnings)])
    return [table_of("quality", f"Answers beside {result.reference}", lines, _COLUMNS, note)]


def quality_plots(result: QualityResult) -> list[Plot]:
    """Returns the plot of KL over bytes; none for a single measurement. Raises RequestError if the plotting library is missing."""
    if len(result.bundles) < 2:
        return []

    def draw(axes: Axes) -> None:
        with legend(axes):
            for number, each in enumerate(result.bundles):
                style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "linestyle": "none"}
                kl, error = each.overall.quality.mean_kl, each.overall.kl_error
                axes.errorbar(each.target_bytes / 1e6, kl, yerr=error, ecolor=INK, label=label_text(each.label), **style)
        axes.set_xlabel("bytes of the target, MB")
        axes.set_ylabel("mean KL, nats")
        axes.set_ylim(bottom=0)

    return [draw_svg("quality", f"Mean KL over bytes, beside {result.reference}", draw)]
