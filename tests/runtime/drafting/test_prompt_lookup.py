"""Prompt lookup: what it copies, and that the loop stays lossless whatever it copies."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.drafting.sources import SHORTEST_MATCH, LookupDrafter
from scripted import ScriptedTarget

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
