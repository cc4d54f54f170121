"""Power of each phase in watts, and the cost of a round in joules."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_devices.files.limited_read import read_at_most
from edge_runtime.drafting.cost_model import Costs
from edge_runtime.drafting.policies import Timing
from edge_runtime.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_WATTS = 10_000.0
# Prices of time that are tried, as multiples of the watts of a forward; the last one all but ignores joules.
PRICES = np.concatenate(([0.0], np.geomspace(0.02, 500.0, 40)))
# The price rises by this factor while rounds take longer than promised, and falls by the other while they are this much quicker.
RAISE, LOWER, QUICKER = 1.25, 0.8, 0.97
# Seconds per token with lengths chosen round by round / those of the best fixed length, in simulations (0.93 to 1).
ADAPTIVE = 0.95
# A price that differs less is kept.
SAME_PRICE = 0.1


@dataclass(frozen=True, kw_only=True)
class PhasePower:
    """Mean watts, idle power included: while drafting, in a verify of several rows, and in a forward of one row (None: as a verify).

    All three are from one meter and scope. Raises ConfigError for a value that cannot be a power.
    """

    draft: float
    verify: float
    plain: float | None = None

    def __post_init__(self) -> None:
        for phase, watts in asdict(self).items():
            is_number = isinstance(watts, int | float) and not isinstance(watts, bool)
            if watts is not None and not (is_number and math.isfinite(watts) and 0 < watts <= MAX_WATTS):
                raise ConfigError(f"{watts!r} W in the phase {phase} is no power; give a number above 0 and at most {MAX_WATTS:g}")

    def forward(self, rows: int) -> float:
        """Watts of a target forward of `rows` rows."""
        return self.plain if rows == 1 and self.plain is not None else self.verify

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_phase_power(path: Path) -> PhasePower:
    """Reads {"draft": W, "verify": W, "plain": W}, or a report of `edge-devices energy --json` with calibration loops. ConfigError."""
    try:
        data = json.loads(read_at_most(path, MAX_FILE_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); write watts per phase, such as {_EXAMPLE}") from error
    return power_of(data, str(path))


def power_of(data: Any, name: str) -> PhasePower:
    """Returns the watts in a JSON value; `name` is its source, for errors. Raises ConfigError."""
    if isinstance(data, dict) and data.get("estimate") is True:
        raise ConfigError(f"{name} is an estimate, nothing in it was measured; calibrate with a meter (docs/energy.md)")
    watts = data.get("phase_watts", data) if isinstance(data, dict) else None
    if not isinstance(watts, dict) or not {"draft", "verify"} <= set(watts):
        raise ConfigError(f"{name} has no watts for draft and verify; write them such as {_EXAMPLE}")
    return PhasePower(draft=watts["draft"], verify=watts["verify"], plain=watts.get("plain"))


class EnergyCosts:
    """Costs in joules: the seconds of other costs × the power of the phase. Implements `cost_model.Costs`."""

    def __init__(self, seconds: Costs, power: PhasePower, *, slowdown: float | None = None) -> None:
        """`slowdown`: the most time per token that fewer joules may cost, as a share of the least possible; None: any."""
        self._seconds, self._power, self._slowdown = seconds, power, slowdown
        self.price = 0.0  # of time, in watts: with it the fewest joules are found among what is fast enough

    @property
    def is_provisional(self) -> bool:
        """Whether the seconds are."""
        return self._seconds.is_provisional

    def verify(self, rows: int) -> float:
        """Joules of one target forward of `rows` rows at the current length, with the price of its time."""
        return self._seconds.verify(rows) * (self._power.forward(rows) + self.price)

    def draft(self, steps: int, requests: int = 1) -> float:
        """Joules of drafting `steps` tokens, for one of `requests` requests that draft together, with the price of its time."""
        return self._seconds.draft(steps, requests) * (self._power.draft + self.price)

    def rows_to_time(self, limit: int) -> int | None:
        """Returns the number of rows whose seconds the fewest rounds timed."""
        return self._seconds.rows_to_time(limit)

    def keep_promise(self, tokens: Sequence[float], requests: int, seconds_per_token: float | None) -> bool:
        """Sets the price of time so that rounds are at most `slowdown` slower than the fastest; returns whether it changed.

        `tokens`: expected of rounds of 0, 1, ... drafts; `seconds_per_token` of the newest rounds. A Lagrange multiplier: the least
        price with which the draft length of fewest joules is fast enough, higher while real rounds are not.
        """
        if self._slowdown is None:
            return False
        emitted, rows = np.asarray(tokens), range(1, len(tokens) + 1)
        forwards = np.array([self._seconds.verify(n * requests) / requests for n in rows])
        drafts = np.array([self._seconds.draft(n, requests) for n in range(len(tokens))])
        seconds = (forwards + drafts) / emitted
        joules = (forwards * [self._power.forward(n) for n in rows] + drafts * self._power.draft) / emitted
        limit = (1 + self._slowdown) * ADAPTIVE * float(seconds.min())
        prices = PRICES * self._power.forward(1)
        chosen = np.argmin(joules + prices[:, None] * seconds, axis=1)
        fast = seconds[chosen] <= limit
        price = float(prices[int(np.argmax(fast)) if fast.any() else -1])
        if seconds_per_token is not None and seconds_per_token > limit:
            price = max(price, self.price * RAISE, float(prices[1]))
        elif seconds_per_token is not None and seconds_per_token > QUICKER * limit:
            price = max(price, self.price)
        else:
            price = max(price, self.price * LOWER if self.price * LOWER >= prices[1] else 0.0)
        price = min(price, float(prices[-1]))
        if abs(price - self.price) <= SAME_PRICE * max(price, self.price):
            return False
        self.price = price
        return True

    def learn(self, timing: Timing) -> None:
        """Passes a timing to the costs in seconds: the time of a phase changes from round to round, its power hardly."""
        self._seconds.learn(timing)


_EXAMPLE = '{"draft": 3.1, "verify": 5.2, "plain": 4.4}'
