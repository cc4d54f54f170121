"""The kinds of drafter, and the time of a draft step of each. Uses `interfaces` only, no backend."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from edge_runtime.interfaces import Drafter, Target

DrafterKind = Literal["dense", "split", "lookup", "none"]
DRAFTER_KINDS: tuple[DrafterKind, ...] = get_args(DrafterKind)
# Length of the timed drafts, about that of a round.
STEPS = 3
MAX_SECONDS = 0.3
MIN_ROUNDS, MAX_ROUNDS = 3, 25


def is_model(kind: DrafterKind | None) -> bool:
    """Whether a drafter of this kind is a model; None stands for the fastest of those."""
    return kind not in ("lookup", "none")


def draft_step_seconds(
    target: Target,
    drafters: Mapping[DrafterKind, Drafter],
    token: int,
    *,
    steps: int = STEPS,
    max_seconds: float = MAX_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[DrafterKind, float]:
    """Returns the median seconds of a draft step of each drafter, from drafts of `steps` tokens after a text of one `token`.

    Drafters are timed in turn, after one round to warm up; MIN_ROUNDS are always done, more within `max_seconds`. Leaves the cache empty.
    """
    target.rollback(0)
    target.prefill([token])
    begin = clock()
    timings: dict[DrafterKind, list[float]] = {kind: [] for kind in drafters}
    for number in range(MAX_ROUNDS + 1):
        if number > MIN_ROUNDS and clock() - begin > max_seconds:
            break
        for kind, drafter in drafters.items():
            start = clock()
            drafter.draft(token, steps)
            if number:
                timings[kind].append((clock() - start) / steps)
    target.rollback(0)
    return {kind: statistics.median(seconds) for kind, seconds in timings.items()}
