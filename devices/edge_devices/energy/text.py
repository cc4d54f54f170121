"""Meters and reports as lines of text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from edge_devices.energy.characteristics import Characteristics
from edge_devices.energy.intervals import Interval
from edge_devices.energy.report import EnergyReport, VariantEnergy
from edge_devices.errors import printable
from edge_devices.meters.base import Finding, MeterState
from edge_devices.meters.search import NO_METER

# An interval of a ratio whose ends differ by more than this factor says nothing.
WIDEST_RATIO = 4.0


def meter_lines(findings: Sequence[Finding], measured: Mapping[str, Characteristics | str] | None = None) -> list[str]:
    """Returns the lines of `edge-devices meters`: usable first, then present with reason and remedy, then absent.

    `measured`: characteristics of the usable ones, or why there are none.
    """
    lines = []
    for finding in (f for f in findings if f.meter):
        facts = finding.meter.facts if finding.meter else None
        if facts:
            unit = "J" if facts.kind == "counter" else "W"
            expected = (
                f"new about every {facts.refresh_s:g} s, a load shows after {facts.lag_s:g} s"
                if facts.lag_s
                else f"new about every {facts.refresh_s:g} s"
            )
            lines.append(f"usable   {facts.name}: {facts.kind}, scope {facts.scope}, {expected}, {facts.resolution:g} {unit} steps")
            lines += [f"           {note}" for note in (*([f"needs {facts.needs}"] if facts.needs else []), *facts.notes)]
            figures = (measured or {}).get(facts.name)
            if figures is not None:
                lines.append(f"           {figures if isinstance(figures, str) else _measured(figures)}")
    for finding in (f for f in findings if f.state is MeterState.PRESENT):
        lines.append(f"present  {finding.name}: {finding.reason}")
        if finding.remedy:
            lines.append(f"           {finding.remedy}")
    lines += [f"absent   {f.name}: {f.reason}" for f in findings if f.state is MeterState.ABSENT]
    if not any(f.meter for f in findings):
        denied = [f.name for f in findings if f.state is MeterState.PRESENT]
        lines.insert(0, f"{NO_METER} can be used now" + (f"; what stands in the way of {', '.join(denied)} is below" if denied else ""))
        lines.append(
            "a meter in the supply line that writes a table will do: edge-bench run BUNDLE --energy LOG --meter external (docs/energy.md)"
        )
    return list(map(printable, lines))


def _measured(figures: Characteristics) -> str:
    return (
        f"measured: new every {figures.refresh_s:.3g} s (at most {figures.longest_gap_s:.3g} s), a load shows after {figures.lag_s:.3g} s,"
        f" {figures.zero_rate:.0%} of readings were invalid, a reading takes {1000 * figures.read_s:.2g} ms"
    )


def report_lines(report: EnergyReport) -> list[str]:
    """Returns a report as text; every figure with its interval, the meter and scope above them."""
    mark = "ESTIMATE, nothing was measured: " if report.estimate else ""
    lines = [
        f"{mark}meter {report.meter}, scope {report.scope}, new every {report.refresh_s:.3g} s; not in the intervals: {report.systematic}"
    ]
    if report.idle:
        lines.append(f"idle {report.idle.watts:.3g} W ± {2 * report.idle.error:.1g}, drift {report.idle.drift_watts:+.2g} W")
    for variant in report.variants:
        lines += _variant_lines(variant)
    lines += [f"note: {text}" for text in report.warnings]
    return list(map(printable, lines))


def _variant_lines(variant: VariantEnergy) -> list[str]:
    lines = [f"{variant.name}: {variant.n} repeats count, {len(variant.refused)} do not"]
    lines += [f"  refused: {reason}" for reason in variant.refused]
    figures = {
        "J/output token": variant.joules_per_output_token,
        "J/output token above idle": variant.net_joules_per_output_token,
        f"J/prompt token, of {variant.prompt_tokens or 0:.3g}": variant.joules_per_prompt_token,
        "J/request": variant.joules_per_request,
        "W": variant.watts,
    }
    lines += [f"  {figure_text(interval)} {name}" for name, interval in figures.items() if interval]
    if variant.tokens_per_second:
        lines.append(f"  {variant.tokens_per_second:.3g} tokens/s")
    lines += _phase_lines(variant)
    if variant.ratio_to_baseline:
        verdict = "saves energy" if variant.saves_energy else "no win claimed: the interval reaches 1"
        lines.append(f"  {ratio_text(variant.ratio_to_baseline)} × the baseline's joules per token ({verdict})")
    return lines


def _phase_lines(variant: VariantEnergy) -> list[str]:
    if variant.phase_method == "measured":
        return []
    head = f"  J/request by phase, {variant.phase_method}"
    if variant.closure is not None:
        head += f"; their sum is off what was measured by {variant.closure:+.1%} at most" + (
            "" if variant.closes else ": it does NOT close"
        )
    return [head + ":", *(f"    {figure_text(joules)} {phase}" for phase, joules in variant.phase_joules.items())]


def ratio_text(ratio: Interval) -> str:
    """Returns a ratio with its interval; "not determined" where the interval says nothing."""
    too_wide = ratio.half < float("inf") and ratio.high > WIDEST_RATIO * max(ratio.low, 0.0)
    return f"not determined (n={ratio.n}, the runs differ too much):" if too_wide else figure_text(ratio)


def figure_text(interval: Interval, *, basis: str = "") -> str:
    """Returns a figure with as many digits as its interval supports: two of the half width. `basis`: of other intervals than repeats'."""
    if not 0 < interval.half < float("inf"):
        return f"{interval.value:.3g} (n={interval.n}, no interval)"
    digits = max(0, 1 - math.floor(math.log10(interval.half)))
    basis = basis or (f"n={interval.n}" if interval.n > 1 else "n=1: the reading's error alone, not how runs differ")
    return f"{interval.value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}] ({basis})"
