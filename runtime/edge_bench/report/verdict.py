"""What a report says in one sentence: how many times as fast, whether the output is the same, and the joules."""

from __future__ import annotations

from edge_bench.measure.variants import OURS
from edge_bench.report.figures import Figures, Row
from edge_bench.report.ratios import WIDEST
from edge_devices.energy.report import EnergyReport
from edge_runtime.drafting.policies import DEFAULT_POLICY

# What users get is judged rather than the variant that came out best by chance.


def verdict(figures: Figures) -> str:
    """Returns the sentence; empty if nothing was compared with plain decoding."""
    rows = [row for row in figures.overall if row.variant.side == OURS and row.speed_up]
    if not rows:
        return ""
    defaults = [row for row in rows if row.variant.policy == DEFAULT_POLICY]
    judged = max(defaults or rows, key=_speed_up)
    others = len(defaults or rows)
    chosen = "" if others == 1 else f", the fastest of {others} measured,"
    return f"{judged.variant.label}{chosen} {_speed(judged)}{_output(judged)}{_joules(judged, figures.energy)}."


def _speed_up(row: Row) -> float:
    return row.speed_up.value if row.speed_up else 0.0


def _speed(row: Row) -> str:
    ratio = row.speed_up
    assert ratio is not None
    if row.acceptance_rate is None:
        return f"drafted nothing: its {ratio.value:.2f} times the speed of plain decoding is noise"
    if ratio.low is None or ratio.high is None:
        return f"was {ratio.value:.2f} times as fast as plain decoding in a single repeat, which has no interval"
    interval = f"[{ratio.low:.2f}, {ratio.high:.2f}]"
    if not ratio.determined:
        return f"was measured too unevenly to be compared with plain decoding: the 95% interval spans a factor of more than {WIDEST}"
    if not ratio.verdict:
        return f"is neither faster nor slower than plain decoding in these runs: {ratio.value:.2f} times as fast, 95% {interval}"
    slower = " (slower)" if ratio.verdict == "slower" else ""
    return f"is {ratio.value:.2f} times as fast as plain decoding{slower}, 95% {interval}"


def _output(row: Row) -> str:
    if not row.compared:
        return "; the output was not compared"
    if row.equal == row.compared:
        return f"; the output is the same in all {row.compared} runs"
    return f"; the output is the same in {row.equal} of {row.compared} runs"


def _joules(row: Row, energy: EnergyReport | None) -> str:
    measured = next((variant for variant in energy.variants if variant.name == row.variant.label), None) if energy else None
    if energy is None or measured is None or measured.ratio_to_baseline is None:
        return ""
    ratio = measured.ratio_to_baseline
    kind = "estimated" if energy.estimate else "measured"
    interval = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.half < float("inf") else " (no interval)"
    return f"; it takes {ratio.value:.2f}{interval} times the joules per token of plain decoding ({kind}, {energy.scope})"
