"""Several requests in one context: outputs equal those of sessions of their own, whatever joins, leaves or fails beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.backends.kernels import loader
from edge_runtime.drafting.policies import RoundPlan, RoundResult, Timing
from edge_runtime.errors import RequestError
from edge_runtime.session import batch
from edge_runtime.session.batch import PrefillPace
from edge_runtime.session.generation import PREFILL_ROWS
from edge_runtime.session.open import open_session, open_sessions
from scripted import plain_greedy, scripted_sessions

PROMPTS = ["class Stack:\n    def push(", "def add(a, b):\n    return", "import os\n\nfor name in os.", "# The quick brown"]


def test_each_request_gets_what_it_would_get_alone() -> None:
    batch, sessions = scripted_sessions(3)
    prompts = [[1, 2, 3], [4], [9, 9, 1, 5]]
    started = [s.generate(p, max_tokens=n, draft_length=3) for s, p, n in zip(sessions.sessions, prompts, (40, 7, 23), strict=True)]
    list(sessions.run(started))
    for generation, prompt, n in zip(started, prompts, (40, 7, 23), strict=True):
        assert generation.tokens == plain_greedy(prompt, n)
        assert generation.finish_reason == "length"
    assert batch.forwards[0] == [4, 4, 4], "the first forward serves all three"
    assert len(batch.forwards[-1]) == 1, "the longest goes on alone"


def test_requests_of_one_session_wait_for_each_other() -> None:
    _, sessions = scripted_sessions(2)
    first, second = sessions.sessions
    started = [first.generate([1], max_tokens=5), first.generate([2], max_tokens=5), second.generate([3], max_tokens=9)]
    list(sessions.run(started))
    assert [g.tokens for g in started] == [plain_greedy([1], 5), plain_greedy([2], 5), plain_greedy([3], 9)]


def test_a_full_context_ends_only_its_own_request() -> None:
    _, sessions = scripted_sessions(2, context=16)
    long, short = sessions.sessions[0].generate([1] * 10, max_tokens=50), sessions.sessions[1].generate([2], max_tokens=12)
    list(sessions.run([long, short]))
    assert long.finish_reason == "context"
    assert len(long.tokens) == 16 - 9
    assert short.tokens == plain_greedy([2], 12)


@pytest.fixture
def pieces_take(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how many seconds a piece of a prompt may take, whatever the others' rounds take."""

    def set_to(seconds: float) -> None:
        monkeypatch.setattr(batch, "PIECE_SECONDS", seconds)
        monkeypatch.setattr(PrefillPace, "count_round", lambda *_: None)

    return set_to


@pytest.mark.parametrize(
    ("seconds", "lengths"), [(1e9, [32, 96, 224, 480, 512, 1024, 1123]), (0.0, range(32, 512, 32))], ids=["quick", "slow"]
)
def test_a_long_prompt_joins_piece_by_piece(seconds: float, lengths: Sequence[int], pieces_take: Callable[[float], None]) -> None:
    pieces_take(seconds)
    _, sessions = scripted_sessions(2, context=4096)
    running = sessions.sessions[0].generate([1, 2], max_tokens=2 * PREFILL_ROWS, draft_length=0)
    long = [i % 17 for i in range(2 * PREFILL_ROWS + 100)]
    joining = sessions.sessions[1].generate(long, max_tokens=5)
    step = sessions.decoder
    step.add(running)
    step.join(joining)
    for length in lengths:
        assert len(step.step()) == 1, "the other one goes on"
        assert joining.target.length == length
    with pytest.raises(RequestError, match="cannot share a sequence"):
        step.join(sessions.sessions[1].generate([5]))
    while step.running:
        step.step()
    assert step.step() == []
    assert running.tokens == plain_greedy([1, 2], 2 * PREFILL_ROWS)
    assert joining.tokens == plain_greedy(long, 5)


