"""The loop: what is drafted, verified and reported in a round, and that its output is the plain one for any drafter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.decoding import loop
from edge_runtime.decoding.acceptance import GreedyRule
from edge_runtime.decoding.loop import Decoding, Round, decode
from edge_runtime.drafting.policies import Fixed, RoundPlan, RoundResult, Timing
from edge_runtime.drafting.sources import MODEL, Guess, Proposals, SourceOdds
from scripted import VOCABULARY, ScriptedDrafter, ScriptedTarget, TimedDrafter, TimedTarget, next_token, plain_greedy

TIMING = Timing(length=1, steps=2, draft_seconds=0.25, rows=3, verify_seconds=0.5)


class Planned:
    """A policy whose plans are given, and that keeps what it is told."""

    def __init__(self, *plans: RoundPlan) -> None:
        self._plans = list(plans)
        self.asked: list[tuple[int, bool]] = []
        self.results: list[RoundResult] = []
        self.offered: list[tuple[float, ...]] = []

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:
        self.asked.append((requests, any_prefix))
        return self._plans.pop(0) if len(self._plans) > 1 else self._plans[0]

    def observe(self, result: RoundResult) -> None:
        self.results.append(result)


class Weighing(Planned):
    """One that other sources can be offered to."""

    def offer(self, chances: Sequence[float]) -> None:
        self.offered.append(tuple(chances))


class Expecting:
    """A source that expects what the scripted target will write, or something else."""

    def __init__(self, target: ScriptedTarget, last: int, tokens: int, wrong_from: int = 99) -> None:
        self._target, self._last, self._tokens, self._wrong_from = target, last, tokens, wrong_from
        self.added: list[tuple[int, ...]] = []
        self.limits: list[int] = []

    def guess(self, ahead: Sequence[int], maximum: int) -> Guess:
        self.limits.append(maximum)
        text, actual = [*self._target.cache, self._last, *ahead], []
        for place in range(min(self._tokens, maximum)):
            actual.append((next_token([*text, *actual]) + (place >= self._wrong_from)) % VOCABULARY)
        return Guess("copy", tuple(actual), ("bin",) * len(actual))

    def add(self, tokens: Sequence[int]) -> None:
        self.added.append(tuple(tokens))
        self._last = tokens[-1]


class CuttingRule(GreedyRule):
    """Forbids a token, as a constraint does."""

    any_prefix = False
    forbidden = -1

    def cut(self, drafts: list[int]) -> list[int]:
        return drafts[: drafts.index(self.forbidden)] if self.forbidden in drafts else drafts


def opened(policy: Any, *, max_tokens: int = 50, context: int = 64, slack: int = 12, **options: Any) -> tuple[ScriptedTarget, Decoding]:
    target = ScriptedTarget(context=context, rewind_slack=slack)
    target.prefill([1, 2])
    return target, Decoding(target, 3, policy, max_tokens=max_tokens, **options)


def right(target: ScriptedTarget, last: int, count: int) -> list[int]:
    text = [*target.cache, last]
    for _ in range(count):
        text.append(next_token(text))
    return text[len(text) - count :]


def finished(target: ScriptedTarget, decoding: Decoding, drafts: list[int], **options: Any) -> tuple[list[int], Any]:
    rows = decoding.tokens_to_verify(drafts)
    return rows, decoding.finish_round(target.verify(rows), TIMING, **options)


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({}, 5),
        ({"max_tokens": 6}, 5),
        ({"max_tokens": 5}, 4),
        ({"max_tokens": 1}, 0),
        ({"context": 8}, 5),  # 2 rows are there; the newest token and 5 drafts fill it
        ({"context": 7}, 4),
        ({"slack": 4}, 4),
    ],
)
def test_a_draft_has_room_in_the_request_the_context_and_the_slack(options: dict[str, int], length: int) -> None:
    policy = Planned(RoundPlan(5))
    _, decoding = opened(policy, **options)
    request = decoding.draft_request(sequence=3, requests=2)
    assert (request.sequence, request.last, request.draft_length) == (3, 3, length)
    assert policy.asked == [(2, True)]
    assert decoding.draft_request().sequence == 0
    assert policy.asked[-1] == (1, True)


def test_the_plan_and_the_rule_reach_the_drafter() -> None:
    def go_on(_: float) -> bool:
        return True

    rule = CuttingRule()
    rule.sampler = lambda *_: 4  # type: ignore[assignment, misc]
    policy = Planned(RoundPlan(2, should_continue=go_on), RoundPlan(2, shadow=True))
    _, decoding = opened(policy, rule=rule)
    request = decoding.draft_request()
    assert (request.should_continue, request.sampler) == (go_on, rule.sampler)
    assert policy.asked == [(1, False)]
    assert decoding.draft_request().sampler is None, "a shadow draft is not sampled"


def test_a_round_verifies_the_newest_token_and_the_drafts() -> None:
    policy = Planned(RoundPlan(3))
    target, decoding = opened(policy)
    decoding.draft_request()
    expected = right(target, 3, 3)
    good = expected[:2]
    rows, done = finished(target, decoding, [*good, (expected[2] + 1) % VOCABULARY])
    assert rows[:3] == [3, *good]
    assert done.tokens == tuple(expected)
    assert (done.drafted, done.accepted, len(done.tokens)) == (3, 2, 3)
    assert done.sources == (MODEL, MODEL)
    assert (done.draft_seconds, done.verify_seconds) == (0.25, 0.5)
    assert policy.results == [RoundResult(3, 2, None, TIMING)]
    assert (target.cache, decoding.last) == ([1, 2, 3, *good], done.tokens[-1])
    assert not decoding.done


def test_a_joint_timing_adds_up_lengths_steps_and_rows() -> None:
    (_, item), (_, other) = (opened(Planned(RoundPlan(4, to_verify=lambda n: (n - 1, 2)))) for _ in range(2))
    for decoding, drafts in ((item, [4, 5, 6]), (other, [7])):
        decoding.draft_request()
        decoding.tokens_to_verify(drafts)
    assert item.timing(0.1, 0.2) == Timing(length=2, steps=3, draft_seconds=0.1, rows=5, verify_seconds=0.2, requests=1)
    assert item.timing(0.1, 0.2, other) == Timing(length=4, steps=4, draft_seconds=0.1, rows=8, verify_seconds=0.2, requests=2)


@pytest.mark.parametrize(
    ("plan", "options", "rows"),
    [
        (RoundPlan(3, to_verify=lambda n: (n, 2)), {}, [3, 4, 5, 6, 3, 3]),
        (RoundPlan(3, to_verify=lambda n: (1, 0)), {}, [3, 4]),
        (RoundPlan(3, to_verify=lambda n: (n, 9)), {"slack": 5}, [3, 4, 5, 6, 3, 3]),  # padding is rolled back, too
        (RoundPlan(3, to_verify=lambda n: (n, 9)), {"slack": 3}, [3, 4, 5, 6]),
        (RoundPlan(3, to_verify=lambda n: (n, -1)), {}, [3, 4, 5, 6]),
    ],
)
def test_a_plan_may_leave_drafts_out_and_pad(plan: RoundPlan, options: dict[str, int], rows: list[int]) -> None:
    target, decoding = opened(Planned(plan), **options)
    decoding.draft_request()
    assert decoding.tokens_to_verify([4, 5, 6]) == rows
    verified = decoding.finish_round(target.verify(rows), TIMING)
    assert verified.drafted == len([row for row in rows[1:] if row != 3])
    assert target.length == 2 + len(verified.tokens)


@pytest.mark.parametrize(("shift", "accepted"), [(0, True), (1, False)])
def test_a_shadow_draft_is_compared_and_not_verified(shift: int, accepted: bool) -> None:
    policy = Planned(RoundPlan(2, shadow=True))
    target, decoding = opened(policy)
    decoding.draft_request()
    first = right(target, 3, 1)[0]
    rows, done = finished(target, decoding, [(first + shift) % VOCABULARY, 0])
    assert rows == [3]
    assert (done.tokens, done.drafted, done.sources) == ((first,), 0, ())
    assert policy.results == [RoundResult(0, 0, accepted, TIMING)]
    assert decoding.timing(0.1, 0.2).steps == 2, "it was drafted all the same"
    decoding.draft_request()
    finished(target, decoding, [])
    assert policy.results[-1].left_out_right is None, "a drafter that drafted nothing was not compared"


@pytest.mark.parametrize(
    ("options", "over"), [({"max_tokens": 0}, True), ({"max_tokens": 1}, False), ({"context": 2}, True), ({"context": 3}, False)]
)
def test_a_request_is_over_before_it_begins_where_nothing_fits(options: dict[str, int], over: bool) -> None:
    _, decoding = opened(Planned(RoundPlan(0)), **options)
    assert decoding.done is over


def test_suppressed_tokens_are_never_written() -> None:
    usual = right(opened(Planned(RoundPlan(0)))[0], 3, 1)[0]
    target, decoding = opened(Planned(RoundPlan(1)), suppressed=[usual])
    decoding.draft_request()
    _, done = finished(target, decoding, [usual])
    assert (done.accepted, usual in done.tokens) == (0, False)


def sourced(policy: Any, *, tokens: int = 3, wrong_from: int = 99, **options: Any) -> tuple[ScriptedTarget, Decoding, Expecting]:
    target = ScriptedTarget(context=options.pop("context", 64))
    target.prefill([1, 2])
    source = Expecting(target, 3, tokens, wrong_from)
    decoding = Decoding(target, 3, policy, proposals=Proposals(source, SourceOdds({"bin": 0.75})), **({"max_tokens": 50} | options))
    return target, decoding, source


def test_what_a_source_expects_is_offered_and_verified_instead_of_a_draft() -> None:
    policy = Weighing(RoundPlan(0, offered=2))
    target, decoding, source = sourced(policy)
    expected = right(target, 3, 3)
    assert decoding.draft_request().draft_length == 0
    assert policy.offered == [(0.75, 0.75, 0.75)]
    rows, done = finished(target, decoding, [])
    assert rows == [3, *expected[:2]]
    assert (done.tokens, done.sources, done.accepted) == (tuple(expected), ("copy", "copy"), 2)
    assert source.added == [tuple(expected)]


def test_a_policy_that_weighs_nothing_is_offered_nothing() -> None:
    policy = Planned(RoundPlan(0))
    target, decoding, _ = sourced(policy)
    decoding.draft_request()
    rows, _ = finished(target, decoding, [])
    assert (rows, policy.offered) == ([3], [])


def test_drafts_are_extended_by_what_a_source_expects_after_them() -> None:
    asked: list[tuple[int, tuple[float, ...]]] = []

    def extend(drafts: int, chances: Sequence[float]) -> int:
        asked.append((drafts, tuple(chances)))
        return 2

    target, decoding, source = sourced(Weighing(RoundPlan(1, extend=extend)), max_tokens=5)
    expected = right(target, 3, 5)
    decoding.draft_request()
    rows, done = finished(target, decoding, expected[:1])
    assert rows == [3, *expected[:3]]
    assert done.sources == (MODEL, "copy", "copy")
    assert asked == [(1, (0.75,) * 3)]
    assert source.limits == [4, 3], "5 tokens: at most 4 drafts, of which one was drafted"


def test_a_rule_cuts_drafts_and_what_sources_expect() -> None:
    target, decoding, _ = sourced(Weighing(RoundPlan(0, offered=3)))
    expected = right(target, 3, 3)
    rule = CuttingRule()
    rule.forbidden = expected[2]
    first = expected.index(expected[2])
    policy = Weighing(RoundPlan(0, offered=3))
    target, decoding, _ = sourced(policy, rule=rule)
    decoding.draft_request()
    assert policy.offered == ([(0.75,) * first] if first else [])
    assert decoding.tokens_to_verify([]) == [3, *expected[:first]]
    target, decoding, _ = sourced(Planned(RoundPlan(3)), rule=rule)
    decoding.draft_request()
    assert decoding.tokens_to_verify(list(expected)) == [3, *expected[:first]]


def test_a_policy_weighs_drafts_against_all_else_that_a_round_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round itself names the seconds of its draft and of its verify alone."""
    clock = [0.0]

    def spend(phase: str, _rows: int) -> None:
        clock[0] += {"prefill": 9.0, "plan": 1.5, "draft": 0.5, "verify": 2.0}[phase]

    class SlowToPlan(Planned):
        def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:
            spend("plan", 0)
            return super().plan(requests, any_prefix=any_prefix)

    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock[0])
    policy, target = SlowToPlan(RoundPlan(2)), TimedTarget(spend)
    target.prefill([1, 2])
    rounds = list(decode(target, TimedDrafter(target, spend), Decoding(target, 3, policy, max_tokens=6)))
    assert [(item.draft_seconds, item.verify_seconds) for item in rounds] == [(0.5, 2.0)] * 2
    assert [(result.timing.draft_seconds, result.timing.verify_seconds) for result in policy.results] == [(0.5, 3.5)] * 2


