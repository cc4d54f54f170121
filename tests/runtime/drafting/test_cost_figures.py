"""Costs of drafts and verifies: measured, extrapolated, corrected by real rounds, and which cached figures are read."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edge_devices.files.typed_json import from_json, to_json
from edge_runtime.calibration.first_use import measure_costs, overhead_and_step, steady
from edge_runtime.drafting.cost_model import (
    FIRST_BUCKET,
    MAX_ROWS,
    MIN_SECONDS,
    WINDOW,
    CostCurve,
    MeasuredCosts,
    extrapolated,
)
from edge_runtime.drafting.policies import Timing
from scripted import ScriptedDrafter, ScriptedTarget
from simulated_rounds import LINEAR

COSTS = MeasuredCosts(verify=LINEAR, step=1.0, overhead=0.5)
EVERY_ROW = range(1, MAX_ROWS + 1)


def took(*, length: int = 100, rows: int = 0, verify: float = 0.0, steps: int = 0, draft: float = 0.0, requests: int = 1) -> Timing:
    return Timing(length=length, steps=steps, draft_seconds=draft, rows=rows, verify_seconds=verify, requests=requests)


def test_a_draft_is_an_overhead_and_its_steps() -> None:
    assert [COSTS.draft(n) for n in (0, 1, 4)] == [0.0, 1.5, 4.5]
    assert COSTS.mean_step == 3.5 / 3
    curve = CostCurve(COSTS)
    assert [curve.draft(n) for n in (0, 1, 4)] == [0.0, 1.5, 4.5]
    assert curve.draft(4, 3) == 4.5, "until it was observed, the same for several requests"
    assert MeasuredCosts(verify=LINEAR, step=0.25).draft(2) == 0.5


def test_the_first_draft_of_several_requests_is_taken_as_it_is() -> None:
    """Of a joint draft, each request has its own overhead and the common steps."""
    curve = CostCurve(COSTS)
    curve.learn(took(steps=4, draft=6.0, requests=2))  # 2 * 0.5 + 4 * 1 = 5 were expected; 8 and 4 parts of 32
    overhead, step = 0.5 + 8 / 32, 1 + 4 / 32
    assert curve.draft(4, 2) == pytest.approx(overhead + 4 * step)
    assert 2 * overhead + 4 * step == 6.0
    assert curve.draft(4) == 4.5


def test_draft_costs_never_become_negative() -> None:
    curve = CostCurve(MeasuredCosts(verify=LINEAR, step=1e-9, overhead=1e-3))
    for _ in range(200):
        curve.learn(took(steps=12, draft=1e-9))
    assert curve.draft(1) >= MIN_SECONDS
    assert curve.draft(2) - curve.draft(1) >= MIN_SECONDS * 0.999
    steep = CostCurve(MeasuredCosts(verify=LINEAR, step=1.0, overhead=1e-6))
    for _ in range(100):
        steep.learn(took(steps=1, draft=0.3))
        steep.learn(took(steps=12, draft=12.0))
    assert steep.draft(1) >= 0.3 * 0.9, "an overhead below 0 would be a discount"


@pytest.mark.parametrize(
    "nothing", [took(rows=4), took(rows=0, verify=9.0), took(steps=3), took(steps=0, draft=9.0), took(rows=4, verify=-1.0)]
)
def test_rounds_without_a_figure_teach_nothing(nothing: Timing) -> None:
    curve = CostCurve(COSTS)
    curve.learn(nothing)
    assert [curve.verify(n) for n in EVERY_ROW] == list(LINEAR)
    assert curve.draft(3) == 3.5


def test_a_row_of_several_requests_costs_what_it_adds_near_the_rows_that_rounds_have() -> None:
    curve = CostCurve(COSTS)
    assert curve.share(2, 1) == curve.verify(2)
    assert 4 * curve.share(1, 4) == pytest.approx(curve.verify(4))
    assert 4 * curve.share(2, 4) == pytest.approx(curve.verify(8)), "until a round was timed, as if the others did the same"
    for rows in [*range(4, 21)] * 5:
        curve.learn(took(rows=rows, verify=12 + 3 * rows, requests=4))
    assert curve.share(1, 4) == pytest.approx(6, rel=0.05)
    row = curve.share(3, 4) - curve.share(2, 4)
    assert row == pytest.approx(3, rel=0.05)
    curve.learn(took(rows=20, verify=20.0, requests=4))
    assert curve.share(3, 4) - curve.share(2, 4) == pytest.approx(row, rel=0.1), "one lucky timing makes no number of rows cheap"
    for _ in range(5):
        curve.learn(took(rows=4, verify=1e-6, requests=4))
    assert 0 < curve.share(1, 4) < curve.share(9, 4)


def test_rows_of_batches_say_nothing_about_the_length_of_the_text() -> None:
    curve = CostCurve(COSTS)
    curve.learn(took(rows=20, verify=500.0, requests=4))
    assert [curve.verify(n) for n in EVERY_ROW] == list(LINEAR)


@pytest.mark.parametrize(
    ("length", "bucket"),
    [(0, 0), (1, 0), (FIRST_BUCKET, 0), (FIRST_BUCKET + 1, 1), (2 * FIRST_BUCKET, 1), (2 * FIRST_BUCKET + 1, 2), (8 * FIRST_BUCKET, 3)],
)
def test_texts_share_a_factor_up_to_double_the_length(length: int, bucket: int) -> None:
    """What was learned of a length holds for its bucket; another bucket, once entered, has its own factor."""
    curve = CostCurve(COSTS)
    middle = int(FIRST_BUCKET * 2**bucket * 0.8)
    curve.learn(took(length=middle, rows=1, verify=2 * LINEAR[0]))
    learned = curve.verify(8)
    assert learned == pytest.approx(LINEAR[7] * 2**0.05)
    far = FIRST_BUCKET * 64
    curve.learn(took(length=far, rows=1, verify=2 * curve.verify(1)))
    assert curve.verify(8) == pytest.approx(learned * 2**0.05), "it began with the factor of the one before"
    curve.learn(took(length=length))
    assert curve.verify(8) == pytest.approx(learned)


@pytest.mark.parametrize(
    ("known", "following"),
    [
        ([5.0], 5.0),
        ([1.0, 3.0], 5.0),
        ([3.0, 1.0], 1.0),
        ([1.0, 9.0, 4.0], 5.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 13.0], 15.0),
        ([1.0, 2.0, 3.0, 4.0, 11.0, 12.0, 13.0, 14.0], 21.0),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 10.0, 11.0, 13.0, 16.0], 20.0),
        ([9.0, 9.0, 9.0, 9.0, 4.0, 5.0, 6.0, 7.0], 4.0),
    ],
)
def test_the_next_number_of_rows(known: list[float], following: float) -> None:
    """Below two groups of four, a straight line from the first to the last; then the last group again, with the growth between two."""
    assert extrapolated(known) == following


def test_overhead_and_cost_of_a_step_are_told_apart() -> None:
    curve = CostCurve(MeasuredCosts(verify=LINEAR, step=1.0))
    for _ in range(100):
        for steps in (1, 3, 8):
            curve.learn(took(steps=steps, draft=2.0 + 0.5 * steps))
    assert [curve.draft(n) for n in (0, 1, 8)] == [0.0, pytest.approx(2.5, rel=0.05), pytest.approx(6.0, rel=0.05)]
    assert overhead_and_step([0, 1, 2, 3], [9.0, 2.5, 3.0, 3.5]) == (pytest.approx(2.0), pytest.approx(0.5))
    assert overhead_and_step([0, 1, 2], [0.0, 0.4, 0.8]) == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.4))
    assert overhead_and_step([0, 0], [1.0, 1.0])[1] < 1e-6, "a drafter that drafts nothing costs nothing"


def test_what_was_written_is_read() -> None:
    assert from_json(MeasuredCosts, to_json(COSTS), "costs") == COSTS
    whole = from_json(MeasuredCosts, {"verify": [1] * MAX_ROWS, "step": 3599.9, "overhead": 0}, "costs")
    assert whole == MeasuredCosts(verify=(1.0,) * MAX_ROWS, step=3599.9, overhead=0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"verify": None},
        {"verify": list(LINEAR)[:-1]},
        {"verify": [*LINEAR, 1.0]},
        *({"verify": [wrong, *LINEAR[1:]]} for wrong in (0, -1.0, 3600, True, "1", None, math.nan, math.inf)),
        *({"step": wrong} for wrong in (0, -1.0, 3600, True, "1", None, math.nan)),
        *({"overhead": wrong} for wrong in (-1.0, 3600, True, "1", None, math.nan)),
        *({"timings": wrong} for wrong in ([0] * (MAX_ROWS - 1), [-1] * MAX_ROWS, [WINDOW + 1] * MAX_ROWS, [0.5] * MAX_ROWS, None)),
    ],
)
def test_anything_else_is_not(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="costs"):
        from_json(MeasuredCosts, to_json(COSTS) | change, "costs")


def test_measuring_asks_for_every_number_of_rows_and_leaves_nothing_behind() -> None:
    target = ScriptedTarget()
    costs = measure_costs(target, ScriptedDrafter(target, lambda c, _: 0), 1, max_seconds=0.0)
    assert len(costs.verify) == MAX_ROWS
    assert costs.step > 0
    assert sorted(set(target.rows)) == list(range(1, 13)), "the slack of 12 bounds it"
    assert target.length == 0


def test_a_machine_that_is_now_faster_and_now_slower_is_measured_by_shares() -> None:
    speeds, truth = (1.0, 1.3, 0.9, 1.1, 2.5), (10.0, 18.0, 1.0)
    rounds = [[speed * item for item in truth] for speed in speeds]
    rounds[1][0] *= 5  # another process, for a moment
    figures = steady(rounds)
    assert [figure / figures[0] for figure in figures] == pytest.approx([1.0, 1.8, 0.1])
    assert sum(figures) == pytest.approx(0.9 * sum(truth))


def test_of_two_measurements_the_quicker_one_counts() -> None:
    costs = MeasuredCosts(verify=LINEAR, step=0.5)
    busy = MeasuredCosts(verify=tuple(2 * v if n else v / 2 for n, v in enumerate(LINEAR)), step=0.1)
    assert costs.combined(busy) == busy.combined(costs) == costs


COMPUTED = MeasuredCosts(verify=LINEAR, step=1.0, overhead=0.5, timings=(0,) * MAX_ROWS)


def rounds_of(curve: CostCurve, seconds: dict[int, float], times: int) -> None:
    for _ in range(times):
        for rows, verify in seconds.items():
            curve.learn(took(rows=rows, verify=verify))


def test_computed_costs_become_those_of_the_rounds() -> None:
    """A machine five times as slow as computed, on which further rows are dearer."""
    curve = CostCurve(COMPUTED)
    assert curve.is_provisional
    assert [curve.verify(n) for n in EVERY_ROW] == list(LINEAR)
    assert curve.learned() is None, "nothing was learned"
    curve.learn(took(rows=1, verify=5 * LINEAR[0]))
    assert [curve.verify(n) for n in EVERY_ROW] == pytest.approx([5 * seconds for seconds in LINEAR]), "proportions stay"
    truth = {1: 5 * LINEAR[0], 4: 10 * LINEAR[3]}
    rounds_of(curve, truth, 30)
    assert curve.verify(4) / curve.verify(1) == pytest.approx(truth[4] / truth[1], rel=0.2)
    assert curve.verify(1) / LINEAR[0] < curve.verify(2) / LINEAR[1] < curve.verify(4) / LINEAR[3], "between what was timed"
    assert curve.verify(8) / LINEAR[7] == pytest.approx(curve.verify(4) / LINEAR[3])
    learned = curve.learned()
    assert learned is not None
    assert learned.timings == (WINDOW, 0, 0, WINDOW, *(0,) * (MAX_ROWS - 4))
    assert from_json(MeasuredCosts, to_json(learned), "costs") == learned


def test_an_outlier_does_not_change_what_rounds_taught() -> None:
    curve = CostCurve(COMPUTED)
    rounds_of(curve, {1: LINEAR[0], 2: LINEAR[1]}, 4)
    before = curve.verify(2)
    curve.learn(took(rows=2, verify=50 * LINEAR[1]))
    assert curve.verify(2) == pytest.approx(before, rel=0.05)
    rounds_of(curve, {3: 100 * LINEAR[2]}, 1)
    assert curve.verify(3) < 4 * LINEAR[2], "one timing of a new number of rows counts little"


def test_what_was_learned_goes_on_where_it_ended() -> None:
    curve = CostCurve(COMPUTED)
    rounds_of(curve, {n: 2 * LINEAR[n - 1] for n in EVERY_ROW}, 3)
    curve.learn(took(steps=3, draft=7.0))
    learned = curve.learned()
    assert learned is not None
    again = CostCurve(COMPUTED, learned)
    assert again.is_provisional
    assert [again.verify(n) for n in EVERY_ROW] == pytest.approx([curve.verify(n) for n in EVERY_ROW])
    assert again.draft(3) == pytest.approx(curve.draft(3)) == pytest.approx(7.0)
    assert again.learned() is None


def test_the_rows_that_were_timed_least_are_named_until_all_are_settled() -> None:
    curve = CostCurve(COMPUTED)
    for _ in range(3):
        for n in range(1, 6):
            assert curve.rows_to_time(5)[0] == n
            curve.learn(took(rows=n, verify=LINEAR[n - 1]))
    assert curve.rows_to_time(5) == []
    assert curve.rows_to_time(6) == [6]
    assert CostCurve(COSTS).rows_to_time(6) == [], "measured ones need no more"


def test_batches_of_several_requests_follow_provisional_costs() -> None:
    curve = CostCurve(COMPUTED)
    first = curve.verify(20)
    rounds_of(curve, {n: 3 * LINEAR[n - 1] for n in EVERY_ROW}, 1)
    assert curve.verify(20) == pytest.approx(3 * first)
