"""Energy of windows by hand: counters and samplers, their errors, and windows that a meter cannot measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev

import pytest

from edge_devices.energy.recorder import Characteristics
from edge_devices.energy.windows import change_within, fresh_values, measure_window, sampling_error
from edge_devices.errors import MeasurementError
from edge_devices.meters.base import Kind, MeterFacts, Scope, Trace


def traced(kind: Kind, times: Sequence[float], values: Sequence[float]) -> Trace:
    facts = MeterFacts(name="the meter", kind=kind, scope=Scope.PACKAGE, source="", refresh_s=1.0, resolution=0.6, poll_s=1.0)
    return Trace(facts=facts, times=list(times), values=list(values))


def meter(refresh: float = 1.0, lag: float = 0.0) -> Characteristics:
    return Characteristics(refresh_s=refresh, longest_gap_s=refresh, lag_s=lag, zero_rate=0.0, read_s=0.0)


def counted(powers: Sequence[float], seconds: float = 1.0) -> Trace:
    """A counter that is read every `seconds` from time 0 on."""
    values = [0.0]
    for power in powers:
        values.append(values[-1] + power * seconds)
    return traced(Kind.COUNTER, [seconds * i for i in range(len(values))], values)


def test_a_steady_counter_by_hand() -> None:
    """Between 2.5 and 8.5 s the first second may show the time before; new values at 4, 5, 6, 7 and 8 s are inside."""
    result = measure_window(counted([5.0] * 12), 2.5, 8.5, meter())
    edge = 5 * math.sqrt(2) / math.sqrt(12)
    assert (result.seconds, result.watts, result.joules, result.observed_s, result.updates) == (6.0, 5.0, 30.0, 4.0, 5)
    assert result.error_watts == pytest.approx(math.hypot(edge, 0.6 / math.sqrt(6)) / 4)
    assert (result.resolution_watts, result.freedom, result.longest_gap_s) == (result.error_watts, math.inf, 1.5)


def test_a_counter_s_scatter_counts_for_the_part_that_is_not_seen() -> None:
    powers = [9.0, 9.0, 9.0, 9.0, 4.0, 6.0, 4.0, 6.0, 9.0, 9.0]
    result = measure_window(counted(powers), 2.5, 8.5, meter())
    assert result.watts == 5.0
    unseen = stdev([4.0, 6.0, 4.0, 6.0]) * (1 - 4 / 6)
    assert result.error_watts == pytest.approx(math.hypot(result.resolution_watts, unseen))
    slower = measure_window(counted(powers, 2.0), 5.0, 17.0, meter(refresh=2.0))
    assert slower.error_watts == pytest.approx(math.hypot(slower.resolution_watts, unseen)), "watts, not joules"


@pytest.mark.parametrize(("seconds", "first", "last", "updates"), [(1.0, 0.0, 1.0, 11), (0.99, 0.1, 0.9, 9)])
def test_a_fast_counter_needs_no_lead_in(seconds: float, first: float, last: float, updates: int) -> None:
    """From 1000 refreshes on, its first reading in the window counts, even the very first of all."""
    result = measure_window(counted([5.0] * 20, 0.1), 0.0, seconds, meter(refresh=0.001))
    assert (result.updates, result.observed_s) == (updates, pytest.approx(last - first))
    assert result.watts == pytest.approx(5.0)
    edge = 5 * 0.001 * math.sqrt(2) / math.sqrt(12)
    assert result.resolution_watts == pytest.approx(math.hypot(edge, 0.6 / math.sqrt(6)) / result.observed_s)


def test_a_counter_with_fewer_than_two_new_values_is_refused() -> None:
    for powers, number in (([0.0] * 10, 0), ([0.0] * 5 + [3.0] + [0.0] * 4, 1)):
        with pytest.raises(MeasurementError, match=f"the meter showed {number} new values in 6 s: the window is too short"):
            measure_window(counted(powers), 2.5, 8.5, meter())
    two = [0.0] * 4 + [3.0, 3.0] + [0.0] * 4
    assert measure_window(counted(two), 2.5, 8.5, meter()).updates == 2


@pytest.mark.parametrize(("start", "end"), [(3.0, 3.0), (4.0, 3.0), (math.nan, 3.0)])
def test_a_window_has_a_length(start: float, end: float) -> None:
    with pytest.raises(MeasurementError, match="has no length"):
        measure_window(counted([5.0] * 9), start, end, meter())


def sampled(values: Sequence[float]) -> Trace:
    return traced(Kind.SAMPLER, [float(i) for i in range(len(values))], values)


def test_a_sampler_s_values_hold_until_the_next() -> None:
    """The lead-in ends at 2 + 1.5 * 0.2 + 0.5 = 2.8 s, so 3 s is the first reading; the one at 7.5 s is held for half a second."""
    trace = sampled([50, 50, 50, 3, 4, 6, 5, 50, 50])
    trace.times[7:] = [7.5, 8.0]
    trace.values[7] = 8.0
    result = measure_window(trace, 2.0, 7.9, meter(refresh=0.5, lag=0.2))
    joules = 3 + 4 + 6 + 5 * 1.5 + 8 * 0.4
    assert result.watts == pytest.approx(joules / 4.9)
    assert (result.observed_s, result.updates) == (pytest.approx(4.9), 5)
    assert result.joules == pytest.approx(result.watts * 5.9)
    assert (result.error_watts, result.freedom) == sampling_error([3, 4, 6, 5, 8])
    assert result.resolution_watts == pytest.approx(0.6 / math.sqrt(12))
    assert result.longest_gap_s == pytest.approx(1.5)


def test_a_sampler_that_repeats_itself_has_fewer_new_values() -> None:
    result = measure_window(sampled([5, 3, 3, 4, 4, 4, 6, 6]), 0.0, 7.0, meter(refresh=0.5))
    assert result.updates == 3
    assert result.longest_gap_s == 1.0, "a repeated value is a reading, too"


def test_windows_within_the_lead_in_or_without_readings_are_refused() -> None:
    trace = sampled([5.0, 6.0] * 5)
    for end in (2.5, 3.0):
        with pytest.raises(MeasurementError, match=rf"the window of {end - 2:.3g} s ends within the meter's lead-in of 1 s"):
            measure_window(trace, 2.0, end, meter())
    assert measure_window(trace, 2.0, 3.5, meter()).observed_s == 0.5
    for start, end in ((2.1, 2.9), (2.1, 3.0), (30.0, 40.0)):
        with pytest.raises(MeasurementError, match=r"holds no reading between .* let the meter run"):
            measure_window(trace, start, end, meter(refresh=0.5))


def test_fresh_values_differ_from_the_reading_before() -> None:
    trace = sampled([1, 1, 2, 2, 3, 1])
    assert fresh_values(trace, 0.0, 5.0) == [2, 3, 1], "the first reading of all has none before it"
    assert fresh_values(trace, 2.0, 4.0) == [2, 3]


@pytest.mark.parametrize(
    ("values", "error", "freedom"),
    [
        ([], math.inf, 1.0),
        ([1.0, 2.0], math.inf, 1.0),
        ([2.0] * 4, 0.0, 3.0),
        ([1.0, 2.0, 3.0, 4.0], math.sqrt(5 / 3 / 2.4), 1.4),  # correlation 1.25 / 5
        ([1.0, 2.0, 1.0, 2.0], math.sqrt(1 / 3 / 4), 3.0),  # values that alternate are not worth more than independent ones
        ([0.0, 0.0, 3.0], math.sqrt(6 / 2 / 3), 2.0),
        ([0.0, 0.0, 0.0, 1.0, 1.0, 1.0], math.sqrt(1.5 / 5 / 2), 1.0),  # at least 2 independent ones
    ],
)
def test_the_error_of_a_mean_of_correlated_values(values: list[float], error: float, freedom: float) -> None:
    assert sampling_error(values) == (pytest.approx(error), pytest.approx(freedom))


def test_a_change_within_windows_is_the_mean_of_their_halves() -> None:
    trace = counted([5.0] * 10 + [8.0] * 10 + [5.0] * 10 + [4.0] * 10)
    rising, falling, steady = (measure_window(trace, start, start + 20, meter()) for start in (0.0, 20.0, 11.0))
    assert change_within(trace, [rising], meter()) == pytest.approx(3.0)
    assert change_within(trace, [falling], meter()) == pytest.approx(1.0), "never negative"
    assert change_within(trace, [rising, falling], meter()) == pytest.approx(1.0)
    assert change_within(trace, [], meter()) == 0.0
    short = measure_window(trace, 2.5, 6.0, meter())
    assert change_within(trace, [short], meter()) == 0.0, "halves too short to measure say nothing"
    assert change_within(trace, [short, rising], meter()) == pytest.approx(3.0)
    assert change_within(counted([5.0] * 40), [steady], meter()) == pytest.approx(0.0)
