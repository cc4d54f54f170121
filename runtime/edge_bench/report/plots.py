"""The plots of a benchmark's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from edge_bench.measure.variants import FIXED, OURS, PLAIN
from edge_bench.report.energy_plots import energy_plots
from edge_bench.report.figures import Figures, Row
from edge_bench.report.ratios import Ratio
from edge_bench.report.svg import COLOURS, HATCHES, INK, LINES, MARKERS, Plot, draw_svg, label_text, legend, stacked_bars
from edge_bench.report.tables import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# An interval longer than this many times the tallest bar would make the bars unreadable.
WIDEST = 2.0


def all_plots(figures: Figures) -> list[Plot]:
    """Returns all plots that have data. Raises RequestError if the plotting library is missing."""
    candidates: tuple[tuple[str, str, object, Callable[[Axes, Figures], None]], ...] = (
        ("speed-by-domain", "Speed-up over plain decoding by domain", _sped_up(figures), _draw_domains),
        ("speed-by-length", "Speed-up over plain decoding by draft length", _by_length(figures.overall), _draw_lengths),
        ("acceptance", "Acceptance by position, longest fixed length", _longest_fixed(figures), _draw_acceptance),
        ("cost-curve", "Cost of a verify by its rows, and of a draft step", figures.records.cost_curves, _draw_costs),
        ("phases", "Time per token by phase", any(row.phase_seconds_per_token for row in figures.overall), _draw_phases),
        ("contexts", "Tokens per second by prompt length", figures.by_context, _draw_contexts),
    )

    def of_figures(draw: Callable[[Axes, Figures], None]) -> Callable[[Axes], None]:
        return lambda axes: draw(axes, figures)

    plots = [draw_svg(name, title, of_figures(draw)) for name, title, data, draw in candidates if data]
    return plots + (energy_plots(figures.energy, figures.energy_log) if figures.energy else [])


def _style(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def _sped_up(figures: Figures) -> list[Row]:
    """Returns the rows by domain; of the fixed lengths only the best of each program and drafter."""
    rows = [row for row in figures.by_domain if row.speed_up]
    best: dict[tuple[str, str], Row] = {}
    for row in figures.overall:
        key = row.variant.side, row.variant.drafter
        if row.variant.policy == FIXED and row.speed_up:
            former = best[key].speed_up if key in best else None
            if former is None or row.speed_up.value > former.value:
                best[key] = row
    kept = {row.variant for row in best.values()}
    return [row for row in rows if row.variant.policy != FIXED or row.variant in kept]


def _draw_domains(axes: Axes, figures: Figures) -> None:
    rows = _sped_up(figures)
    domains = list(dict.fromkeys(row.domain or "" for row in rows))
    variants = list(dict.fromkeys(row.variant for row in rows))
    width = 0.8 / len(variants)
    shown = [row.speed_up for row in rows if row.speed_up]
    limit = WIDEST * max(1.0, *(r.value for r in shown))
    top = max(1.0, *(r.value for r in shown), *(min(r.high, limit) for r in shown if r.high is not None))
    with legend(axes):
        for number, variant in enumerate(variants):
            own = [row for row in rows if row.variant == variant]
            places = [domains.index(row.domain or "") + (number - (len(variants) - 1) / 2) * width for row in own]
            ratios = [row.speed_up for row in own if row.speed_up]
            label = variant.label + (" (its best length)" if variant.policy == FIXED else "")
            hatch = HATCHES[number // len(COLOURS) % len(HATCHES)]
            axes.bar(places, [r.value for r in ratios], width, label=label_text(label), color=COLOURS[number % len(COLOURS)], hatch=hatch)
            for place, r in zip(places, ratios, strict=True):
                _whisker(axes, place, r, limit)
    axes.axhline(1, color=INK, linewidth=1, linestyle="--")
    axes.set_ylim(0, 1.08 * top)
    axes.set_xticks(range(len(domains)), [label_text(d) for d in domains])
    axes.set_ylabel("speed-up over plain")
    axes.grid(visible=False, axis="x")


def _whisker(axes: Axes, place: float, ratio: Ratio, limit: float) -> None:
    """Draws an interval; one that reaches beyond `limit` ends in an arrow with its end as a number."""
    if ratio.low is None or ratio.high is None:
        return
    axes.plot([place, place], [ratio.low, min(ratio.high, limit)], color=INK, linewidth=1)
    if ratio.high > limit:
        axes.plot([place], [limit], color=INK, marker="^", markersize=5)
        axes.annotate(f"{ratio.high:.3g}", (place, limit), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=8, color=INK)


def _by_length(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.variant.policy == FIXED and row.speed_up]


def _draw_lengths(axes: Axes, figures: Figures) -> None:
    """Draws one colour per domain, one line style per drafter or program."""
    rows = _by_length((*figures.by_domain, *figures.overall))
    with legend(axes):
        for (who, domain), style in _styles([(_who(row), row.domain or "all domains") for row in rows]).items():
            own = sorted(
                (row for row in rows if (_who(row), row.domain or "all domains") == (who, domain)), key=lambda r: r.variant.length or 0
            )
            bold = {"linewidth": 3.0, "color": INK} if domain == "all domains" else {}
            values = [row.speed_up.value for row in own if row.speed_up]
            axes.plot([row.variant.length for row in own], values, label=label_text(f"{who}, {domain}"), **{**style, **bold})
    axes.axhline(1, color=INK, linewidth=1, alpha=0.5)
    axes.set_xlabel("draft length")
    axes.set_ylabel("speed-up over plain")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _who(row: Row) -> str:
    return row.variant.drafter if row.variant.side == OURS else row.variant.side


def _styles(series: list[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns a colour and marker for each second name, and a line style for each first name."""
    first, second = (list(dict.fromkeys(pair[i] for pair in series)) for i in (0, 1))
    return {(a, b): {**_style(second.index(b)), "linestyle": LINES[first.index(a) % len(LINES)]} for a, b in dict.fromkeys(series)}


