"""Tables of joules: what drafts take beside plain decoding, and on request every figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from edge_bench.measure.variants import PLAIN
from edge_bench.report.text_table import NONE, Columns, TextTable, table_of
from edge_devices.energy.intervals import Interval
from edge_devices.energy.report import WIDEST_RATIO, EnergyReport, VariantEnergy, figure_text, head_lines
from edge_devices.energy.report import ratio_text as energy_ratio_text
from edge_devices.energy.run_log import RunLog
from edge_devices.meters.base import Kind, scope_words

NOT_DETERMINED = "not determined"


def scope_tables(
    name: str, title: str, columns: Sequence[str], rows: Iterable[tuple[str, bool, tuple[str, ...]]], note: str = ""
) -> list[TextTable]:
    """Returns one table per meter scope, with estimates apart: joules of a package and of a battery do not compare.

    `rows`: scope, whether it is an estimate, and the cells.
    """
    groups: dict[tuple[str, bool], list[tuple[str, ...]]] = {}
    for scope, estimate, cells in rows:
        groups.setdefault((scope, estimate), []).append(cells)
    return [
        TextTable(
            name=f"{name}-{scope}{'-estimate' if estimate else ''}",
            title=scope_title(title, scope, estimate=estimate),
            columns=tuple(columns),
            rows=tuple(cells),
            note=note,
        )
        for (scope, estimate), cells in groups.items()
    ]


def scope_title(title: str, scope: str, *, estimate: bool) -> str:
    """Returns a title that names the meter's scope."""
    return f"{title}, scope {scope_words(scope)}" + (" (ESTIMATE, nothing was measured)" if estimate else "")


def joules(figure: Interval | None) -> str:
    """Returns a figure of an energy report with its interval."""
    return figure_text(figure) if figure else NONE


PROMPT_JOULES: Columns[VariantEnergy] = (
    ("prompt tokens", lambda variant: NONE if variant.prompt_tokens is None else f"{variant.prompt_tokens:.3g}"),
    ("J/prompt token", lambda variant: joules(variant.joules_per_prompt_token)),
)
_ENERGY: Columns[VariantEnergy] = (
    ("", lambda variant: variant.name),
    ("J/output token", lambda variant: joules(variant.joules_per_output_token)),
    ("above idle", lambda variant: joules(variant.net_joules_per_output_token)),
    *PROMPT_JOULES,
    ("J/request", lambda variant: joules(variant.joules_per_request)),
    ("W", lambda variant: joules(variant.watts)),
    ("of plain", lambda variant: energy_ratio_text(variant.ratio_to_baseline) if variant.ratio_to_baseline else NONE),
    ("claim", lambda variant: "" if not variant.ratio_to_baseline else "saves energy" if variant.saves_energy else "no win claimed"),
    ("phases", lambda variant: variant.phase_method),
    ("refused", lambda variant: "; ".join(variant.refused)),
)


def energy_tables(report: EnergyReport, *, wide: bool = True) -> list[TextTable]:
    """Returns the tables of an energy measurement: what drafts cost and save, then if `wide` all figures, and those by phase."""
    rows = tuple((*cells, scope_cell(report)) for cells in comparison_cells(report))
    note = ". ".join([*head_lines(report), *claims(report)]) + "."
    first = TextTable(name="energy", title="Joules per output token", columns=(*COMPARED, "scope"), rows=rows, note=note)
    title = scope_title("Energy, all figures", report.scope, estimate=report.estimate)
    others = [table_of("energy-all", title, report.variants, _ENERGY), _energy_phases(report)] if wide else []
    return [table for table in (first, *others) if table.rows]


# What a reader asks first of joules; the columns of `comparison_cells`.
COMPARED = ("plain", "drafts", "ratio", "interval")
OTHER_WORK = ("image ", "prompt ")  # beginnings of variants that are no way to decode


def comparison_cells(report: EnergyReport) -> list[tuple[str, str, str, str]]:
    """Returns a row for each variant that drafts: joules per token of plain decoding and with drafts, and their ratio with its interval."""
    decoding = [variant for variant in report.variants if not variant.name.startswith(OTHER_WORK)]
    plain = next((variant.joules_per_output_token for variant in decoding if variant.name == PLAIN), None)
    drafting = [variant for variant in decoding if variant.name != PLAIN]
    rows = [
        (_value(plain), f"{_value(each.joules_per_output_token)} ({each.name})", *_ratio_cells(report, each, plain)) for each in drafting
    ]
    return rows or [(_value(plain), NONE, NONE, NONE)]


def _value(figure: Interval | None) -> str:
    return f"{figure.value:.3g}" if figure else NONE


