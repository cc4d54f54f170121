"""Energy of the phases within a window.

Prefill, draft and verify are too short for any meter. Calibrated: a loop of each phase alone gives its power, and power × seconds of the
phases gives their *shares* of the joules that the window measured. The joules are always the window's; what the calibration got wrong
moves them from one phase to another only. Time-proportional: without known powers all phases are assumed to take the mean power.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

ENCODE, PREFILL, OTHER = "encode", "prefill", "other"  # encode: images and sound; other: between requests, in no phase
NO_DECODING = frozenset((ENCODE, PREFILL, OTHER))
CLOSURE = 0.05
MIN_OTHER = 0.001  # share of the window: less time in no phase is the clock's


@dataclass(frozen=True, kw_only=True)
class PhaseWatts:
    """Power of one phase, with its standard error and the degrees of freedom of that."""

    watts: float
    error: float = 0.0
    freedom: float = math.inf


@dataclass(frozen=True, kw_only=True)
class PhaseShares:
    """Joules per phase; their sum is the window's. `method`: measured (one phase), calibrated or time_proportional.

    `closure`: (calibrated power × seconds - measured) / measured, None where not tested; `closes`: within the tolerance.
    `errors`: relative standard error of each phase's power, with degrees of freedom.
    """

    joules: Mapping[str, float]
    method: str
    closure: float | None = None
    closes: bool = True
    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def sensitivity(self, phases: Collection[str]) -> dict[str, float]:
        """Returns d ln(joules of `phases`) / d ln(power of a phase), for every phase; 0 for all if `phases` are all or none."""
        total, inside = sum(self.joules.values()), sum(j for phase, j in self.joules.items() if phase in phases)
        if total <= 0 or inside <= 0:
            return dict.fromkeys(self.joules, 0.0)
        return {phase: joules * ((phase in phases) / inside - 1 / total) for phase, joules in self.joules.items()}


def share_out(
    joules: float,
    seconds: Mapping[str, float],
    powers: Mapping[str, PhaseWatts],
    *,
    error_joules: float = 0.0,
    window_s: float | None = None,
    idle_watts: float = 0.0,
) -> PhaseShares:
    """Divides a window's joules among its phases. `powers`: of the calibrated phases.

    Time of the window in no phase takes between idle power and the mean. A phase of unknown power may take anything from idle power to as
    far above the mean: both are errors of the shares. Calibrated powers close when power × seconds is within 5 % of what was measured,
    or within two standard errors of it.
    """
    total = sum(seconds.values())
    if total <= 0:
        return PhaseShares(joules=dict(seconds), method="measured")
    window_s = window_s or total
    rest_s = window_s - total if window_s - total > MIN_OTHER * window_s else 0.0
    mean = joules / window_s
    idle = min(max(idle_watts, 0.0), mean)
    known = seconds.keys() <= powers.keys() or len(seconds) == 1
    unknown = PhaseWatts(watts=mean, error=0.0 if known else (mean - idle) / math.sqrt(3))
    used = {phase: powers.get(phase, unknown) if known else unknown for phase in seconds}
    if rest_s:
        seconds = {**seconds, OTHER: rest_s}
        used[OTHER] = PhaseWatts(watts=(mean + idle) / 2, error=(mean - idle) / math.sqrt(12))
    computed = {phase: used[phase].watts * s for phase, s in seconds.items()}
    expected = sum(computed.values())
    shares = {phase: joules * j / expected if expected else 0.0 for phase, j in computed.items()}
    errors = {phase: (power.error / power.watts if power.watts else 0.0, power.freedom) for phase, power in used.items()}
    if len(shares) == 1 or not known:
        return PhaseShares(joules=shares, method="time_proportional" if len(shares) > 1 else "measured", errors=errors)
    if not seconds.keys() - {OTHER} <= powers.keys():
        return PhaseShares(joules=shares, method="measured", errors=errors)
    difference = expected - joules
    error = math.hypot(error_joules, *(used[phase].error * s for phase, s in seconds.items()))
    closes = abs(difference) <= max(CLOSURE * abs(joules), 2 * error)
    return PhaseShares(
        joules=shares, method="calibrated", closure=difference / joules if joules else math.inf, closes=closes, errors=errors
    )