def _longest_fixed(figures: Figures) -> list[Row]:
    """Returns the rows by domain of each drafter's longest fixed length, which drafts every position in every round."""
    rows = [row for row in figures.by_domain if row.variant.policy == FIXED and row.acceptance_by_position]
    longest = {row.variant.drafter: 0 for row in rows}
    for row in rows:
        longest[row.variant.drafter] = max(longest[row.variant.drafter], row.variant.length or 0)
    return [row for row in rows if row.variant.length == longest[row.variant.drafter]]


def _draw_acceptance(axes: Axes, figures: Figures) -> None:
    rows = _longest_fixed(figures)
    styles = _styles([(row.variant.drafter, row.domain or "") for row in rows])
    with legend(axes):
        for row in rows:
            who, shares = (row.variant.drafter, row.domain or ""), row.acceptance_by_position
            axes.plot(range(1, len(shares) + 1), [100 * share for share in shares], label=label_text(", ".join(who)), **styles[who])
    axes.set_ylim(0, 102)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, %")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_costs(axes: Axes, figures: Figures) -> None:
    with legend(axes):
        for number, curve in enumerate(figures.records.cost_curves):
            milliseconds = [1000 * seconds for seconds in curve.verify_seconds]
            axes.plot(range(1, len(milliseconds) + 1), milliseconds, label=label_text(f"verify, with {curve.drafter}"), **_style(number))
            if curve.draft_step_seconds is not None:
                step = 1000 * curve.draft_step_seconds
                axes.axhline(step, linestyle="--", color=COLOURS[number % len(COLOURS)], label=label_text(f"draft step, {curve.drafter}"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows")
    axes.set_ylabel("ms")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_phases(axes: Axes, figures: Figures) -> None:
    rows = [(row.variant.label, row.phase_seconds_per_token) for row in figures.overall if row.phase_seconds_per_token]
    stacked_bars(axes, [label for label, _ in rows], {phase: [1000 * seconds[phase] for _, seconds in rows] for phase in PHASES})
    axes.set_xlabel("ms per emitted token")


def _draw_contexts(axes: Axes, figures: Figures) -> None:
    variants = list(dict.fromkeys(row.variant for row in figures.by_context))
    with legend(axes):
        for number, variant in enumerate(variants):
            rows = [row for row in figures.by_context if row.variant == variant]
            line = "--" if variant.policy == PLAIN else "-"
            lengths = [int(row.domain or 0) for row in rows]
            axes.plot(lengths, [row.tokens_per_second for row in rows], line, label=label_text(variant.label), **_style(number))
    axes.set_xscale("log", base=2)
    ticks = sorted({int(row.domain or 0) for row in figures.by_context})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("tok/s")
