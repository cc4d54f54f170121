"""The memory of the text: the automaton against a plain search, and what is guessed from it."""

from __future__ import annotations

import random

import pytest

from edge_runtime.drafting.sources import SuffixAutomaton, TextMemory


def longest_by_search(text: list[int], ahead: list[int]) -> int:
    """The longest end of the text and `ahead` that occurs in the text before."""
    whole = text + ahead
    last = len(text) if ahead else len(text) - 1
    result = 0
    for length in range(1, len(whole)):
        if any(text[end - length : end] == whole[-length:] for end in range(length, last + 1)):
            result = length
    return result


@pytest.mark.parametrize("letters", [1, 2, 3, 6])
def test_the_longest_repeat_is_that_of_a_search(letters):
    chance = random.Random(letters)
    for _ in range(12):
        automaton, text = SuffixAutomaton(), []
        for _ in range(25):
            text.append(chance.randrange(letters))
            automaton.append(text[-1])
            ahead = [chance.randrange(letters) for _ in range(chance.randrange(4))]
            length, end = automaton.longest_repeat(ahead)
            assert length == longest_by_search(text, ahead)
            assert (text[end - length : end] == [*text, *ahead][-length:]) if length else True


def test_what_followed_is_guessed_to_follow_again():
    memory = TextMemory([1, 2, 3, 4, 5, 6, 9, 2, 3])
    assert memory.guess((), 3).tokens == (4, 5, 6)
    assert memory.guess((4, 5), 2).tokens == (6, 9)
    assert memory.guess((7,), 3).tokens == ()


def test_emitted_tokens_are_remembered_and_longer_matches_are_other_evidence():
    memory = TextMemory([1, 2, 3, 4, 5, 6, 7])
    memory.add([8, 1, 2])
    short = memory.guess((), 1).bins
    memory.add([3, 4, 5, 6])
    assert memory.guess((), 1).tokens == (7,)
    assert memory.guess((), 1).bins != short


def test_a_predicted_text_is_guessed_after_the_prompt_and_found_in_parts():
    memory = TextMemory([1, 2, 3], predicted=[7, 8, 9, 5])
    first = memory.guess((), 6)
    assert first.tokens == (7, 8, 9, 5), "a copy ends with the predicted text"
    memory.add([6, 8, 9])
    assert memory.guess((), 2).tokens == (5,)
