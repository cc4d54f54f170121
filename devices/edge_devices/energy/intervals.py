"""Computes means, ratios and their 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, linear_regression
from typing import Any

from edge_devices.errors import MeasurementError
from edge_devices.files.typed_json import finite_json

CONFIDENCE = 0.95
# With fewer degrees of freedom, t is above a million for any probability that figures use.
MIN_FREEDOM = 1e-3
MIN_TO_DETREND = 5  # with fewer values, a slope would take too large a part of the degrees of freedom


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure with its 95 % confidence interval, from `n` values. `error` is its standard error, with `freedom` degrees of freedom."""

    value: float
    low: float
    high: float
    n: int
    error: float
    freedom: float

    @property
    def half(self) -> float:
        """Half the interval's width, in the figure's unit."""
        return (self.high - self.low) / 2

    def over(self, count: float) -> Interval:
        """Returns the figure divided by `count`."""
        return replace(self, value=self.value / count, low=self.low / count, high=self.high / count, error=self.error / count)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys. Infinite bounds are null."""
        record: dict[str, Any] = finite_json(self)
        return record


def of_error(value: float, error: float, freedom: float, n: int) -> Interval:
    """Returns value ± t·error, with Student's t for the degrees of freedom."""
    half = t_quantile(freedom) * error if error else 0.0
    return Interval(value=value, low=value - half, high=value + half, n=n, error=error, freedom=freedom)


def mean_interval(values: Sequence[float], times: Sequence[float], *, resolution: float = 0.0) -> Interval:
    """Returns the mean of repeats with its interval.

    A linear drift over `times` (heating, falling battery voltage) is not scatter. So with 5 or more repeats, the scatter is measured from a
    least-squares line, with n - 2 degrees of freedom; the mean does not change. If the scatter is smaller than the meter can resolve, it is
    replaced by `resolution`, the smallest error of one value. Raises MeasurementError for fewer than 2 values.
    """
    n = len(values)
    if n < 2:
        raise MeasurementError(f"{n} repeat gives no interval; run at least 2, better 5")
    mean, middle = fmean(values), fmean(times)
    slope, freedom = 0.0, n - 1
    if n >= MIN_TO_DETREND and max(times) > min(times):
        slope, freedom = linear_regression(times, values).slope, n - 2
    squares = sum((v - mean - slope * (t - middle)) ** 2 for t, v in zip(times, values, strict=True))
    scatter = math.sqrt(squares / freedom)
    if scatter < resolution / 3:
        scatter = resolution
    return of_error(mean, scatter / math.sqrt(n), freedom, n)


def widened(interval: Interval, errors: Sequence[tuple[float, float]]) -> Interval:
    """Returns the interval with further independent errors, given as (standard error, degrees of freedom)."""
    error, freedom = combined([(interval.error, interval.freedom), *errors])
    return of_error(interval.value, error, freedom, interval.n)


def of_model(interval: Interval, model_error: float) -> Interval:
    """Returns the interval of a power model's figure, which includes the uncertainty of the model's watts."""
    if not model_error:
        return interval
    ranged = widened(interval, [(model_error * abs(interval.value) / t_quantile(math.inf), math.inf)])
    return replace(ranged, low=max(0.0, ranged.low)) if interval.value > 0 else ranged  # energy is not negative


def ratio_interval(values: Sequence[float], baselines: Sequence[float], errors: Sequence[tuple[float, float]] = ()) -> Interval:
    """Returns value / baseline as the geometric mean of the pairs' ratios.

    `errors` are relative errors that all pairs share. Raises MeasurementError for fewer than 2 pairs.
    """
    if len(values) != len(baselines) or len(values) < 2 or min(*values, *baselines) <= 0:
        raise MeasurementError(f"{len(values)} and {len(baselines)} repeats form no pairs; run both variants equally often, at least twice")
    logs = [math.log(v / b) for v, b in zip(values, baselines, strict=True)]
    inner = widened(mean_interval(logs, range(len(logs))), errors)
    value, low, high = (math.exp(x) for x in (inner.value, inner.low, inner.high))
    return Interval(value=value, low=low, high=high, n=inner.n, error=inner.error * value, freedom=inner.freedom)


def combined(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Adds independent errors, given as (error, degrees of freedom); returns those of the sum (Welch-Satterthwaite)."""
    variances = [(e * e, f) for e, f in parts if e > 0]
    total = sum(v for v, _ in variances)
    if not total:
        return 0.0, max((f for _, f in parts), default=1.0)
    inverse = sum(v * v / f for v, f in variances)
    return math.sqrt(total), total**2 / inverse if inverse else math.inf


@lru_cache(maxsize=4096)
def t_quantile(freedom: float, probability: float = (1 + CONFIDENCE) / 2) -> float:
    """Returns Student's t for a probability above 0.5, by bisection of the distribution function; infinity if it is above a million."""
    if freedom < MIN_FREEDOM:
        return math.inf
    freedom = min(freedom, 1e7)  # above this, Student's distribution equals the normal one
    low, high = 0.0, 1.0
    while _t_below(high, freedom) < probability:
        high *= 2
        if high > 1e6:
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_below(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def _t_below(t: float, freedom: float) -> float:
    """P(T <= t) for t >= 0: 1 - I_x(freedom / 2, 1 / 2) / 2 with x = freedom / (freedom + t²) (Abramowitz and Stegun 26.7.1)."""
    return 1 - _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) for x above 0, by its continued fraction (Abramowitz and Stegun 26.5.8), for x or 1 - x, whichever converges faster."""
    if x >= 1:
        return 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x > (a + 1) / (a + b + 2):
        return 1 - front * _fraction(1 - x, b, a) / b
    return front * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of I_x(a, b), by Lentz's method."""
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    total = d
    for m in range(1, 500):
        for step in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)), -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            d = 1 / (1 + step * d)
            c = 1 + step / c
            total *= c * d
        if abs(c * d - 1) < 1e-12:
            break
    return total
