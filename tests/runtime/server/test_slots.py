"""Which request goes to which session."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.server.engine.jobs import Job
from edge_runtime.server.engine.schedule import MAX_PASSED_OVER, Slot, choose_slot
from edge_runtime.server.requests.completions import CompletionRequest
from scripted import ScriptedTarget


def slot(number: int, cache: Sequence[int], last_used: int = 0) -> Slot:
    target = ScriptedTarget()
    target.prefill(cache)
    return Slot(number=number, target=target, last_used=last_used, client=0)


def job(*ids: int, seed: int | None = None) -> Job:
    sampling = SamplingParams(seed=seed)
    asked = CompletionRequest(prompt=ids, max_tokens=1, sampling=sampling, stop=())
    made = Job(asked, lambda _: None)
    made.prompt = list(ids)
    return made


def chosen(slots: Sequence[Slot], waiting: Sequence[Job]) -> tuple[int, int]:
    item, other = choose_slot(slots, waiting, lambda job: not job.request.repeatable)
    return item.number, waiting.index(other)


LONG = list(range(1, 60))  # the scripted target goes back 12 rows at most


@pytest.mark.parametrize(
    ("caches", "waiting", "choice"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [9]], [job(1, 2, 3, 4, 5, 6, 7)], (1, 0)),
        ([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [9]], [job(8), job(1, 2, 3, 4, 5, 6, 7)], (1, 1)),
        ([[1, 2, 3, 4], [5]], [job(1, 6, 7, 8)], (1, 0)),
        ([[], []], [job(1, 2), job(3, 4)], (1, 0)),
        ([LONG, []], [job(*LONG[:30], 77)], (1, 0)),
        ([[1, 2, 3], []], [job(1, 2, 3, 4, seed=1)], (1, 0)),
    ],
    ids=["the longest prefix", "before the first come", "a short prefix", "no prefix", "rows that are gone", "a seed"],
)
def test_the_longest_prefix_wins_or_the_session_used_longest_ago(caches, waiting, choice):
    """The first session was used last."""
    slots = [slot(number, cache, last_used=9 - number) for number, cache in enumerate(caches)]
    assert chosen(slots, waiting) == choice


def test_nobody_is_passed_over_for_ever():
    slots, first = [slot(0, [1, 2, 3])], job(7, 8)
    for _ in range(MAX_PASSED_OVER):
        assert chosen(slots, [first, job(1, 2, 3, 4)]) == (0, 1)
    assert chosen(slots, [first, job(1, 2, 3, 4)]) == (0, 0)
