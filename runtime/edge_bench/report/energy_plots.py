"""The plots of an energy measurement: power over time, joules per token, joules by phase. Each names the meter's scope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from edge_bench.report.svg import COLOURS, INK, Plot, draw_svg, label_text, legend, name_rows, stacked_bars
from edge_devices.energy.intervals import Interval
from edge_devices.energy.report import EnergyReport, VariantEnergy, exclusion_reasons
from edge_devices.energy.run_log import RunLog
from edge_devices.meters.base import Kind
from edge_devices.meters.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 1500  # per curve: more are not distinguishable on a page
LONG_S = 600.0  # longer recordings have their time axis in minutes
IDLE_COLOUR, REFUSED_HATCH = "#8c8c8c", "xx"


def energy_plots(report: EnergyReport, log: RunLog | None = None) -> list[Plot]:
    """Returns all plots that have data; the power plot needs the log."""
    where = f"scope {report.scope} ({report.meter})"
    mark = "ESTIMATE, nothing was measured: " if report.estimate else ""
    tokens = any(variant.joules_per_output_token for variant in report.variants)
    candidates: list[tuple[str, str, object, Callable[[Axes], None]]] = [
        *([("power", "Power over time", True, partial(_draw_power, log=log))] if log else []),
        ("energy", "Joules per emitted token", tokens, partial(_draw_tokens, report=report)),
        ("energy-phases", "Joules per request by phase", _split(report), partial(_draw_phases, report=report)),
    ]
    return [draw_svg(name, f"{mark}{title}, {where}", draw) for name, title, data, draw in candidates if data]


def power_curve(trace: Trace, points: int = MAX_POINTS) -> list[tuple[float, float, float]]:
    """Returns (start, end, mean watts) of spans of at least 1/`points` of the trace, in seconds; for a counter, between new values."""
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
    """Draws bars that include idle power, and the part above idle as a second, thinner bar."""
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
    axes.set_xlabel(f"joules per emitted token with 95 % intervals, scope {report.scope}")


def _reaches_below_zero(variants: Sequence[VariantEnergy]) -> bool:
    every = [joules for v in variants for joules in (v.joules_per_output_token, v.net_joules_per_output_token) if joules is not None]
    return any(joules.half < float("inf") and joules.value < joules.half for joules in every)


def _interval(axes: Axes, joules: Interval, place: float) -> None:
    if 0 < joules.half < float("inf"):
        axes.errorbar(joules.value, place, xerr=joules.half, color=INK, linewidth=1, capsize=3)


def _split(report: EnergyReport) -> list[VariantEnergy]:
    return [variant for variant in report.variants if len(variant.phase_joules) > 1]


def _draw_phases(axes: Axes, report: EnergyReport) -> None:
    variants = _split(report)
    parts = {
        phase: [variant.phase_joules[phase].value if phase in variant.phase_joules else 0.0 for variant in variants]
        for phase in dict.fromkeys(phase for variant in variants for phase in variant.phase_joules)
    }
    stacked_bars(axes, [f"{variant.name}\n({variant.phase_method.replace('_', ' ')})" for variant in variants], parts)
    axes.set_xlabel(f"joules per request, scope {report.scope}")
