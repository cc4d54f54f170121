"""Draft lengths from acceptance alone: steps, clamps, windows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.drafting.policies import POLICIES, PolicyOptions, Rolling, RoundResult, Stepped, policy_kind
from edge_runtime.errors import RequestError

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
