"""Prompt lookup: what it copies, and that the loop stays lossless whatever it copies."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.drafting.policies import Fixed
from edge_runtime.drafting.text_memory import SHORTEST_MATCH, LookupDrafter
from scripted import VOCABULARY, ScriptedTarget, one_hot

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


def test_a_text_that_repeats_itself_saves_forwards():
    class Looping(ScriptedTarget):
        """Says 0, 1, 2, 3, 4, 0, ... whatever the text."""

        def row(self, context):
            return one_hot((context[-1] + 1) % 5, VOCABULARY)

    target = Looping()
    rounds = list(decode(target, LookupDrafter(target), Decoding(target, 0, Fixed(4), max_tokens=40)))
    assert sum(len(item.tokens) for item in rounds) == 40
    assert len(rounds) < 20
    assert sum(item.accepted for item in rounds) == sum(item.drafted for item in rounds)
