"""Measures what a draft and a verify of n rows cost here, and remembers it for this bundle, machine and thread count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from edge_devices.files.user_cache import cache_put, read_entries
from edge_runtime.drafting.cost_model import LEAST_SECONDS, MAX_ROWS, MeasuredCosts, extrapolated
from edge_runtime.interfaces import Drafter, Target

CACHE_NAME = "costs.json"
MAX_SECONDS = 2.0
MIN_ROUNDS, MAX_ROUNDS = 3, 15
# Text the rows are verified after.
TEXT = 32


def measure_costs(
    target: Target,
    drafter: Drafter | None,
    token: int,
    *,
    most_rows: int = MAX_ROWS,
    max_seconds: float = MAX_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredCosts:
    """Times rounds as they will be, a draft and then a verify, of 1 to `most_rows` rows, all that the target was opened for, after a
    short text of one `token`; leaves the cache empty.

    Figures of at least MIN_ROUNDS times all of them, however long they take, and of more while `max_seconds` are not over (`steady`).
    The time before them warms up. Without a drafter, or with one that drafts nothing here, drafting costs as good as nothing.
    """
    longest = min(most_rows, target.context - 2, target.rewind_slack)
    _begin_text(target, token, longest)
    rounds: list[list[float]] = []
    drafted = [0] * longest
    begin = clock()
    for number in range(MAX_ROUNDS + 1):
        if number > MIN_ROUNDS and clock() - begin > max_seconds:
            break
        verified, drafts = [0.0] * longest, [0.0] * longest
        # There and back again: what the order does to the caches falls on all alike.
        for rows in range(1, longest + 1) if number % 2 else range(longest, 0, -1):
            if target.length + longest > target.context:
                _begin_text(target, token, longest)
            start = clock()
            if drafter is not None and rows > 1:
                drafted[rows - 1] = len(drafter.draft(token, rows - 1))
            middle = clock()
            target.verify([token] * rows)
            verified[rows - 1], drafts[rows - 1] = clock() - middle, middle - start
            # One token stays, as in a round: a draft needs the hidden row of a token of the newest forward.
            target.rollback(target.length - rows + 1)
        rounds.append([*verified, *drafts])
    target.rollback(0)
    figures = steady(rounds[1:])
    verify = figures[:longest]
    while len(verify) < MAX_ROWS:  # one request has no room for more, several may have
        verify.append(extrapolated(verify))
    overhead, step = overhead_and_step(drafted, figures[longest:])
    return MeasuredCosts(verify=tuple(verify), step=step, overhead=overhead)


def _begin_text(target: Target, token: int, longest: int) -> None:
    """A text of TEXT tokens, or as many as leave room for a verify, that a draft can follow."""
    target.rollback(0)
    target.prefill([token] * max(0, min(TEXT, target.context - longest - 2) - 1))
    target.verify([token])


def overhead_and_step(drafted: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Returns what beginning a draft and each of its tokens takes, from drafts of some lengths: a line through them by least squares."""
    made = [(count, taken) for count, taken in zip(drafted, seconds, strict=True) if count]
    if not made:
        return 0.0, LEAST_SECONDS
    counts, taken = np.array(made).T
    if len(set(counts)) > 1:
        step, overhead = np.polyfit(counts, taken, 1)
        if overhead > 0 and step > 0:
            return float(overhead), float(step)
    return 0.0, max(float((taken / counts).mean()), LEAST_SECONDS)


def cached_costs(path: Path, key: str) -> MeasuredCosts | None:
    """Returns what `cache_costs` kept under this key; None if there is nothing or the file is damaged."""
    return MeasuredCosts.from_json(read_entries(path).get(key))


def cache_costs(path: Path, key: str, costs: MeasuredCosts) -> None:
    """Keeps costs for the next time; where that cannot be written they are measured again, which takes two seconds."""
    cache_put(path, key, costs.to_json())


def steady(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Returns what each figure takes, of rounds of the same figures: the median of its share of a round, of the shortest round.

    A machine is now faster and now slower, by more than figures differ, but all of a round alike.
    """
    totals = [sum(taken) for taken in rounds]
    shares = zip(*([one / total for one in taken] for taken, total in zip(rounds, totals, strict=True)), strict=True)
    return [statistics.median(share) * min(totals) for share in shares]
