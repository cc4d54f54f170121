"""The plots of a benchmark's figures and of an energy measurement, as SVG in the page's text colour, readable in dark and light mode.

Energy plots name the meter's scope. This is the only module that imports matplotlib."""

from __future__ import annotations

import importlib.util
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from edge_bench.measure.records import FIXED, OURS, PLAIN, Variant
from edge_bench.report.figures import Figures, Ratio, Row
from edge_bench.report.tables import NOT_DETERMINED, PHASE_NAMES
from edge_devices.energy.intervals import Interval
from edge_devices.energy.report import EnergyReport, VariantEnergy, exclusion_reasons
from edge_devices.energy.run_log import RunLog
from edge_devices.files.user_cache import cache_folder
from edge_devices.meters.base import Kind, Trace
from edge_runtime.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# A placeholder for the page's text colour. No series uses this colour.
INK = "#010203"
# Okabe and Ito's colours for colour-blind readers, adjusted to a contrast of 3 : 1 on both white and near black.
COLOURS = ("#0072b2", "#c47f00", "#009e73", "#cc79a7", "#d55e00", "#3c95cf", "#8c8c8c", "#978800")
LINES = ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx")
MARKERS = "os^Dv<>P"
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.labelcolor": INK,
    "legend.frameon": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.transparent": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot: its name, its title and its SVG element."""

    name: str
    title: str
    svg: str


def require_library() -> None:
    """Raises RequestError if the plotting library is missing. Called before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError("the HTML report needs matplotlib; install it with: pip install 'edge-mtp[report]'")


def draw_svg(name: str, title: str, draw: Callable[[Axes], None]) -> Plot:
    """Returns the plot that `draw` makes on its axes. Raises RequestError if the plotting library is missing."""
    require_library()
    os.environ.setdefault("MPLCONFIGDIR", str(cache_folder() / "matplotlib"))  # for its font list; read when it is imported
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(8.5, 4.6), layout="constrained")
        draw(figure.add_subplot())
        with io.StringIO() as file:
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
            text = file.getvalue()
    return Plot(name=name, title=title, svg=_inline(text[text.index("<svg") :], name, title))


def _inline(svg: str, name: str, title: str) -> str:
    """Converts an SVG file to an inline element with the page's text colour, unique ids and a label for screen readers."""
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", svg, count=1)
    svg = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