def rightly(context: list[int], position: int) -> int:
    return next_token(context)


def run(prompt: list[int], guess, length: int, max_tokens: int, stop=frozenset(), context: int = 512):
    target = ScriptedTarget(context=context)
    drafter = ScriptedDrafter(target, guess)
    target.prefill(prompt[:-1])
    rounds: list[Round] = []
    emitted: list[int] = []
    for item in decode(target, drafter, Decoding(target, prompt[-1], Fixed(length), max_tokens=max_tokens, is_stop=stop.__contains__)):
        rounds.append(item)
        emitted += item.tokens
        assert target.cache == (prompt + emitted)[:-1], "the cache holds all tokens but the newest"
    return target, drafter, rounds, emitted


def test_right_drafter_accepts_everything_and_saves_forwards():
    target, _, rounds, emitted = run([1, 2, 3], rightly, 3, 40)
    assert all(r.accepted == r.drafted == 3 for r in rounds)
    assert len(target.rows) == 10
    assert len(emitted) == 40


@given(seed=st.integers(0, 10**6), length=st.integers(0, 12), max_tokens=st.integers(1, 60), share=st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_any_drafter_gives_the_plain_output(seed, length, max_tokens, share):
    chance = random.Random(seed)

    def sometimes(context, position):
        return next_token(context) if chance.random() < share else chance.randrange(VOCABULARY)

    prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 9))]
    target, _, rounds, emitted = run(prompt, sometimes, length, max_tokens)
    assert emitted == plain_greedy(prompt, max_tokens)
    assert sum(target.rows) == sum(r.drafted + 1 for r in rounds)


@given(seed=st.integers(0, 10**6), length=st.integers(0, 8), stop=st.sets(st.integers(0, VOCABULARY - 1), max_size=3))
@settings(max_examples=150, deadline=None)
def test_stops_exactly_where_plain_decoding_does(seed, length, stop):
    prompt = [seed % VOCABULARY, (seed // 17) % VOCABULARY]
    _, _, rounds, emitted = run(prompt, rightly, length, 50, frozenset(stop))
    assert emitted == plain_greedy(prompt, 50, frozenset(stop))
    assert all(t not in stop for t in emitted[:-1])
    assert all(r.accepted <= len(r.tokens) for r in rounds)


@pytest.mark.parametrize("length", [0, 3, 8])
def test_fills_the_context_and_ends_there(length):
    target, _, _, emitted = run([1, 2, 3], rightly, length, 100, context=20)
    assert target.length == 20
    assert emitted == plain_greedy([1, 2, 3], 18)
