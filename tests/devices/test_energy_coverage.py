"""Joules per token against a known truth: the figure, and how often its interval holds the truth."""

from __future__ import annotations

from statistics import fmean, median
from typing import NamedTuple

import pytest

pytest.importorskip("numpy")

from edge_devices.errors import MeasurementError
from edge_devices.intervals import Interval, of_error
from edge_devices.report import make_report
from edge_devices.windows import measure_window
from simulated_meter import COUNTER, GAUGE, SAMPLER, draw, simulate

METERS = [COUNTER, SAMPLER, GAUGE]


class Outcome(NamedTuple):
    error: float  # relative
    covered: bool
    net_covered: bool | None


def outcome(meter: str, seed: int) -> Outcome | None:
    """One simulated measurement; None when it was refused."""
    scenario = draw(meter, seed)
    log, block = simulate(scenario)
    try:
        (variant,) = make_report(log).variants
    except MeasurementError as refusal:
        reason = str(refusal)
        variant = None
    if variant is None:
        assert "too short" in reason, (seed, reason)
        assert scenario.window_share < 1.05, (seed, reason)
        return None
    figure, net = variant.joules_per_output_token, variant.net_joules_per_output_token
    assert figure is not None
    if variant.n < 2:
        return None  # all but one repeat were refused: the interval is the single window's own
    covered = figure.low <= block.joules_per_token <= figure.high
    net_covered = net.low <= block.net_joules_per_token <= net.high if net else None
    return Outcome(figure.value / block.joules_per_token - 1, covered, net_covered)


def check(meter: str, runs: int, least: float, most: float) -> None:
    """Runs that many scenarios and holds them against the bounds."""
    found = [o for seed in range(runs) if (o := outcome(meter, seed))]
    share = fmean(o.covered for o in found)
    net = fmean(o.net_covered for o in found if o.net_covered is not None)
    print(
        f"{meter}: {len(found)} of {runs} counted, median error {median(abs(o.error) for o in found):.4f}, covered {share:.3f}, net {net:.3f}"
    )
    assert len(found) > 0.7 * runs  # 20 % of the windows drawn are too short on purpose
    assert median(abs(o.error) for o in found) < 0.02
    assert abs(fmean(o.error for o in found)) < 0.002
    assert least <= share <= most
    assert net >= least


@pytest.mark.parametrize("meter", METERS)
def test_coverage_of_a_thousand_runs(meter):
    check(meter, 1000, 0.93, 0.97)


@pytest.mark.parametrize("meter", METERS)
def test_the_interval_of_a_single_window_holds_what_it_took(meter):
    def covered(seed: int) -> bool | None:
        log, block = simulate(draw(meter, seed))
        if log.runs[0].seconds < log.characteristics.shortest_window_s:
            return None
        window = measure_window(log.trace, log.runs[0].start_s, log.runs[0].end_s, log.characteristics)
        interval: Interval = of_error(window.joules, window.error_watts * window.seconds, window.freedom, 1)
        return interval.low <= block.run_joules[0] <= interval.high

    found = [c for seed in range(80) if (c := covered(seed)) is not None]
    assert len(found) > 50
    assert fmean(found) >= 0.88  # at least 95 % in truth, so 2.4 standard errors below it


def test_characteristics_are_measured():
    errors = []
    for seed in range(15):
        scenario = draw(GAUGE, seed)
        log, _ = simulate(scenario)
        errors.append(log.characteristics.refresh_s / scenario.refresh_s - 1)
        assert log.characteristics.lag_s >= 0.8 * scenario.delay_s
        assert abs(log.characteristics.zero_rate - scenario.zero_rate) < 0.06
    assert abs(median(errors)) < 0.15


def test_without_the_lead_in_a_gauge_reads_low():
    """The lead-in earns its place: with the lag taken for nothing, figures lose what the gauge still showed of idle."""
    errors = []
    for seed in range(12):
        scenario = draw(GAUGE, seed)
        log, block = simulate(scenario)
        log.characteristics = type(log.characteristics)(refresh_s=0.01, longest_gap_s=9.0, lag_s=0.0, zero_rate=0.0, read_s=0.0)
        (variant,) = make_report(log).variants
        errors.append(variant.joules_per_output_token.value / block.joules_per_token - 1)
    assert fmean(errors) < -0.01