@contextmanager
def legend(axes: Axes) -> Iterator[None]:
    """Adds a legend beside the axes if more than one labelled series is drawn within the context."""
    yield
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def stacked_bars(axes: Axes, labels: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Draws a stacked bar for each label, from top to bottom. `parts` has the name of each part and its width for each label."""
    left = [0.0] * len(labels)
    with legend(axes):
        for number, (name, widths) in enumerate(parts.items()):
            axes.barh(range(len(labels)), widths, left=left, label=label_text(name), color=COLOURS[number % len(COLOURS)])
            left = [start + width for start, width in zip(left, widths, strict=True)]
    name_rows(axes, labels)


def name_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Names the rows of horizontal bars, the first on top."""
    axes.set_yticks(range(len(labels)), [label_text(label) for label in labels])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def label_text(label: str) -> str:
    """Escapes a label: matplotlib interprets $ as mathematics and hides labels with a leading underscore."""
    return label.replace("$", r"\$").replace("_", "\u200a_", 1) if label.startswith("_") else label.replace("$", r"\$")


MAX_POINTS = 1500  # per curve; more cannot be distinguished on a page
LONG_S = 600.0  # longer recordings have their time axis in minutes
IDLE_COLOUR, REFUSED_HATCH = "#8c8c8c", "xx"


def energy_plots(report: EnergyReport, log: RunLog | None = None) -> list[Plot]:
    """Returns all plots that have data; the power plot needs the log."""
    where = f"scope {report.scope} ({report.meter})"
    mark = "ESTIMATE, nothing was measured: " if report.estimate else ""
    tokens = any(variant.joules_per_output_token for variant in report.variants)
    candidates: list[tuple[str, str, object, Callable[[Axes], None]]] = [
        *([("power", "Power over time", True, partial(_draw_power, log=log))] if log else []),
        ("energy", "Joules per output token", tokens, partial(_draw_tokens, report=report)),
        ("energy-phases", "Joules per request by phase", _split(report), partial(_draw_energy_phases, report=report)),
    ]
    return [draw_svg(name, f"{mark}{title}, {where}", draw) for name, title, data, draw in candidates if data]


def power_curve(trace: Trace, points: int = MAX_POINTS) -> list[tuple[float, float, float]]:
    """Returns spans of the trace as (start, end, mean watts), with times in seconds.

    Each span lasts at least 1/`points` of the trace. For a counter, it also ends where the counter has a new value.
    """
    counter = trace.facts.kind is Kind.COUNTER
    shortest = (trace.times[-1] - trace.times[0]) / points if trace.times else 0.0
    spans: list[tuple[float, float, float]] = []
    begin, joules = 0, 0.0
    for i in range(1, len(trace.times)):
        joules += trace.values[i] - trace.values[i - 1] if counter else trace.values[i - 1] * (trace.times[i] - trace.times[i - 1])
        seconds = trace.times[i] - trace.times[begin]
        if seconds > 0 and seconds >= shortest and not (counter and trace.values[i] == trace.values[i - 1]):
            spans.append((trace.times[begin], trace.times[i], joules / seconds))
            begin, joules = i, 0.0
    return spans


def _draw_power(axes: Axes, log: RunLog) -> None:
    start = log.trace.times[0]
    long = log.trace.times[-1] - start > LONG_S
    unit_s = 60.0 if long else 1.0

    def at(seconds: float) -> float:
        return (seconds - start) / unit_s

    curve = power_curve(log.trace)
    named: set[str] = set()

    def mark(begin: float, end: float, name: str, colour: str, hatch: str = "") -> None:
        label = label_text(name) if name not in named else None
        named.add(name)
        axes.axvspan(at(begin), at(end), color=colour, alpha=0.3, linewidth=0, label=label)
        if hatch:
            axes.axvspan(at(begin), at(end), facecolor="none", edgecolor=colour, hatch=hatch, linewidth=0)

    with legend(axes):
        for begin, end in log.idles:
            mark(begin, end, "idle", IDLE_COLOUR)
        for begin, end in log.loads:
            mark(begin, end, "load step", IDLE_COLOUR, "//")
        variants = list(dict.fromkeys(run.variant for run in log.runs))
        for run in log.runs:
            colour = COLOURS[variants.index(run.variant) % len(COLOURS)]
            refused = bool(exclusion_reasons(log, run))
            mark(run.start_s, run.end_s, f"{run.variant}, refused" if refused else run.variant, colour, REFUSED_HATCH if refused else "")
        axes.stairs(
            [w for _, _, w in curve], [at(curve[0][0]), *(at(end) for _, end, _ in curve)] if curve else [0.0], color=INK, linewidth=1
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes" if long else "seconds")
    axes.set_ylabel(f"W, scope {log.facts.scope}")


def _draw_tokens(axes: Axes, report: EnergyReport) -> None:
    """Draws a bar for joules with idle power included, and a second, thinner bar for the part above idle."""
    variants = [v for v in report.variants if v.joules_per_output_token]
    with legend(axes):
        for place, variant in enumerate(variants):
            for joules, name, height, colour in (
                (variant.joules_per_output_token, "idle power included", 0.7, COLOURS[0]),
                (variant.net_joules_per_output_token, "above idle", 0.3, COLOURS[1]),
            ):
                if joules is not None:
                    labelled = name not in axes.get_legend_handles_labels()[1]
                    axes.barh(place, joules.value, height, color=colour, label=name if labelled else None)
                    _interval(axes, joules, place + (0.12 if height > 0.5 else -0.05))
    name_rows(axes, [variant.name for variant in variants])
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0] if _reaches_below_zero(variants) else 0.0))
    axes.set_xlabel(f"joules per output token with 95 % intervals, scope {report.scope}")


