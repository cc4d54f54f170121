"""A request that is suspended, and goes on later on the same session or another one, ends in the text that it has alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from edge_runtime import LoadOptions, Sessions, open_sessions
from edge_runtime.errors import RequestError
from edge_runtime.session.generation import PREFILL_ROWS, Generation
from scripted import SavableScriptedTarget, plain_greedy, scripted_sessions


def swapped(sessions: Sessions, requests: Sequence[Generation], seed: int) -> int:
    """Runs requests, of which there are more than sessions: each has one for some rounds. Returns how often one was suspended."""
    chance, count = random.Random(seed), 0
    waiting, on = [*requests], dict[int, Generation]()
    while waiting or on:
        for place, session in enumerate(sessions.sessions):
            if place not in on and waiting:
                on[place] = waiting.pop(chance.randrange(len(waiting)))
                session.resume(on[place])
                sessions.decoder.join(on[place])
        for _ in range(chance.randrange(1, 8)):
            sessions.decoder.step()
            assert not sessions.decoder.failures
        on = {place: request for place, request in on.items() if request in sessions.decoder.running}
        for place in [place for place in on if chance.random() < 0.7]:
            on[place].suspend()
            sessions.decoder.remove(on[place])
            waiting.append(on.pop(place))
            count += 1
    return count


@pytest.mark.parametrize("seed", range(5))
def test_scripted_requests_are_what_they_are_alone(seed: int) -> None:
    _, sessions = scripted_sessions(2, context=4096, kind=SavableScriptedTarget)
    prompts = [[1, 2, 3], [i % 17 for i in range(2 * PREFILL_ROWS + 100)], [4], [9, 9, 1, 5], [5] * 40]
    requests = [sessions.sessions[0].generate(prompt, max_tokens=60) for prompt in prompts]
    assert swapped(sessions, requests, seed) > 3
    assert [request.tokens for request in requests] == [plain_greedy(prompt, 60) for prompt in prompts]


@pytest.fixture(params=["llama", "onnx"])
def opened(request: pytest.FixtureRequest, quantized_pair: Path, onnx_pair: Callable[..., Path]) -> Sessions:
    llama = request.param == "llama"
    bundle = quantized_pair if llama else onnx_pair("int4")
    with open_sessions(bundle, 3 if llama else 1, LoadOptions(backend=request.param, threads=1, context=1024, drafter="split")) as sessions:
        yield sessions


def test_real_requests_are_what_they_are_alone(opened: Sessions) -> None:
    """Prompts of one piece and of several; texts beyond the sliding window; requests that begin on one session, whose policy learns."""
    first = opened.sessions[0]
    if first.row_kernels is None:
        pytest.skip("rows are exact on the project's own kernels alone, which have no variant for this processor")
    prompts = [f"class Stack{number}:\n    def push(self, item):\n" + "x = 1\n" * (number * 30) for number in range(6)]
    alone = [first.generate(prompt, max_tokens=150).text() for prompt in prompts]
    requests = [first.generate(prompt, max_tokens=150) for prompt in prompts]
    assert swapped(opened, requests, 1) > 3
    assert [request.text() for request in requests] == alone
    assert any(request.stats.accepted for request in requests)


def test_a_seed_draws_the_same_tokens() -> None:
    _, sessions = scripted_sessions(1, context=4096, kind=SavableScriptedTarget)
    (session,) = sessions.sessions
    options = {"max_tokens": 40, "temperature": 20.0, "seed": 3}
    alone = session.generate([1, 2, 3], **options)
    alone.text()
    requests = [session.generate([1, 2, 3], **options) for _ in range(3)]
    swapped(sessions, requests, 2)
    assert [request.tokens for request in requests] == [alone.tokens] * 3


def test_a_suspended_request_waits_for_its_session() -> None:
    _, sessions = scripted_sessions(1, kind=SavableScriptedTarget)
    (session,) = sessions.sessions
    request = session.generate([1, 2, 3], max_tokens=20)
    next(request.rounds())
    request.suspend()
    with pytest.raises(RequestError, match="another request began"):
        request.text()
    other = session.generate([4], max_tokens=5)
    assert other.text()
    session.resume(request)
    request.text()
    assert request.tokens == plain_greedy([1, 2, 3], 20)


def test_a_request_whose_rows_cannot_be_copied_goes_on() -> None:
    _, sessions = scripted_sessions(1)
    request = sessions.sessions[0].generate([1, 2, 3], max_tokens=20)
    next(request.rounds())
    with pytest.raises(RequestError, match="cannot copy the cache"):
        request.suspend()
    request.text()
    assert request.tokens == plain_greedy([1, 2, 3], 20)
