"""Ranges of predictions, and how far they are from a measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Range:
    """The lowest, a middle and the highest expected value."""

    low: float
    middle: float
    high: float

    @classmethod
    def between(cls, low: float, high: float) -> Range:
        """Returns the range whose middle is the geometric mean."""
        return cls(low=low, middle=math.sqrt(low * high), high=high)

    def plus(self, other: Range) -> Range:
        """Returns the sum of two values that are low together and high together."""
        return Range(low=self.low + other.low, middle=self.middle + other.middle, high=self.high + other.high)

    def times(self, factor: float) -> Range:
        """Returns the range in another unit."""
        return Range(low=self.low * factor, middle=self.middle * factor, high=self.high * factor)


def deviation(measured: float, predicted: Range) -> str:
    """Returns how far the middle prediction is from the measurement (as a share of it, unless one is 0), and whether it is in the range."""
    inside = "in range" if predicted.low <= measured <= predicted.high else "OUT OF RANGE"
    if not measured or not predicted.middle:
        return f"{predicted.middle - measured:+.2g}, {inside}"
    return f"{predicted.middle / measured - 1:+.0%}, {inside}"
