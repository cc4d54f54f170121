"""Times a draft step and verifies of 1 to 13 rows, in turn, up and down: what a round costs on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from edge_runtime.bench.records import CostCurve
from edge_runtime.bundle import MAX_DRAFT_LENGTH
from edge_runtime.drafters import draft_step_seconds
from edge_runtime.session import Session

MAX_SECONDS = 5.0
MIN_SWEEPS, MAX_SWEEPS = 3, 25


def measure_costs(
    session: Session, text: Sequence[int], *, max_seconds: float = MAX_SECONDS, clock: Callable[[], float] = time.perf_counter
) -> CostCurve:
    """Returns medians after `text`, which must leave room for the longest verify. Leaves the cache empty.

    Takes `max_seconds` at most once MIN_SWEEPS are done, and one sweep more to warm up.
    """
    target, drafter = session.target, session.drafter
    most = min(MAX_DRAFT_LENGTH, session.settings.longest_draft, target.rewind_slack - 1) + 1
    length = min(len(text), target.context - most)
    target.rollback(0)
    target.prefill(text[:length])
    token = text[-1]
    taken: dict[int, list[float]] = {rows: [] for rows in range(1, most + 1)}
    begin = clock()
    for sweep in range(MAX_SWEEPS + 1):
        if sweep > MIN_SWEEPS and clock() - begin > max_seconds:
            break
        for rows in taken if sweep % 2 else reversed(taken):
            start = clock()
            target.verify([token] * rows)
            seconds = clock() - start
            target.rollback(length)
            if sweep:
                taken[rows].append(seconds)
    steps = draft_step_seconds(target, {session.drafter_kind: drafter}, token, clock=clock) if drafter is not None else {}
    target.rollback(0)
    return CostCurve(
        drafter=session.drafter_kind, length=length, verify_seconds=tuple(map(statistics.median, taken.values())),
        draft_step_seconds=steps.get(session.drafter_kind),
    )  # fmt: skip