def _reaches_below_zero(variants: Sequence[VariantEnergy]) -> bool:
    every = [joules for v in variants for joules in (v.joules_per_output_token, v.net_joules_per_output_token) if joules is not None]
    return any(joules.half < float("inf") and joules.value < joules.half for joules in every)


def _interval(axes: Axes, joules: Interval, place: float) -> None:
    if 0 < joules.half < float("inf"):
        axes.errorbar(joules.value, place, xerr=joules.half, color=INK, linewidth=1, capsize=3)


def _split(report: EnergyReport) -> list[VariantEnergy]:
    return [variant for variant in report.variants if len(variant.phase_joules) > 1]


def _draw_energy_phases(axes: Axes, report: EnergyReport) -> None:
    variants = _split(report)
    parts = {
        phase: [variant.phase_joules[phase].value if phase in variant.phase_joules else 0.0 for variant in variants]
        for phase in dict.fromkeys(phase for variant in variants for phase in variant.phase_joules)
    }
    stacked_bars(axes, [f"{variant.name}\n({variant.phase_method.replace('_', ' ')})" for variant in variants], parts)
    axes.set_xlabel(f"joules per request, scope {report.scope}")


def all_plots(figures: Figures) -> list[Plot]:
    """Returns all plots that have data. Raises RequestError if the plotting library is missing."""
    candidates: tuple[tuple[str, str, object, Callable[[Axes, Figures], None]], ...] = (
        ("speed-by-domain", "Speed-up over plain decoding by domain", _sped_up(figures), _draw_domains),
        (
            "speed-by-length",
            "Speed-up over plain decoding by draft length",
            _is_line(row.variant.length for row in _by_length(figures.overall)),
            _draw_lengths,
        ),
        (
            "acceptance",
            "Acceptance by position, longest fixed length",
            any(len(row.acceptance_by_position) > 1 for row in _longest_fixed(figures)),
            _draw_acceptance,
        ),
        ("cost-curve", "Time of a step by the tokens that it checks, and of a drafted token", figures.records.cost_curves, _draw_costs),
        ("phases", "Time per token by phase", any(row.phase_seconds_per_token for row in figures.overall), _draw_phases),
        ("contexts", "Tokens per second by prompt length", _is_line(row.domain for row in figures.by_context), _draw_contexts),
    )

    def of_figures(draw: Callable[[Axes, Figures], None]) -> Callable[[Axes], None]:
        return lambda axes: draw(axes, figures)

    plots = [draw_svg(name, title, of_figures(draw)) for name, title, data, draw in candidates if data]
    return plots + (energy_plots(figures.energy, figures.energy_log) if figures.energy else [])


def _is_line(places: Iterable[object]) -> bool:
    """Whether there is more than one point to draw. A single dot says no more than the table."""
    return len(set(places)) > 1


