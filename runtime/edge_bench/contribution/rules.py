"""What a contributed record must fulfil to be pooled."""

from __future__ import annotations

from edge_bench.contribution.record import CheckedRecord
from edge_bench.measure.variants import PLAIN
from edge_devices.energy.report import VariantEnergy

MIN_REPEATS = 3
MAX_REFUSED_SHARE = 1 / 3
MAX_HALF_WIDTH = 0.25  # of the figure
WATTS = (0.05, 3000.0)
RULES = (
    f"at least {MIN_REPEATS} repeats of every variant count, and at most a third do not",
    f"plain decoding is among the variants, with an interval of at most ± {MAX_HALF_WIDTH:.0%}",
    "idle power was measured before and after",
    "the measurement was not stopped, and power, speed and temperature were steady before it",
    "the joules of the phases add up, where they were calibrated",
    f"mean power is within {WATTS[0]:g} to {WATTS[1]:g} W",
    "other programs used no more than 15 % of the processors, and programs waited for one in no more than 15 % of the time",
)


def invalid(checked: CheckedRecord) -> list[str]:
    """Returns why a record is not pooled; an empty list if it is. Estimates follow the same rules, but for their intervals."""
    report, reasons = checked.report, []
    if PLAIN not in {variant.name for variant in report.variants}:
        reasons.append("plain decoding was not measured")
    if report.idle is None or report.idle.windows < 2:
        reasons.append("idle power was not measured before and after")
    reasons += [text for text in checked.run_log.warnings if text.startswith(("stopped", "power, speed and temperature"))]
    for variant in report.variants:
        reasons += [f"{variant.name}: {text}" for text in _of_variant(variant, estimate=report.estimate)]
    if not checked.run_log.others:
        reasons.append("how busy the machine was is not in its log")
    return reasons + [f"busy: {load.sentence()}" for load in checked.run_log.others if load.is_busy]


def _of_variant(variant: VariantEnergy, *, estimate: bool) -> list[str]:
    reasons, joules = [], variant.joules_per_output_token
    if variant.n < MIN_REPEATS:
        reasons.append(f"{variant.n} repeats count, {MIN_REPEATS} are needed")
    if len(variant.refused) > MAX_REFUSED_SHARE * (variant.n + len(variant.refused)):
        reasons.append(f"{len(variant.refused)} of {variant.n + len(variant.refused)} repeats do not count")
    if joules is None:
        reasons.append("no joules per token")
    elif not estimate and variant.name == PLAIN and not 0 < joules.half <= MAX_HALF_WIDTH * joules.value:
        reasons.append(f"an interval of ± {joules.half / joules.value:.0%} is too wide" if joules.value else "no energy was used")
    if variant.watts and not WATTS[0] <= variant.watts.value <= WATTS[1]:
        reasons.append(f"a mean power of {variant.watts.value:.3g} W is not plausible")
    if not variant.closes:
        reasons.append("the joules of the phases do not add up")
    return reasons
