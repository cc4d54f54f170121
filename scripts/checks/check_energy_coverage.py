"""Measures joules per token on simulated devices of known power: the error, and how often the 95 % interval contains the true value.

    python scripts/checks/check_energy_coverage.py --runs 1000

Each run is a complete measurement by the protocol of docs/measure-energy.md. Device and meter are drawn at random from ranges: one workload
(tests/support/simulated_meter.py), and requests of three phases with calibration loops on a device that heats up and throttles
(tests/support/simulated_phases.py). A thousand runs take a minute or two per meter and simulator.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import click

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from edge_devices.energy.report import make_report
from edge_devices.errors import MeasurementError
from simulated_meter import COUNTER, GAUGE, SAMPLER, SLOWER, draw, simulate
from simulated_phases import PHASES, draw_phased, simulate_phased

METERS = (COUNTER, SAMPLER, GAUGE)
SLOW = tuple(meter for meter in SLOWER if meter != GAUGE)


class Outcome(NamedTuple):
    """A measurement that was not refused: relative error, and whether the intervals contain the true value (net: None without a figure)."""

    error: float
    covered: bool
    net_covered: bool | None


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The row of one meter. Errors are relative; `refused` runs were too short; shares are of the runs that were not refused."""

    meter: str
    runs: int
    counted: int
    refused: int
    median_error: float
    mean_error: float
    covered: float
    net_covered: float


def outcome(meter: str, seed: int) -> Outcome | None:
    """Simulates one measurement.

    Returns None if it was refused as too short; raises MeasurementError if it was refused for another reason.
    """
    scenario = draw(meter, seed)
    log, block = simulate(scenario)
    try:
        (variant,) = make_report(log).variants
    except MeasurementError as refusal:
        if "too short" not in str(refusal) or scenario.window_share >= 1.05:
            raise MeasurementError(f"{meter}, seed {seed}: {refusal}") from refusal
        return None
    figure, net = variant.joules_per_output_token, variant.net_joules_per_output_token
    assert figure is not None
    if variant.n < 2:
        return None  # all but one repeat were refused: the interval is the single window's own
    covered = figure.low <= block.joules_per_token <= figure.high
    net_covered = net.low <= block.net_joules_per_token <= net.high if net else None
    return Outcome(figure.value / block.joules_per_token - 1, covered, net_covered)


def coverage(meter: str, runs: int, first: int = 0) -> Coverage:
    """Simulates `runs` measurements with the seeds from `first` on."""
    outcomes = [o for seed in range(first, first + runs) if (o := outcome(meter, seed))]
    errors = [o.error for o in outcomes]
    return Coverage(
        meter=meter,
        runs=runs,
        counted=len(outcomes),
        refused=runs - len(outcomes),
        median_error=median(map(abs, errors)),
        mean_error=fmean(errors),
        covered=fmean(o.covered for o in outcomes),
        net_covered=fmean(o.net_covered for o in outcomes if o.net_covered is not None),
    )


@dataclass(frozen=True, kw_only=True)
class PhasedCoverage:
    """The row of one meter on the device with phases; `phases`: how often each phase's interval contains its joules per request."""

    meter: str
    runs: int
    mean_error: float
    median_error: float
    covered: float
    phases: dict[str, float]


def phased_coverage(meter: str, runs: int, first: int = 0) -> PhasedCoverage:
    """Simulates `runs` measurements with phases. Raises MeasurementError if one is refused."""
    errors, covered, phases = [], [], {phase: list[bool]() for phase in PHASES}
    for seed in range(first, first + runs):
        log, truth = simulate_phased(draw_phased(meter, seed))
        (variant,) = make_report(log).variants
        figure = variant.joules_per_output_token
        if figure is None or variant.n < 2:
            raise MeasurementError(f"{meter}, seed {seed}: {variant.refused}")
        errors.append(figure.value / truth.joules_per_token - 1)
        covered.append(figure.low <= truth.joules_per_token <= figure.high)
        for phase, held in phases.items():
            joules = variant.phase_joules[phase]
            held.append(joules.low <= truth.joules[phase] / truth.requests <= joules.high)
    return PhasedCoverage(
        meter=meter,
        runs=runs,
        mean_error=fmean(errors),
        median_error=median(map(abs, errors)),
        covered=fmean(covered),
        phases={phase: fmean(held) for phase, held in phases.items()},
    )


def phased_table(rows: list[PhasedCoverage]) -> Iterator[str]:
    """Yields the lines of the second Markdown table in docs/design/meters.md."""
    yield f"| meter, {rows[0].runs} runs with phases | median error | mean error | J/output token holds the truth | {' | '.join(PHASES)} |"
    yield "|---|---|---|---|" + "---|" * len(PHASES)
    for row in rows:
        held = " | ".join(f"{row.phases[phase]:.1%}" for phase in PHASES)
        yield f"| {row.meter} | {row.median_error:.2%} | {row.mean_error:+.2%} | {row.covered:.1%} | {held} |"


def table(rows: list[Coverage]) -> Iterator[str]:
    """Yields the lines of the Markdown table in docs/design/meters.md."""
    yield f"| meter | counted of {rows[0].runs} | too short, refused | median error | mean error | interval holds the truth | above idle |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row.meter} | {row.counted} | {row.refused} | {row.median_error:.2%} | {row.mean_error:+.2%} | {row.covered:.1%} |"
            f" {row.net_covered:.1%} |"
        )


@click.command(context_settings={"show_default": True})
@click.option("--runs", type=click.IntRange(min=10), default=1000, help="Simulated measurements per meter.")
@click.option("--first", type=click.IntRange(min=0), default=0, help="The first seed.")
@click.option("--slow", is_flag=True, help="Batteries that update every 1, 5 and 15 seconds instead, and the first table alone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(runs: int, first: int, slow: bool, as_json: bool) -> None:
    """Print the coverage tables."""
    rows = [coverage(meter, runs, first) for meter in (SLOW if slow else METERS)]
    phased = [] if slow else [phased_coverage(meter, runs, first) for meter in METERS]
    if as_json:
        click.echo(json.dumps({"meters": [asdict(row) for row in rows], "phases": [asdict(row) for row in phased]}))
        return
    for line in (*table(rows), *(("", *phased_table(phased)) if phased else ())):
        click.echo(line)


if __name__ == "__main__":
    main()
