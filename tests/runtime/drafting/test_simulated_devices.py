"""The devices that the objective energy is held against: what they draw and take is what they say."""

from __future__ import annotations

import pytest

from edge_runtime.drafting.policies import Fixed
from simulated_devices import RisingWatts, changing, rising
from simulated_joules import Case, regret


def test_watts_rise_up_to_nine_rows_and_a_calibration_knows_them_at_some() -> None:
    watts = RisingWatts(plain=4.0, full=12.0, exponent=0.5, draft=5.0)
    assert [watts.forward(rows) for rows in (1, 3, 9, 13)] == pytest.approx([4.0, 8.0, 12.0, 12.0])
    known = watts.calibrated()
    assert [known.forward(rows) for rows in (1, 2, 4, 8, 13)] == pytest.approx([watts.forward(rows) for rows in (1, 2, 4, 8, 13)])
    assert known.forward(6) < watts.forward(6)  # linear between them


def test_times_vary_for_the_policy_and_not_for_the_sums() -> None:
    case = rising(1, 1)[0]
    fixed = case.fixed(400, (1,))
    assert case.device().after(Fixed(0), 400, 1).seconds == pytest.approx(fixed[0].seconds)
    known = case.device().known(1)
    assert known.verify(1) != case.verify[0]
    assert known.verify(1) == pytest.approx(case.verify[0], rel=0.3)


def test_a_device_that_changes_takes_longer_and_more_watts_later() -> None:
    case = next(case for case in changing(3, 40) if case.slower > 1.3 and case.leak > 0.2 and case.dimmed > 0.9)
    early, all_of_it = (case.device().after(Fixed(0), tokens, 1) for tokens in (case.step_at, 2 * case.step_at))
    assert early.seconds == pytest.approx(case.verify[0])
    assert all_of_it.seconds == pytest.approx(case.verify[0] * (1 + case.slower) / 2, rel=0.01)
    assert early.joules > early.seconds * case.power.plain
    assert case.acceptance_at(case.period) == case.other != case.acceptance_at(0)


def test_watts_that_rise_are_weighed_by_rows() -> None:
    """Rows that cost no time and much power: by time many are verified, by energy few, at no more joules than by time."""
    case = next(case for case in rising(5, 60) if case.power.full > 3 * case.power.plain and case.verify[8] < 1.2 * case.verify[0])
    assert isinstance(case, Case)
    weighed = regret(case, 0.05, tokens=1500, seeds=(1,))
    assert weighed.joules < 0.97
    assert weighed.slower < 1.065
