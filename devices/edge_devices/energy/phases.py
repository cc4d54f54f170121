"""Energy of phases that are too short for any meter: prefill, draft, verify.

Calibrated: each phase's power is known from a loop of that phase alone, its energy is power × time, and the sum must close with what the meter
saw. Time-proportional, where a power is not known: all phases share the mean power, which is an assumption and labelled so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

CLOSURE = 0.05


@dataclass(frozen=True, kw_only=True)
class PhaseShares:
    """Joules per phase; `method`: measured (one phase), calibrated or time_proportional; `closure`: (sum - measured) / measured, None where not tested."""

    joules: Mapping[str, float]
    method: str
    closure: float | None
    closes: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return asdict(self)


def share_out(
    joules: float, seconds: Mapping[str, float], watts: Mapping[str, tuple[float, float]], *, error_joules: float = 0.0
) -> PhaseShares:
    """Divides a window's joules over its phases. `watts`: power and its standard error of the phases that were calibrated.

    The sum closes when it is within 5 % of what was measured, or within two standard errors of it.
    """
    total = sum(seconds.values())
    if len(seconds) <= 1 or total <= 0:
        return PhaseShares(joules=dict.fromkeys(seconds, joules), method="measured", closure=None, closes=True)
    if not seconds.keys() <= watts.keys():
        shares = {phase: joules * s / total for phase, s in seconds.items()}
        return PhaseShares(joules=shares, method="time_proportional", closure=None, closes=True)
    shares = {phase: watts[phase][0] * s for phase, s in seconds.items()}
    difference = sum(shares.values()) - joules
    error = math.hypot(error_joules, *(watts[phase][1] * s for phase, s in seconds.items()))
    closes = abs(difference) <= max(CLOSURE * abs(joules), 2 * error)
    return PhaseShares(joules=shares, method="calibrated", closure=difference / joules if joules else math.inf, closes=closes)