def _ratio_cells(report: EnergyReport, variant: VariantEnergy, plain: Interval | None) -> tuple[str, str]:
    ratio, drafts = variant.ratio_to_baseline, variant.joules_per_output_token
    if ratio is None and plain is not None and drafts is not None and plain.value > 0:
        return f"{drafts.value / plain.value:.2f}", "none: a single repeat"
    if ratio is None:
        return NONE, NONE
    if not math.isfinite(ratio.half):
        return f"{ratio.value:.2f}", "none"
    if not is_determined(report, ratio):
        return NOT_DETERMINED, f"n={ratio.n}, the runs differ too much"
    basis = "the model's range" if report.estimate else f"n={ratio.n}"
    return f"{ratio.value:.2f}", f"[{ratio.low:.2f}, {ratio.high:.2f}] ({basis})"


def is_determined(report: EnergyReport, ratio: Interval) -> bool:
    """Whether a ratio of joules says something. An estimate is shown with its range, which somebody asked for, however wide that is."""
    return report.estimate or not math.isfinite(ratio.half) or ratio.high <= WIDEST_RATIO * max(ratio.low, 0.0)


def scope_cell(report: EnergyReport) -> str:
    """Returns the scope of the meter, marked where nothing was measured."""
    return "ESTIMATE, not measured" if report.estimate else str(report.scope)


def claims(report: EnergyReport) -> list[str]:
    """Returns what follows from the joules, and which repeats do not count."""
    sentences = [f"{variant.name} saves energy" for variant in report.variants if variant.saves_energy and not report.estimate]
    refused = [f"{variant.name}, {reason}" for variant in report.variants for reason in variant.refused]
    return sentences + ([f"Repeats that do not count: {'; '.join(refused)}"] if refused else [])


def joules_words(report: EnergyReport, name: str) -> str:
    """Returns what a variant takes beside plain decoding, as the end of a sentence; empty where that was not measured."""
    ratio = next((variant.ratio_to_baseline for variant in report.variants if variant.name == name), None)
    if ratio is None:
        return ""
    if not is_determined(report, ratio):
        return "; how many joules per token it takes beside plain decoding is not determined: the runs differ too much"
    interval = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if math.isfinite(ratio.half) else " (no interval)"
    kind = "an ESTIMATE, nothing was measured" if report.estimate else f"measured, {report.scope}"
    return f"; it takes {ratio.value:.2f}{interval} times the joules per token of plain decoding ({kind})"


def _energy_phases(report: EnergyReport) -> TextTable:
    variants = [variant for variant in report.variants if len(variant.phase_joules) > 1]

    def phase(name: str) -> tuple[str, Callable[[VariantEnergy], str]]:
        return name, lambda variant: joules(variant.phase_joules.get(name))

    columns: Columns[VariantEnergy] = (
        ("", lambda variant: variant.name),
        *map(phase, dict.fromkeys(name for variant in variants for name in variant.phase_joules)),
        ("method", lambda variant: variant.phase_method.replace("_", " ")),
        ("sum is off", lambda variant: NONE if variant.closure is None else f"{variant.closure:+.1%}"),
        ("", lambda variant: "" if variant.closes else "does NOT close"),
    )
    note = (
        "Joules per request. Calibrated: the watts of a phase come from loops of that phase alone, and the sum of the phases is compared"
        " with the measurement (largest error of any repeat). Time proportional: without such loops, all phases are assumed to take the"
        " mean power."
    )
    return table_of("energy-phases", scope_title("Energy by phase", report.scope, estimate=report.estimate), variants, columns, note)


def meter_table(log: RunLog) -> TextTable:
    """Returns the facts and the measured characteristics of a log's meter."""
    facts, measured = log.facts, log.characteristics
    rows = [
        ("scope", str(facts.scope)),
        ("kind", str(facts.kind)),
        ("source", facts.source),
        ("refresh interval", f"{measured.refresh_s:.3g} s, at most {measured.longest_gap_s:.3g} s"),
        ("lag behind the load", f"{measured.lag_s:.3g} s"),
        ("invalid readings", f"{measured.zero_rate:.1%}"),
        ("time per reading", f"{1000 * measured.read_s:.3g} ms"),
        ("resolution", f"{facts.resolution:g} {'J' if facts.kind is Kind.COUNTER else 'W'}"),
        ("readings", f"{len(log.trace.times)}"),
        ("not in any interval", facts.systematic),
        *(("note", text) for text in facts.notes),
    ]
    return TextTable(name="meter", title=f"The meter {facts.name}", columns=("", ""), rows=tuple(rows))