def test_a_short_prompt_does_not_wait_for_a_long_one(pieces_take: Callable[[float], None]) -> None:
    pieces_take(0.0)
    _, sessions = scripted_sessions(3, context=4096)
    prompts = [[1, 2], [i % 17 for i in range(1000)], [3] * 30]
    running, long, short = (session.generate(p, max_tokens=40) for session, p in zip(sessions.sessions, prompts, strict=True))
    step = sessions.decoder
    step.add(running)
    step.join(long)
    step.join(short)
    while not short.tokens:
        step.step()
    assert 0 < long.target.length < 100
    while step.running:
        step.step()
    assert [each.tokens for each in (running, long, short)] == [plain_greedy(prompt, 40) for prompt in prompts]


def test_pieces_are_as_long_as_their_time_allows() -> None:
    pace = PrefillPace()
    lengths = []
    for seconds_a_token in (0.001, 0.001, 0.001, 0.001, 0.002, *[0.0025] * 5, *[1.0] * 6):
        lengths.append(pace.rows)
        pace.count(pace.rows, pace.rows * seconds_a_token)
    assert lengths == [32, 64, 100, 100, 100, 100, 100, 100, 100, 50, 40, 40, 40, 40, 40, 32], "the quickest of the newest five counts"
    for _ in range(5):
        pace.count(pace.rows, 1e-6)
        pace.count(3, 0.02)  # the end of a prompt says little
    assert pace.rows == PREFILL_ROWS


def test_a_prompt_alone_may_have_pieces_that_another_one_waits_for() -> None:
    pace = PrefillPace()
    assert pace.rows_in(1.0) == 32, "nothing is known yet"
    pace.count(32, 0.5)
    assert [pace.rows_in(seconds) for seconds in (0.1, 1.0, 3.0, 100.0)] == [32, 64, 192, PREFILL_ROWS]
    _, sessions = scripted_sessions(1, context=4096)
    long = [i % 17 for i in range(2 * PREFILL_ROWS)]
    sessions.decoder.longest_piece = 1e-9
    joining = sessions.sessions[0].generate(long, max_tokens=5)
    sessions.decoder.join(joining)
    for length in (32, 64, 96):
        sessions.decoder.step()
        assert joining.target.length == length
    while sessions.decoder.running:
        sessions.decoder.step()
    assert joining.tokens == plain_greedy(long, 5)


def test_a_piece_may_take_as_long_as_the_others_round() -> None:
    pace = PrefillPace()
    for seconds in (1.0, 0.01, 1.0, 30.0, 1.0):  # a busy machine
        pace.count_round(seconds)
    for _ in range(9):
        pace.count(pace.rows, 0.4 + pace.rows * 0.004)  # most of the time does not depend on the number of tokens
    assert 140 < pace.rows <= 150
    for _ in range(5):
        pace.count_round(0.01)
        pace.count(pace.rows, pace.rows * 0.001)
    assert pace.rows == 100


class Weighing:
    """A policy that learns from timings, such as profit; it raises `error` once it has observed so many rounds."""

    def __init__(self, error: Exception | None = None, after: int = 0) -> None:
        self.timings: list[Timing] = []
        self._error, self._left = error, after

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:
        return RoundPlan(1)

    def observe(self, result: RoundResult) -> None:
        if self._error and not self._left:
            raise self._error
        self._left -= 1
        self.timings += [result.timing] if result.timing else []

    def offer(self, chances: Sequence[float]) -> None:
        """Takes none."""


def test_one_that_fails_by_itself_leaves_the_others_alone() -> None:
    _, sessions = scripted_sessions(2)
    error = RequestError("no token can be drawn")
    good = sessions.sessions[0].generate([1, 2], max_tokens=20)
    bad = sessions.sessions[1].generate([3], max_tokens=20, policy=Weighing(error, after=1))
    step = sessions.decoder
    step.add(bad)
    step.add(good)
    step.step()
    assert [item for item, _ in step.step()] == [good]
    assert step.failures == ((bad, error),)
    assert bad.target.length == 0
    while step.running:
        step.step()
        assert step.failures == ()
    assert good.tokens == plain_greedy([1, 2], 20)
    again = sessions.sessions[1].generate([4], max_tokens=9)
    list(sessions.run([again]))
    assert again.tokens == plain_greedy([4], 9)


