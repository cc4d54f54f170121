"""Prompt lookup: what it copies, and that the loop stays lossless whatever it copies."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.drafting.policies import Fixed
from edge_runtime.drafting.text_memory import SHORTEST_MATCH, LookupDrafter
from scripted import VOCABULARY, ScriptedTarget, plain_greedy

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def draft(text: list[int], length: int) -> list[int]:
    target = ScriptedTarget()
    target.prefill(text[:-1])
    return LookupDrafter(target).draft(text[-1], length)


def slow_draft(text: list[int], length: int) -> list[int]:
    """The definition: the longest match, the latest of those, copied on and on."""
    for size in range(len(text) - 1, SHORTEST_MATCH - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[len(text) - size :]:
                grown = list(text)
                for place in range(start + size, start + size + length):
                    grown.append(grown[place])
                return grown[len(text) :]
    return []


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, length=st.integers(1, 12))
def test_drafts_are_those_of_the_definition(text, length):
    assert draft(text, length) == slow_draft(text, length)


def test_examples():
    assert draft([1, 2, 3, 4, 5, 9, 1, 2, 3], 2) == [4, 5]
    assert draft([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8], "the latest occurrence counts"
    assert draft([5, 1, 2, 7, 9, 1, 2, 8, 5, 1, 2], 1) == [7], "a longer match counts more"
    assert draft([1, 2, 3, 4], 5) == []
    assert draft([1, 2, 1], 5) == [], "one token is no match"
    assert draft([4, 4, 4], 5) == [4, 4, 4, 4, 4]
    assert draft([4], 5) == []


@settings(max_examples=100, deadline=None)
@given(prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30), length=st.integers(0, 12), max_tokens=st.integers(1, 60))
def test_any_prompt_gives_the_plain_output(prompt, length, max_tokens):
    target = ScriptedTarget()
    target.prefill(prompt[:-1])
    rounds = decode(target, LookupDrafter(target), Decoding(target, prompt[-1], Fixed(length), max_tokens=max_tokens))
    assert [token for one in rounds for token in one.tokens] == plain_greedy(prompt, max_tokens)


def test_a_text_that_repeats_itself_saves_forwards():
    class Looping(ScriptedTarget):
        """Says 0, 1, 2, 3, 4, 0, ... whatever the text."""

        def verify(self, tokens):
            logits = super().verify(tokens)
            logits[:] = 0
            for row, token in enumerate(tokens):
                logits[row, (token + 1) % 5] = 1
            return logits

    target = Looping()
    rounds = list(decode(target, LookupDrafter(target), Decoding(target, 0, Fixed(4), max_tokens=40)))
    assert sum(len(one.tokens) for one in rounds) == 40
    assert len(rounds) < 20
    assert sum(one.accepted for one in rounds) == sum(one.drafted for one in rounds)
