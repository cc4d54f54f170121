"""Measures the cost of a draft and of a verify of n rows on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from edge_devices.waiting import Report, no_report
from edge_runtime.calibration.measured import MeasuredValue
from edge_runtime.drafting.cost_model import MAX_ROWS, MIN_SECONDS, MeasuredCosts, extrapolated
from edge_runtime.interfaces import Drafter, Target

COSTS = MeasuredValue(kind="costs", value_class=MeasuredCosts, doing="measuring what drafts cost on this machine")
MAX_SECONDS = 2.0
MIN_ROUNDS, MAX_ROUNDS = 3, 15
# Text the rows are verified after.
TEXT = 32


def measure_costs(
    target: Target,
    drafter: Drafter | None,
    token: int,
    *,
    max_rows: int = MAX_ROWS,
    max_seconds: float = MAX_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
    report: Report = no_report,
) -> MeasuredCosts:
    """Times a draft and then a verify, as in real rounds, of 1 to `max_rows` rows after a short text of one `token`.

    After one pass to warm up, all row counts are measured at least MIN_ROUNDS times, and more often within `max_seconds` (see `steady`).
    Without a drafter, or with one that drafts nothing here, the cost of drafting is negligible. Leaves the cache empty. `report` gets the
    share of the work that is done.
    """
    longest = min(max_rows, target.context - 2, target.rewind_slack)
    begin_text(target, token, longest)
    rounds: list[list[float]] = []
    drafted = [0] * longest
    for number in timed_rounds(MIN_ROUNDS, MAX_ROUNDS, max_seconds, clock=clock, report=report):
        verified, drafts = [0.0] * longest, [0.0] * longest
        # Alternating order, so that its effect on the CPU caches is shared by all row counts.
        for rows in range(1, longest + 1) if number % 2 else range(longest, 0, -1):
            if target.length + longest > target.context:
                begin_text(target, token, longest)
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
    while len(verify) < MAX_ROWS:  # one request has no room for more rows, several requests may have
        verify.append(extrapolated(verify))
    overhead, step = overhead_and_step(drafted, figures[longest:])
    return MeasuredCosts(verify=tuple(verify), step=step, overhead=overhead)


def timed_rounds(min_rounds: int, max_rounds: int, max_seconds: float, *, clock: Callable[[], float], report: Report) -> Iterator[int]:
    """Counts rounds from 0, which warms up: at least `min_rounds` and at most `max_rounds` more, until `max_seconds` are over.

    `report` gets the share that is done.
    """
    begin = clock()
    for number in range(max_rounds + 1):
        seconds = clock() - begin
        if number > min_rounds and seconds > max_seconds:
            return
        report(max(number / (max_rounds + 1), min(number / (min_rounds + 1), seconds / max_seconds if max_seconds else 1.0)))
        yield number


def begin_text(target: Target, token: int, longest: int) -> None:
    """Fills the cache with TEXT tokens, or as many as leave room for a verify, so that a draft can follow."""
    target.rollback(0)
    target.prefill([token] * max(0, min(TEXT, target.context - longest - 2) - 1))
    target.verify([token])


def overhead_and_step(drafted: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Returns the fixed overhead of a draft and the cost per token: a least-squares line through drafts of several lengths."""
    made = [(count, times) for count, times in zip(drafted, seconds, strict=True) if count]
    if not made:
        return 0.0, MIN_SECONDS
    counts, times = np.array(made).T
    if len(set(counts)) > 1:
        apart = counts - counts.mean()
        step = (apart * times).sum() / (apart * apart).sum()
        overhead = times.mean() - step * counts.mean()
        if overhead > 0 and step > 0:
            return float(overhead), float(step)
    return 0.0, max(float((times / counts).mean()), MIN_SECONDS)


def steady(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Returns a figure for each column of the rounds: the median of its share of a round, times the shortest round.

    The speed of a machine varies by more than the figures differ, but it affects all figures of a round alike.
    """
    totals = [sum(figures) for figures in rounds]
    shares = zip(*([figure / total for figure in figures] for figures, total in zip(rounds, totals, strict=True)), strict=True)
    return [statistics.median(share) * min(totals) for share in shares]
