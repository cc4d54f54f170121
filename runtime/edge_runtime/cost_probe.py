"""Measures what a draft step and a verify of n rows cost here, and remembers it for this bundle, machine and thread count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_runtime.backends.base import Drafter, Target
from edge_runtime.cost_curve import MAX_ROWS, MeasuredCosts, foreseen
from edge_runtime.machine_cache import read_entries, remember_entry

CACHE_NAME = "costs.json"
MAX_SECONDS = 2.0
MIN_ROUNDS, MAX_ROUNDS = 3, 15
# Text the rows are verified after, and steps of a timed draft.
TEXT, STEPS = 32, 3
# A step of a drafter that drafts nothing, in seconds: as good as nothing.
NO_STEP = 1e-9


def measure_costs(
    target: Target, drafter: Drafter | None, token: int, *, most_rows: int = MAX_ROWS, max_seconds: float = MAX_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredCosts:  # fmt: skip
    """Times verifies of 1 to `most_rows` rows, all that the target was opened for, and drafts in turn, after a short text of one `token`; leaves the cache empty.

    Figures of at least MIN_ROUNDS rounds, however long they take, and of more while `max_seconds` are not over (`steady`). The round
    before them warms up. Without a drafter, or with one that drafts nothing here, a step costs as good as nothing: 1 ns.
    """
    longest = min(most_rows, target.context - 2, target.rewind_slack)
    asked = min(STEPS, most_rows - 1)
    text = [token] * max(1, min(TEXT, target.context - longest - 1))
    target.rollback(0)
    target.prefill(text)
    rounds: list[list[float]] = []
    begin = clock()
    for number in range(MAX_ROUNDS + 1):
        if number > MIN_ROUNDS and clock() - begin > max_seconds:
            break
        taken = [0.0] * (longest + 1)  # of verifies of 1, 2, ... rows, and of a draft step
        # There and back again: what the order does to the caches falls on all alike.
        for count in range(1, longest + 1) if number % 2 else range(longest, 0, -1):
            start = clock()
            target.verify([token] * count)
            taken[count - 1] = clock() - start
            target.rollback(len(text))
        target.verify([token])  # a draft follows a row of the newest forward
        start = clock()
        drafted = len(drafter.draft(token, asked)) if drafter is not None and asked else 0
        taken[-1] = (clock() - start) / drafted if drafted else NO_STEP
        rounds.append(taken)
        target.rollback(len(text))
    target.rollback(0)
    *verify, step = steady(rounds[1:])
    while len(verify) < MAX_ROWS:  # one request has no room for more, several may have
        verify.append(foreseen(verify))
    return MeasuredCosts(verify=tuple(verify), step=max(step, NO_STEP))


def remembered_costs(path: Path, key: str) -> MeasuredCosts | None:
    """Returns what `remember_costs` kept under this key; None if there is nothing or the file is damaged."""
    return MeasuredCosts.from_json(read_entries(path).get(key))


def remember_costs(path: Path, key: str, costs: MeasuredCosts) -> None:
    """Keeps costs for the next time; where that cannot be written they are measured again, which takes two seconds."""
    remember_entry(path, key, costs.to_json())


def steady(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Returns what each figure takes, of rounds of the same figures: the median of its share of a round, of the shortest round.

    A machine is now faster and now slower, by more than figures differ, but all of a round alike.
    """
    totals = [sum(taken) for taken in rounds]
    shares = zip(*([one / total for one in taken] for taken, total in zip(rounds, totals, strict=True)), strict=True)
    return [statistics.median(share) * min(totals) for share in shares]


def lower_quartile(taken: Sequence[float]) -> float:
    """Returns what a quarter of at least one timing stays below: other processes only ever add time."""
    return statistics.quantiles(taken, n=4, method="inclusive")[0] if len(taken) > 1 else taken[0]
