"""Costs of drafts and verifies: measured, extrapolated, and corrected by real rounds."""

from __future__ import annotations

import pytest

from edge_runtime.calibration.cost_probe import measure_costs, overhead_and_step, steady
from edge_runtime.drafting.cost_model import MAX_ROWS, CostCurve, MeasuredCosts
from edge_runtime.drafting.policies import Timing
from scripted import ScriptedDrafter, ScriptedTarget
from simulated_rounds import LINEAR, REPACKED


def took(*, length: int = 100, rows: int = 1, verify: float = 0.0, steps: int = 0, draft: float = 0.0, requests: int = 1) -> Timing:
    return Timing(length=length, steps=steps, draft_seconds=draft, rows=rows, verify_seconds=verify, requests=requests)


def test_costs_follow_what_rounds_really_take() -> None:
    curve = CostCurve(MeasuredCosts(verify=LINEAR, step=1.0))
    for _ in range(100):
        curve.learn(took(length=100, rows=4, verify=2 * LINEAR[3], steps=3, draft=9.0))
    assert curve.verify(4) == pytest.approx(2 * LINEAR[3], rel=0.05)
    assert curve.draft(3) == pytest.approx(9.0, rel=0.05)


def test_fixed_overhead_and_cost_per_token_are_told_apart() -> None:
    curve = CostCurve(MeasuredCosts(verify=LINEAR, step=1.0))
    for _ in range(100):
        for steps in (1, 3, 8):
            curve.learn(took(rows=0, steps=steps, draft=2.0 + 0.5 * steps))
    assert [curve.draft(n) for n in (0, 1, 8)] == [0.0, pytest.approx(2.5, rel=0.05), pytest.approx(6.0, rel=0.05)]
    assert overhead_and_step([0, 1, 2, 3], [9.0, 2.5, 3.0, 3.5]) == (pytest.approx(2.0), pytest.approx(0.5))
    assert overhead_and_step([0, 1, 2], [0.0, 0.4, 0.8]) == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.4))
    assert overhead_and_step([0, 0], [1.0, 1.0])[1] < 1e-6, "a drafter that drafts nothing costs nothing"


def test_a_hiccup_moves_costs_a_little_only() -> None:
    curve = CostCurve(MeasuredCosts(verify=LINEAR, step=1.0))
    curve.learn(took(length=100, rows=4, verify=1e6, steps=3, draft=1e6))
    assert curve.verify(4) < 1.2 * LINEAR[3]
    assert curve.draft(3) < 3.7


def test_longer_texts_have_costs_of_their_own() -> None:
    curve = CostCurve(MeasuredCosts(verify=LINEAR, step=1.0))
    for _ in range(200):
        curve.learn(took(length=4000, rows=1, verify=3 * LINEAR[0], steps=0, draft=0.0))
    assert curve.verify(1) == pytest.approx(3 * LINEAR[0], rel=0.05)
    assert curve.verify(8) > 1.3 * LINEAR[7], "all rows attend to the longer text"
    curve.learn(took(length=100, rows=8, verify=LINEAR[7], steps=0, draft=0.0))
    assert curve.verify(8) == pytest.approx(LINEAR[7], rel=0.05)


def test_batches_of_several_requests_are_extrapolated() -> None:
    curve = CostCurve(MeasuredCosts(verify=LINEAR, step=1.0))
    assert curve.verify(40) == pytest.approx(LINEAR[0] + 4 * 39)
    repacked = CostCurve(MeasuredCosts(verify=REPACKED, step=1.0))
    assert repacked.verify(16) < repacked.verify(15), "multiples of four stay the cheap ones"


def test_the_first_real_batch_of_several_requests_counts_most() -> None:
    curve = CostCurve(MeasuredCosts(verify=LINEAR, step=1.0))
    extrapolated = curve.verify(20)
    for _ in range(4):
        curve.learn(took(rows=20, verify=1.8 * extrapolated, steps=6, draft=3.0, requests=2))
    assert curve.verify(20) == pytest.approx(1.8 * extrapolated, rel=0.1)
    assert curve.verify(4) == LINEAR[3], "and says nothing about smaller ones"
    assert curve.draft(3) == 3.0
    assert 2 * curve.draft(3, 2) == pytest.approx(3.0, rel=0.15)


def test_measuring_asks_for_every_number_of_rows_and_leaves_nothing_behind() -> None:
    target = ScriptedTarget()
    costs = measure_costs(target, ScriptedDrafter(target, lambda c, _: 0), 1, max_seconds=0.0)
    assert len(costs.verify) == MAX_ROWS
    assert costs.step > 0
    assert sorted(set(target.rows)) == list(range(1, 13)), "the slack of 12 bounds it"
    assert target.length == 0


def test_a_machine_that_is_now_faster_and_now_slower_is_measured_by_shares() -> None:
    speeds, truth = (1.0, 1.3, 0.9, 1.1, 2.5), (10.0, 18.0, 1.0)
    rounds = [[speed * one for one in truth] for speed in speeds]
    rounds[1][0] *= 5  # another process, for a moment
    figures = steady(rounds)
    assert [figure / figures[0] for figure in figures] == pytest.approx([1.0, 1.8, 0.1])
    assert sum(figures) == pytest.approx(0.9 * sum(truth))


def test_of_two_measurements_the_quicker_one_counts() -> None:
    costs = MeasuredCosts(verify=LINEAR, step=0.5)
    busy = MeasuredCosts(verify=tuple(2 * v if n else v / 2 for n, v in enumerate(LINEAR)), step=0.1)
    assert costs.combined(busy) == busy.combined(costs) == costs