@pytest.mark.parametrize("first", [{"policy": Weighing(RequestError("no token"))}, {"draft_length": 1}], ids=["fails", "does not learn"])
def test_the_timing_of_a_round_reaches_a_request_that_learns_from_it(first: dict[str, Any]) -> None:
    _, sessions = scripted_sessions(3)
    policies = [Weighing(), Weighing()]
    for session, each in zip(sessions.sessions, [first, *({"policy": policy} for policy in policies)], strict=True):
        sessions.decoder.add(session.generate([1, 2], max_tokens=20, **each))
    sessions.decoder.step()
    assert [len(policy.timings) for policy in policies] == [1, 0], "once, as they share one cost model"
    assert policies[0].timings[0].requests == 3


@pytest.mark.parametrize("how", ["add", "join"])
def test_a_request_whose_session_has_begun_another_is_refused(how: str) -> None:
    _, sessions = scripted_sessions(2)
    session = sessions.sessions[0]
    old = session.generate([1, 2], max_tokens=9)
    next(old.rounds())
    session.generate([3], max_tokens=9).text()
    with pytest.raises(RequestError, match="another request"):
        getattr(sessions.decoder, how)(old)
    assert not sessions.decoder.running


def test_a_request_that_ended_elsewhere_is_no_failure_and_keeps_no_sequence() -> None:
    _, sessions = scripted_sessions(2)
    ended, other = sessions.sessions[0].generate([1], max_tokens=4), sessions.sessions[0].generate([2], max_tokens=5)
    sessions.decoder.add(ended)
    assert list(sessions.decoder.running) == [ended]
    ended.text()
    assert not sessions.decoder.running
    sessions.decoder.add(other)
    while sessions.decoder.running:
        sessions.decoder.step()
        assert not sessions.decoder.failures
    assert (ended.tokens, other.tokens) == (plain_greedy([1], 4), plain_greedy([2], 5))


def test_after_a_failure_of_all_nothing_is_left_in_the_caches() -> None:
    _, sessions = scripted_sessions(2)
    for session in sessions.sessions:
        sessions.decoder.join(session.generate([1, 2, 3], max_tokens=20))
        sessions.decoder.step()
    sessions.decoder.clear()
    assert sessions.decoder.running == ()
    assert [session.target.length for session in sessions.sessions] == [0, 0]


@pytest.mark.parametrize("drafter", ["dense", "split", "lookup", "none"])
def test_llama_sequences_equal_single_sessions(exported_pair: Path, probe_memory: Path, drafter) -> None:
    pytest.importorskip("llama_cpp")
    with open_session(exported_pair, context=512, drafter=drafter) as alone:
        expected = []
        for prompt in PROMPTS:
            generation = alone.generate(prompt, max_tokens=30, draft_length=3)
            generation.text()
            expected.append((generation.tokens, generation.stats.accepted))
    with open_sessions(exported_pair, 3, context=512, drafter=drafter) as sessions:
        started = [sessions.sessions[i % 3].generate(prompt, max_tokens=30, draft_length=3) for i, prompt in enumerate(PROMPTS)]
        list(sessions.run(started))
    assert [(g.tokens, g.stats.accepted) for g in started] == expected


@pytest.mark.skipif(not loader.usable_variants(), reason="the row kernels were not built: pip install -e . builds them")
def test_rows_of_several_sessions_are_exact_where_the_kernels_run(exported_pair: Path) -> None:
    with open_sessions(exported_pair, 3, threads=2) as sessions:
        assert sessions.row_equality().exact