def _style(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def _sped_up(figures: Figures) -> list[Row]:
    """Returns the rows by domain. Of the fixed lengths, only the best one of each program and drafter is kept."""
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
    shown = [row.speed_up for row in rows if row.speed_up and row.speed_up.determined]
    top = max([1.0, *(r.value for r in shown), *(r.high for r in shown if r.high is not None)])
    with legend(axes):
        for number, variant in enumerate(variants):
            own = [row for row in rows if row.variant == variant]
            places = [domains.index(row.domain or "") + (number - (len(variants) - 1) / 2) * width for row in own]
            bars = [(place, row.speed_up) for place, row in zip(places, own, strict=True) if row.speed_up]
            known = [(place, ratio) for place, ratio in bars if ratio.determined]
            label = variant.label + (" (its best length)" if variant.policy == FIXED else "")
            hatch = HATCHES[number // len(COLOURS) % len(HATCHES)]
            colour = COLOURS[number % len(COLOURS)]
            axes.bar([at for at, _ in known], [r.value for _, r in known], width, label=label_text(label), color=colour, hatch=hatch)
            for place, r in known:
                _whisker(axes, place, r)
            for place, r in bars:
                if not r.determined:  # a bar would show a value that the table calls not determined
                    axes.annotate(NOT_DETERMINED, (place, 0), xytext=(0, 4), textcoords="offset points", ha="center", rotation=90)
    axes.axhline(1, color=INK, linewidth=1, linestyle="--")
    axes.set_ylim(0, 1.08 * top)
    axes.set_xticks(range(len(domains)), [label_text(d) for d in domains])
    axes.set_ylabel("speed-up over plain")
    axes.grid(visible=False, axis="x")


def _whisker(axes: Axes, place: float, ratio: Ratio) -> None:
    """Draws an interval."""
    if ratio.low is not None and ratio.high is not None:
        axes.plot([place, place], [ratio.low, ratio.high], color=INK, linewidth=1)


def _by_length(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.variant.policy == FIXED and row.speed_up]


def _draw_lengths(axes: Axes, figures: Figures) -> None:
    """Draws one colour per domain and one line style per drafter or program."""
    rows = [(_who(row), row.domain or "all domains", row) for row in _by_length((*figures.by_domain, *figures.overall))]
    series = []
    for (who, domain), style in _styles([(who, domain) for who, domain, _ in rows]).items():
        own = sorted((row for *names, row in rows if names == [who, domain]), key=lambda row: row.variant.length or 0)
        bold = {"linewidth": 3.0, "color": INK} if domain == "all domains" else {}
        points = [(row.variant.length or 0, row.speed_up.value) for row in own if row.speed_up]
        series.append((f"{who}, {domain}", points, {**style, **bold}))
    _lines(axes, series, "draft length", "speed-up over plain")
    axes.axhline(1, color=INK, linewidth=1, alpha=0.5)


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
    names = [((row.variant.drafter, row.domain or ""), row) for row in _longest_fixed(figures)]
    styles = _styles([who for who, _ in names])
    shares = [(who, [(place, 100 * share) for place, share in enumerate(row.acceptance_by_position, start=1)]) for who, row in names]
    _lines(axes, [(", ".join(who), points, styles[who]) for who, points in shares], "position in the draft", "accepted, %")
    axes.set_ylim(0, 102)


def _draw_costs(axes: Axes, figures: Figures) -> None:
    with legend(axes):
        for number, curve in enumerate(figures.records.cost_curves):
            points = [(rows, 1000 * seconds) for rows, seconds in enumerate(curve.verify_seconds, start=1)]
            _lines(axes, [(f"step, with {curve.drafter}", points, _style(number))], "tokens", "ms")
            if curve.draft_step_seconds is not None:
                step = 1000 * curve.draft_step_seconds
                axes.axhline(
                    step, linestyle="--", color=COLOURS[number % len(COLOURS)], label=label_text(f"drafted token, {curve.drafter}")
                )
    axes.set_ylim(bottom=0)


def _lines(axes: Axes, series: Iterable[tuple[str, Sequence[tuple[int, float]], Mapping[str, Any]]], x: str, y: str) -> None:
    """Draws a line for each (label, points, style); the x axis has whole numbers."""
    with legend(axes):
        for label, points, style in series:
            axes.plot([at for at, _ in points], [value for _, value in points], label=label_text(label), **style)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_phases(axes: Axes, figures: Figures) -> None:
    rows = [(row.variant.label, row.phase_seconds_per_token) for row in figures.overall if row.phase_seconds_per_token]
    stacked_bars(
        axes, [label for label, _ in rows], {name: [1000 * seconds[phase] for _, seconds in rows] for phase, name in PHASE_NAMES.items()}
    )
    axes.set_xlabel("ms per token")


def _draw_contexts(axes: Axes, figures: Figures) -> None:
    series: dict[Variant, list[tuple[int, float]]] = {}
    for row in figures.by_context:
        series.setdefault(row.variant, []).append((int(row.domain or 0), row.tokens_per_second))
    styles = [{**_style(number), "linestyle": "--" if variant.policy == PLAIN else "-"} for number, variant in enumerate(series)]
    lines = zip((variant.label for variant in series), series.values(), styles, strict=True)
    _lines(axes, lines, "prompt tokens", "tok/s")
    axes.set_xscale("log", base=2)
    ticks = sorted({length for points in series.values() for length, _ in points})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
