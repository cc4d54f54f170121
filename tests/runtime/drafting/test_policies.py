"""Draft lengths from acceptance alone: steps, clamps, windows, and the safety net that shortens, stops and comes back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.drafting.policies import (
    FIRST_WAIT,
    LONGEST_WAIT,
    POLICIES,
    PROBE_TOKENS,
    Event,
    Fixed,
    LimitedPolicy,
    PolicyOptions,
    Rolling,
    RoundResult,
    SafetyNet,
    Stepped,
    policy_kind,
)
from edge_runtime.errors import RequestError
from scripted import make_session, next_token, plain_greedy

outcomes = st.lists(st.tuples(st.integers(0, 12), st.floats(0, 1)), max_size=60)


@given(outcomes, st.integers(1, 12), st.integers(1, 12), st.floats(0, 1), st.floats(0.1, 20))
def test_rolling_stays_in_its_bounds(rounds, item, other, threshold, penalty):
    shortest, longest = min(item, other), max(item, other)
    policy = Rolling(PolicyOptions(first=longest, shortest=shortest, longest=longest, threshold=threshold, penalty=penalty))
    for drafted, share in rounds:
        before = policy.plan().draft_length
        policy.observe(RoundResult(drafted, int(drafted * share)))
        assert shortest <= policy.plan().draft_length <= min(longest, before + 1)


@given(outcomes, st.sampled_from(POLICIES), st.integers(1, 8))
def test_no_policy_leaves_the_legal_lengths(rounds, name, start):
    policy = policy_kind(name).new(PolicyOptions(first=start))
    for drafted, share in rounds:
        assert 0 <= policy.plan().draft_length <= MAX_DRAFT_LENGTH
        policy.observe(RoundResult(drafted, int(drafted * share)))


def test_rolling_grows_by_one_and_shrinks_by_the_penalty():
    policy = Rolling(PolicyOptions(first=4, threshold=0.5, penalty=1.5, window=1))
    lengths = []
    for drafted, accepted in [(4, 4), (5, 5), (6, 3), (6, 1), (4, 0), (0, 0)]:
        policy.observe(RoundResult(drafted, accepted))
        lengths.append(policy.plan().draft_length)
    assert lengths == [5, 6, 6, 4, 3, 3]  # exactly the threshold keeps 6; then 4.5 rounded down; nothing drafted changes nothing


@pytest.mark.parametrize(("accepted", "length"), [(100, 6), (91, 6), (90, 4), (71, 4), (70, 2), (0, 2)])
def test_stepped_has_three_steps(accepted, length):
    policy = Stepped(PolicyOptions())
    assert policy.plan().draft_length == 2
    policy.observe(RoundResult(100, accepted))
    assert policy.plan().draft_length == length


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"first": 0, "shortest": 2}, "1 is outside 2..8"),
        ({"first": 9}, "9 is outside 1..8"),
        ({"first": 2, "longest": 13}, "from 1 to 13"),
        ({"first": 2, "shortest": 0}, "from 0 to 8"),
        ({"first": 2, "threshold": 1.5}, "threshold is 1.5"),
        ({"first": 2, "penalty": 0}, "penalty is 0"),
        ({"first": 2, "penalty": math.nan}, "penalty is nan"),
        ({"first": 2, "window": 0}, "window is 0 steps"),
    ],
)
def test_rolling_refuses_nonsense(arguments, words):
    with pytest.raises(RequestError, match=words):
        Rolling(PolicyOptions(**arguments))


def test_unknown_policies_are_refused():
    with pytest.raises(RequestError, match="'clever' is not known; choose one of profit, fixed, rolling, stepped"):
        policy_kind("clever")


def run(net: SafetyNet, length: int, count: int, accepts: bool) -> tuple[list[int], list[Event]]:
    """Plays `count` rounds of a fixed length over the net; returns the lengths and the events."""
    events: list[Event] = []
    policy = LimitedPolicy(Fixed(length), net, events.append)
    lengths = []
    for _ in range(count):
        lengths.append(policy.plan().draft_length)
        policy.observe(RoundResult(lengths[-1], lengths[-1] if accepts else 0))
    return lengths, events


def test_bad_drafts_are_halved_then_stopped():
    net = SafetyNet(window=12)
    lengths, events = run(net, 6, 21, accepts=False)
    assert lengths == [6] * 2 + [3] * 4 + [1] * 12 + [0] * 3
    assert [(event.kind, event.longest) for event in events] == [("shortened", 3), ("shortened", 1), ("stopped", 0)]
    assert "drafts have at most 3 tokens for now" in events[0].sentence
    assert "drafting stops" in events[2].sentence


def test_probes_are_cheap_and_rarer_each_time():
    net = SafetyNet(window=2)
    run(net, 1, 2, accepts=False)
    lengths, events = run(net, 8, 4000, accepts=False)
    assert not events
    assert max(lengths) == 1
    assert lengths[:FIRST_WAIT] == [0] * FIRST_WAIT
    assert lengths[FIRST_WAIT : FIRST_WAIT + PROBE_TOKENS + 1] == [1] * PROBE_TOKENS + [0]
    assert sum(lengths[1000:]) <= PROBE_TOKENS * (3000 // LONGEST_WAIT + 1)


def test_good_drafts_come_back_step_by_step():
    net = SafetyNet(window=12)
    run(net, 1, 12, accepts=False)
    lengths, events = run(net, 4, FIRST_WAIT + PROBE_TOKENS + 60, accepts=True)
    assert [event.kind for event in events] == ["resumed"]
    assert "accepted again" in events[0].sentence
    assert lengths[-1] == 4
    after = lengths[FIRST_WAIT:]
    assert after == sorted(after)


@given(st.lists(st.floats(0, 1), max_size=300), st.integers(1, 60), st.floats(0.05, 0.95))
def test_never_longer_than_the_policy_asks(shares, window, limit):
    policy, net = Stepped(PolicyOptions()), SafetyNet(window=window, limit=limit)
    guarded = LimitedPolicy(policy, net)
    for share in shares:
        length = guarded.plan().draft_length
        assert 0 <= length <= min(policy.plan().draft_length, net.longest)
        assert 0 <= net.longest <= MAX_DRAFT_LENGTH
        guarded.observe(RoundResult(length, int(length * share)))


@pytest.mark.parametrize("limit", [0, 1, -0.5])
def test_a_limit_that_is_no_share_is_refused(limit):
    with pytest.raises(RequestError, match="the rejection limit is"):
        SafetyNet(limit=limit)


def test_a_session_guards_what_it_chose_itself_and_only_that():
    session = make_session(guess=lambda context, _: (next_token(context) + 1) % 17)
    fixed = session.generate([1, 2], max_tokens=60, draft_length=2)
    assert [item.drafted for item in fixed.rounds()][:-1] == [2] * 58 + [1]
    own = session.generate([1, 2], max_tokens=200)
    drafted = [item.drafted for item in own.rounds()]
    assert drafted[:26] == [2] * 25 + [1]
    assert drafted[80] == 0
    assert [event.kind for event in own.monitor.events] == ["shortened", "stopped"]
    assert own.tokens == plain_greedy([1, 2], 200)
    again = session.generate([1, 2], max_tokens=10)
    assert [item.drafted for item in again.rounds()] == [0] * 10, "what one request learned serves the next"
