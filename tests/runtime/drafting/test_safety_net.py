"""The safety net: shortens, stops, comes back; leaves alone what was fixed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.drafting.policies import (
    FIRST_WAIT,
    LONGEST_WAIT,
    PROBE_TOKENS,
    Event,
    Fixed,
    LimitedPolicy,
    PolicyOptions,
    RoundResult,
    SafetyNet,
    Stepped,
)
from edge_runtime.errors import RequestError
from scripted import make_session, next_token, plain_greedy


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
