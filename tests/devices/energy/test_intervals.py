"""Means, ratios, errors and Student's t, against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from edge_devices.energy.intervals import Interval, combined, mean_interval, of_error, of_model, ratio_interval, t_quantile, widened
from edge_devices.energy.report import figure_text
from edge_devices.errors import MeasurementError


def test_mean_interval_by_hand():
    interval = mean_interval([1.0, 2.0, 3.0], [0, 1, 2])
    assert (interval.value, interval.freedom) == (2.0, 2)
    assert interval.half == pytest.approx(4.3027 / math.sqrt(3), abs=1e-3)
    with pytest.raises(MeasurementError, match="1 repeat"):
        mean_interval([1.0], [0])


def test_no_more_digits_than_the_interval_supports():
    assert figure_text(of_error(0.48123, 0.0005, math.inf, 10)) == "0.48123 [0.48025, 0.48221] (n=10)"
    assert figure_text(of_error(0.5, 0.01, math.inf, 1)).endswith("(n=1: the reading's error alone, not how runs differ)")
    assert figure_text(of_error(123.456, 5.0, math.inf, 10)) == "123.5 [113.7, 133.3] (n=10)"
    assert figure_text(Interval(value=1.0, low=-math.inf, high=math.inf, n=1, error=math.inf, freedom=1)) == "1 (n=1, no interval)"


@pytest.mark.parametrize(
    ("freedom", "value"), [(3, 3.182446305), (5, 2.570581836), (8, 2.306004135), (10, 2.228138852), (30, 2.042272456), (120, 1.979930405)]
)
def test_student_t_of_printed_tables(freedom: float, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, rel=1e-9)


def test_student_t_at_its_ends() -> None:
    normal = 1.959963985
    assert t_quantile(0) == math.inf
    assert t_quantile(math.inf) == t_quantile(1e9) == pytest.approx(normal, rel=1e-6)
    assert t_quantile(1e5) == pytest.approx(normal, rel=1e-4)
    assert t_quantile(1e5) > t_quantile(1e6) > t_quantile(1e7)
    assert t_quantile(-1) == math.inf
    assert t_quantile(0.01) == math.inf, "beyond a million"
    assert t_quantile(1, 0.999999) == pytest.approx(318309.886, rel=1e-6)
    assert t_quantile(5e-324) == t_quantile(1e-300) == math.inf
    assert t_quantile(3, math.nextafter(0.5, 1)) == pytest.approx(0.0, abs=1e-7), "t² is lost beside 3"
    assert t_quantile(0.5) == pytest.approx(t_quantile(0.5000001), rel=1e-4)


def test_an_interval_without_bounds_has_null_there() -> None:
    plain = Interval(value=1.0, low=-math.inf, high=math.inf, n=1, error=math.nan, freedom=1)
    assert plain.to_json() == {"value": 1.0, "low": None, "high": None, "n": 1, "error": None, "freedom": 1}
    assert Interval(value=2.0, low=1.0, high=5.0, n=1, error=1, freedom=1).half == 2.0


def test_no_error_is_no_width_even_without_freedom() -> None:
    assert of_error(3.0, 0.0, 0.0, 2) == Interval(value=3.0, low=3.0, high=3.0, n=2, error=0.0, freedom=0.0)
    wide = of_error(3.0, 2.0, math.inf, 2)
    assert (wide.low, wide.high) == (pytest.approx(3 - 2 * 1.95996398), pytest.approx(3 + 2 * 1.95996398))


def test_a_drift_is_taken_out_from_five_repeats_on() -> None:
    line = [2.0 + 0.5 * t for t in (0, 1, 3, 4, 7)]
    straight = mean_interval(line, [0, 1, 3, 4, 7])
    assert (straight.value, straight.freedom, straight.n) == (pytest.approx(3.5), 3, 5)
    assert straight.error == pytest.approx(0.0, abs=1e-12)
    four = mean_interval(line[:4], [0, 1, 3, 4])
    assert (four.freedom, four.error) == (3, pytest.approx(math.sqrt(2.5 / 3 / 4)))
    same_time = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0], [2, 2, 2, 2, 2])
    assert (same_time.freedom, same_time.error) == (4, pytest.approx(math.sqrt(10 / 4 / 5)))
    scattered = mean_interval([1.0, 3.0, 2.0, 4.0, 5.0], [0, 1, 2, 3, 4])
    assert scattered.error == pytest.approx(math.sqrt(1.9 / 3 / 5))  # around the line of slope 0.9


@pytest.mark.parametrize(("resolution", "scatter"), [(2.9, 1.0), (3.0, 1.0), (3.1, 3.1)])
def test_a_scatter_below_a_third_of_the_resolution_is_not_believed(resolution: float, scatter: float) -> None:
    result = mean_interval([1.0, 2.0, 3.0], [0, 1, 2], resolution=resolution)
    assert result.error == pytest.approx(scatter / math.sqrt(3))


def test_further_errors_widen_an_interval() -> None:
    plain = of_error(10.0, 3.0, 5, 4)
    same = widened(plain, [])
    assert (same.value, same.error, same.half) == (10.0, 3.0, pytest.approx(plain.half))
    wider = widened(plain, [(4.0, 5)])
    assert (wider.value, wider.n, wider.error, wider.freedom) == (10.0, 4, 5.0, pytest.approx(625 / (81 / 5 + 256 / 5)))


@pytest.mark.parametrize("value", [8.0, -8.0])
def test_a_model_s_error_is_the_half_width(value: float) -> None:
    certain = of_error(value, 0.0, 3, 4)
    assert of_model(certain, 0.0) is certain
    result = of_model(certain, 0.25)
    assert (result.value, result.half, result.n) == (value, pytest.approx(2.0), 4)


def test_ratios_are_a_geometric_mean_with_shared_errors() -> None:
    assert ratio_interval([1.0, 2.0, 4.0], [2.0, 4.0, 8.0]).value == pytest.approx(0.5)
    values, baselines = [2.0, 8.0], [1.0, 1.0]
    result = ratio_interval(values, baselines)
    logs = mean_interval([math.log(2), math.log(8)], [0, 1])
    assert (result.value, result.n, result.freedom) == (pytest.approx(4.0), 2, pytest.approx(1))
    assert (result.low, result.high) == (pytest.approx(math.exp(logs.low)), pytest.approx(math.exp(logs.high)))
    assert result.error == pytest.approx(4 * logs.error)
    wider = ratio_interval([2.0, 2.0], [1.0, 1.0], [(0.1, math.inf)])
    assert (wider.value, wider.error) == (pytest.approx(2.0), pytest.approx(0.2))
    for pair in (([1.0, 2.0], [1.0]), ([1.0], [1.0, 2.0]), ([1.0, 0.0], [1.0, 2.0]), ([1.0, 1.0], [1.0, -2.0]), ([], [])):
        with pytest.raises(MeasurementError, match="form no pairs"):
            ratio_interval(*pair)


def test_no_errors_add_up_to_none() -> None:
    assert combined([]) == (0.0, 1.0)
    assert combined([(3.0, 5)]) == pytest.approx((3.0, 5.0))
    assert combined([(0.0, 2), (0.0, 7)]) == (0.0, 7)
    assert combined([(0.0, 2), (3.0, math.inf)]) == (3.0, math.inf)
    assert combined([(1.0, 4), (0.0, 2)]) == (1.0, pytest.approx(4))
    assert combined([(0.0, 0.0), (1.0, 4)]) == (1.0, pytest.approx(4)), "a known part may have no degrees of freedom"
