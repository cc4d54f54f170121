"""Power of each phase in watts, and the cost of a round in joules."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from edge_devices.files.limited_read import read_at_most
from edge_runtime.drafting.cost_model import Costs
from edge_runtime.drafting.frontier import RoundCosts
from edge_runtime.drafting.policies import Timing
from edge_runtime.errors import ConfigError
from edge_runtime.interfaces import Drafter, Target

MAX_FILE_BYTES = 1 << 20
MAX_WATTS = 10_000.0


@dataclass(frozen=True, kw_only=True)
class PhasePower:
    """Mean watts, idle power included: while drafting, in a verify of several rows, and in a forward of one row (None: as a verify).

    `by_rows` has the watts of forwards of these numbers of rows, where they were measured: more rows keep more of a processor busy.
    All are from one meter and scope. Raises ConfigError for a value that cannot be a power.
    """

    draft: float
    verify: float
    plain: float | None = None
    by_rows: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = {f"verify of {rows} rows": watts for rows, watts in self.by_rows.items()}
        if not all(isinstance(number, int) and number >= 1 for number in self.by_rows):
            raise ConfigError(f"watts by rows are keyed {', '.join(map(str, self.by_rows))[:80]}; write numbers of rows of 1 and more")
        for phase, watts in {"draft": self.draft, "verify": self.verify, "plain": self.plain, **rows}.items():
            is_number = isinstance(watts, int | float) and not isinstance(watts, bool)
            if watts is not None and not (is_number and math.isfinite(watts) and 0 < watts <= MAX_WATTS):
                raise ConfigError(f"{watts!r} W in the phase {phase} is no power; give a number above 0 and at most {MAX_WATTS:g}")

    def forward(self, rows: int) -> float:
        """Watts of a target forward of `rows` rows; linear between the numbers that were measured, and constant beyond them."""
        if self.by_rows:
            measured = sorted(self.by_rows)
            return float(np.interp(rows, measured, [self.by_rows[number] for number in measured]))
        return self.plain if rows == 1 and self.plain is not None else self.verify

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class PowerSource(Protocol):
    """A meter that measures the phases of an opened pair."""

    def phases(self, target: Target, drafter: Drafter | None, token: int, max_rows: int, key: str) -> PhasePower:
        """Returns the watts of each phase, measured or cached under `key`; empties the KV cache. `token` fills texts.

        Raises RequestError where the meter has no figure.
        """


def read_phase_power(path: Path) -> PhasePower:
    """Reads {"draft": W, "verify": W, "plain": W}, or what `edge-bench report LOG --json` writes of calibration loops. ConfigError.

    "by_rows": {"1": W, "4": W, ...} may give the watts of forwards by their numbers of rows.
    """
    try:
        data = json.loads(read_at_most(path, MAX_FILE_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); write watts per phase, such as {_EXAMPLE}") from error
    if isinstance(data, dict) and data.get("estimate") is True:
        raise ConfigError(f"{path} is an estimate, nothing in it was measured; calibrate with a meter (docs/measure-energy.md)")
    watts = data.get("phase_watts", data) if isinstance(data, dict) else None
    if not isinstance(watts, dict) or not {"draft", "verify"} <= set(watts):
        raise ConfigError(f"{path} has no watts for draft and verify; write them such as {_EXAMPLE}")
    by_rows = watts.get("by_rows", {})
    try:
        counted = {int(rows): value for rows, value in by_rows.items()}
    except (AttributeError, ValueError) as error:
        raise ConfigError(f'by_rows of {path} is {str(by_rows)[:80]}; write watts by numbers of rows, such as {{"1": 4.4}}') from error
    return PhasePower(draft=watts["draft"], verify=watts["verify"], plain=watts.get("plain"), by_rows=counted)


class EnergyCosts:
    """Costs in joules: the seconds of other costs × the power of the phase. Implements `cost_model.Costs`."""

    def __init__(self, seconds: Costs, power: PhasePower, *, slowdown: float | None = None) -> None:
        """`slowdown`: the most time per token that fewer joules may cost, for `time_bound.TimeBound`; None: any."""
        self.seconds, self._power, self.slowdown = seconds, power, slowdown
        # What a joule counts, and the price of time in watts; without the first, time alone counts.
        self.weights = 1.0, 0.0

    @property
    def is_provisional(self) -> bool:
        """Whether the seconds are."""
        return self.seconds.is_provisional

    def verify(self, rows: int) -> float:
        """Joules of one target forward of `rows` rows at the current length, with the price of its time."""
        return self.seconds.verify(rows) * self._priced(self._power.forward(rows))

    def share(self, rows: int, requests: int) -> float:
        """Joules of a request's part of a verify that `requests` requests share, with the price of its time."""
        return self.seconds.share(rows, requests) * self._priced(self._power.forward(rows * requests))

    def draft(self, steps: int, requests: int = 1) -> float:
        """Joules of drafting `steps` tokens, for one of `requests` requests that draft together, with the price of its time."""
        return self.seconds.draft(steps, requests) * self._priced(self._power.draft)

    def _priced(self, watts: float) -> float:
        return self.weights[0] * watts + self.weights[1]

    def table(self, rows: int, drafts: int, requests: int) -> tuple[RoundCosts, RoundCosts]:
        """Seconds and joules, without a price, of verifying up to `rows` - 1 drafts and of up to `drafts` drafts, a request's share."""
        verify = np.array([self.seconds.share(n, requests) for n in range(1, rows + 1)])
        draft = np.array([self.seconds.draft(n, requests) for n in range(drafts + 1)])
        watts = [self._power.forward(n * requests) for n in range(1, rows + 1)]
        return RoundCosts(verify, draft), RoundCosts(verify * watts, draft * self._power.draft)

    def rows_to_time(self, limit: int) -> int | None:
        """Returns the number of rows whose seconds the fewest rounds timed."""
        return self.seconds.rows_to_time(limit)

    def learn(self, timing: Timing) -> None:
        """Passes a timing to the costs in seconds: the time of a phase changes from round to round, its power hardly."""
        self.seconds.learn(timing)


_EXAMPLE = '{"draft": 3.1, "verify": 5.2, "plain": 4.4}'
