"""Paired ratios of speeds with bootstrap intervals.

A pair is the same prompt in the same repeat. The figure is the geometric mean over the domains of the geometric mean over their prompts
of each prompt's median ratio. The interval is for measuring the same prompts again; it does not cover other prompts. The standard error
of the logarithm comes from a bootstrap over the repeats of each prompt (Efron 1979), times sqrt(n / (n - 1)), as resamples of n repeats
scatter too little by that factor. The interval is this error times the quantile of Student's t, since a percentile of the resamples
cannot lie outside of the few measured values.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_bench.measure.records import Run
from edge_devices.energy.intervals import t_quantile

DRAWS = 2000
# An interval whose ends differ by more than this factor says nothing.
WIDEST = 4
SEED = 20261121

# Logarithms of the ratios of one prompt, one for each repeat that both variants have.
Logs = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio with its 95% interval, whose ends are None if there is a single repeat only. `pairs` is the number of pairs.

    `worst` is the lowest median of a prompt.
    """

    value: float
    low: float | None
    high: float | None
    pairs: int
    worst: float

    @property
    def determined(self) -> bool:
        """Whether the runs agree well enough for the ratio to mean something; True for a single repeat, which has no interval."""
        return self.low is None or self.high is None or self.high <= WIDEST * self.low

    @property
    def verdict(self) -> str:
        """The claim that the interval supports: "faster", "slower", or "" if it contains 1, is too wide or is unknown."""
        if self.low is None or self.high is None or not self.determined:
            return ""
        return "faster" if self.low > 1 else "slower" if self.high < 1 else ""

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return asdict(self) | {"determined": self.determined}


def speed(run: Run) -> float:
    """Returns emitted tokens per second of decoding."""
    return run.tokens / run.seconds


def paired_logs(runs: Iterable[Run], baseline: Iterable[Run]) -> dict[str, list[Logs]]:
    """Returns the logarithms of speed / baseline speed: per domain a list of prompts, per prompt an array of repeats."""
    base = {(run.domain, run.prompt, run.repeat): speed(run) for run in baseline}
    prompts: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in runs:
        other = base.get((run.domain, run.prompt, run.repeat))
        if other is not None:
            prompts[run.domain, run.prompt].append(math.log(speed(run) / other))
    domains: dict[str, list[Logs]] = defaultdict(list)
    for (domain, _), logs in prompts.items():
        domains[domain].append(np.array(logs))
    return dict(domains)


def first_token_ratio(runs: Iterable[Run], others: Iterable[Run]) -> Ratio | None:
    """Returns how many times as early the first token of `runs` comes as that of `others`; None without pairs that time it."""

    def timed(each: Iterable[Run]) -> list[Run]:
        return [replace(run, tokens=1, seconds=run.first_token_seconds) for run in each if run.first_token_seconds]

    return ratio(paired_logs(timed(runs), timed(others)))


def ratio(domains: Mapping[str, list[Logs]]) -> Ratio | None:
    """Returns the geometric mean over the domains of the geometric mean over their prompts; None without pairs."""
    if not domains:
        return None
    prompts = [logs for domain in domains.values() for logs in domain]
    medians = [float(np.median(logs)) for logs in prompts]
    draws = np.mean([np.mean([_drawn_medians(logs) for logs in domain], axis=0) for domain in _seeded(domains)], axis=0)
    value = float(np.mean([np.mean([np.median(logs) for logs in domain]) for domain in domains.values()]))
    fewest, freedom = min(len(logs) for logs in prompts), sum(len(logs) - 1 for logs in prompts)
    known = fewest > 1
    half = t_quantile(freedom) * float(draws.std()) * math.sqrt(fewest / (fewest - 1)) if known else 0.0
    return Ratio(
        value=math.exp(value),
        low=math.exp(value - half) if known else None,
        high=math.exp(value + half) if known else None,
        pairs=sum(map(len, prompts)),
        worst=math.exp(min(medians)),
    )


def _seeded(domains: Mapping[str, list[Logs]]) -> Iterable[list[tuple[Logs, np.random.Generator]]]:
    """Yields each domain's prompts with a fixed random generator each, so that figures are reproducible."""
    for number, logs in enumerate(domains.values()):
        yield [(prompt, np.random.default_rng([SEED, number, index])) for index, prompt in enumerate(logs)]


def _drawn_medians(prompt: tuple[Logs, np.random.Generator]) -> NDArray[np.float64]:
    logs, random = prompt
    return np.median(logs[random.integers(0, len(logs), (DRAWS, len(logs)))], axis=1)
