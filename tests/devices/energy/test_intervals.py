"""Means, ratios, errors and Student's t, against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from edge_devices.energy.intervals import Interval, combined, mean_interval, of_error, ratio_interval, t_quantile
from edge_devices.energy.text import figure_text
from edge_devices.errors import MeasurementError


def test_student_t():
    for freedom, value in [(1, 12.7062), (2, 4.3027), (8, 2.3060), (30, 2.0423), (math.inf, 1.9600)]:
        assert t_quantile(freedom) == pytest.approx(value, abs=1e-4)
    assert t_quantile(0) == math.inf


def test_mean_interval_by_hand():
    interval = mean_interval([1.0, 2.0, 3.0], [0, 1, 2])
    assert (interval.value, interval.freedom) == (2.0, 2)
    assert interval.half == pytest.approx(4.3027 / math.sqrt(3), abs=1e-3)
    drifting = mean_interval([1.0, 2.1, 2.9, 4.0, 5.0], [0, 1, 2, 3, 4])
    assert drifting.value == pytest.approx(3.0)
    assert drifting.half < 0.15  # the drift is not scatter
    assert mean_interval([1.0, 1.0], [0, 1], resolution=0.1).half > 0.1
    with pytest.raises(MeasurementError, match="1 repeat"):
        mean_interval([1.0], [0])


def test_ratio_interval_by_hand():
    interval = ratio_interval([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.5, 0.5, 0.5))
    with pytest.raises(MeasurementError, match="no pairs"):
        ratio_interval([1.0], [1.0])


def test_errors_combine():
    assert combined([(3.0, 5), (4.0, 5)])[0] == 5.0
    assert combined([(3.0, 5)]) == pytest.approx((3.0, 5.0))
    assert combined([(0.0, 7)]) == (0.0, 7)


def test_no_more_digits_than_the_interval_supports():
    assert figure_text(of_error(0.48123, 0.0005, math.inf, 10)) == "0.48123 [0.48025, 0.48221] (n=10)"
    assert figure_text(of_error(0.5, 0.01, math.inf, 1)).endswith("(n=1: the reading's error alone, not how runs differ)")
    assert figure_text(of_error(123.456, 5.0, math.inf, 10)) == "123.5 [113.7, 133.3] (n=10)"
    assert figure_text(Interval(value=1.0, low=-math.inf, high=math.inf, n=1, error=math.inf, freedom=1)) == "1 (n=1, no interval)"
