"""The loop against scripted models: output, cache, counts and stop rules, for right, wrong and half-right drafters."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.decoding.loop import Decoding, Round, decode
from edge_runtime.drafting.policies import Fixed
from scripted import VOCABULARY, ScriptedDrafter, ScriptedTarget, next_token, plain_greedy


def right(context: list[int], position: int) -> int:
    return next_token(context)


def wrong(context: list[int], position: int) -> int:
    return (next_token(context) + 1) % VOCABULARY


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
    target, _, rounds, emitted = run([1, 2, 3], right, 3, 40)
    assert all(r.accepted == r.drafted == 3 for r in rounds)
    assert len(target.rows) == 10
    assert len(emitted) == 40


@given(seed=st.integers(0, 10**6), length=st.integers(0, 12), max_tokens=st.integers(1, 60), share=st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_any_drafter_gives_the_plain_output(seed, length, max_tokens, share):
    chance = random.Random(seed)

    def sometimes(context, position):
        return right(context, position) if chance.random() < share else chance.randrange(VOCABULARY)

    prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 9))]
    target, _, rounds, emitted = run(prompt, sometimes, length, max_tokens)
    assert emitted == plain_greedy(prompt, max_tokens)
    assert sum(target.rows) == sum(r.drafted + 1 for r in rounds)


@given(seed=st.integers(0, 10**6), length=st.integers(0, 8), stop=st.sets(st.integers(0, VOCABULARY - 1), max_size=3))
@settings(max_examples=150, deadline=None)
def test_stops_exactly_where_plain_decoding_does(seed, length, stop):
    prompt = [seed % VOCABULARY, (seed // 17) % VOCABULARY]
    _, _, rounds, emitted = run(prompt, right, length, 50, frozenset(stop))
    assert emitted == plain_greedy(prompt, 50, frozenset(stop))
    assert all(t not in stop for t in emitted[:-1])
    assert all(r.accepted <= len(r.tokens) for r in rounds)


@pytest.mark.parametrize("length", [0, 3, 8])
def test_fills_the_context_and_ends_there(length):
    target, _, _, emitted = run([1, 2, 3], right, length, 100, context=20)
    assert target.length == 20
    assert emitted == plain_greedy([1, 2, 3], 18)
