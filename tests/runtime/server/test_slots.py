"""Which request goes to which session."""

from __future__ import annotations

from collections.abc import Sequence

from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.server.engine.jobs import Job
from edge_runtime.server.engine.worker import MAX_PASSED_OVER, Slot, choose_slot
from edge_runtime.server.requests.completions import CompletionRequest
from scripted import ScriptedTarget


def slot(number: int, cache: Sequence[int], last_used: int = 0, client: int = 0) -> Slot:
    target = ScriptedTarget()
    target.prefill(cache)
    return Slot(number=number, target=target, last_used=last_used, client=client)


def job(*ids: int, seed: int | None = None) -> Job:
    sampling = SamplingParams(seed=seed)
    asked = CompletionRequest(prompt=ids, max_tokens=1, sampling=sampling, stop=())
    made = Job(asked, lambda _: None)
    made.prompt = list(ids)
    return made


def chosen(slots: Sequence[Slot], waiting: Sequence[Job]) -> tuple[int, int]:
    one, other = choose_slot(slots, waiting)
    return one.number, waiting.index(other)


def test_the_longest_common_prefix_wins():
    slots = [slot(0, [1, 2, 3, 4]), slot(1, [1, 2, 3, 4, 5, 6]), slot(2, [9])]
    assert chosen(slots, [job(1, 2, 3, 4, 5, 6, 7)]) == (1, 0)
    assert chosen(slots, [job(8), job(1, 2, 3, 4, 5, 6, 7)]) == (1, 1)


def test_a_few_tokens_in_common_do_not_cost_a_conversation_its_rows():
    assert chosen([slot(0, [1, 2, 3, 4], last_used=7), slot(1, [5], last_used=3)], [job(1, 6, 7, 8)]) == (1, 0)


def test_without_a_prefix_the_first_come_gets_the_session_used_longest_ago():
    assert chosen([slot(0, [], last_used=2), slot(1, [], last_used=1)], [job(1, 2), job(3, 4)]) == (1, 0)


def test_rows_that_cannot_be_gone_back_to_do_not_count():
    long = list(range(1, 60))  # the scripted target goes back 12 rows at most
    assert chosen([slot(0, long, last_used=1), slot(1, [])], [job(*long[:30], 77)]) == (1, 0)


def test_a_seed_leaves_the_caches_alone():
    assert chosen([slot(0, [1, 2, 3], last_used=1), slot(1, [])], [job(1, 2, 3, 4, seed=1)]) == (1, 0)


def test_nobody_is_passed_over_for_ever():
    slots, first = [slot(0, [1, 2, 3])], job(7, 8)
    for _ in range(MAX_PASSED_OVER):
        assert chosen(slots, [first, job(1, 2, 3, 4)]) == (0, 1)
    assert chosen(slots, [first, job(1, 2, 3, 4)]) == (0, 0)


def test_rows_of_another_client_do_not_count():
    slots = [slot(0, [1, 2, 3, 4], last_used=9, client=1), slot(1, [1, 2], last_used=1)]
    assert chosen(slots, [job(1, 2, 3, 4, 5)]) == (1, 0)
