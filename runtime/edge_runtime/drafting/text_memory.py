"""A memory of the text: where the newest tokens occurred before, what followed is guessed to follow again.

The tokens are held in a suffix automaton (Blumer et al. 1985, Theoretical Computer Science 40), which knows the longest repeated end of the
text at any time and takes constant time per token. It serves as SuffixDecoding does (Oliaro et al. 2024, arXiv 2411.04975), but beside a
drafter: the longer the match, the surer the guess.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from edge_runtime.drafting.sources import Guess

NAME = "memory"
# Matches of fewer tokens say too little. Lower bounds of the bins of longer ones, and the prior of each bin.
SHORTEST_MATCH = 2
_BOUNDS = (2, 3, 4, 6, 9, 14, 22, 40)
MEMORY_PRIORS = {f"{NAME} {bound}": chance for bound, chance in zip(_BOUNDS, (0.25, 0.35, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95), strict=True)}
# Of a longer prompt only the end is remembered: a token takes about 600 bytes.
MOST_TOKENS = 32768
# Where a text repeats itself endlessly, its ends are one another's suffixes; so many of them are updated per token.
_MOST_SUFFIXES = 32


class SuffixAutomaton:
    """All substrings of a growing text. A state stands for substrings that end at the same places; state 0 for the empty one."""

    def __init__(self) -> None:
        self._length = [0]
        self._link = [-1]
        self._next: list[dict[int, int]] = [{}]
        self._end = [0]  # tokens of the text up to the newest known occurrence
        self._last = 0
        self.tokens: list[int] = []

    def append(self, token: int) -> None:
        """Adds a token to the text."""
        self._touch(self._last)
        self.tokens.append(token)
        state = self._add(self._length[self._last] + 1, 0, {}, len(self.tokens))
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = state
            at = self._link[at]
        self._link[state] = self._suffix(at, token) if at >= 0 else 0
        self._last = state

    def _suffix(self, at: int, token: int) -> int:
        """Returns the state of the longest repeated suffix, splitting one where needed."""
        onward = self._next[at][token]
        if self._length[onward] == self._length[at] + 1:
            return onward
        copy = self._add(self._length[at] + 1, self._link[onward], dict(self._next[onward]), self._end[onward])
        while at >= 0 and self._next[at].get(token) == onward:
            self._next[at][token] = copy
            at = self._link[at]
        self._link[onward] = copy
        return copy

    def _add(self, length: int, link: int, following: dict[int, int], end: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._next.append(following)
        self._end.append(end)
        return len(self._length) - 1

    def _touch(self, state: int) -> None:
        """Sets the newest occurrence of the suffixes of the text."""
        for _ in range(_MOST_SUFFIXES):
            state = self._link[state]
            if state <= 0:
                return
            self._end[state] = len(self.tokens)

    def longest_repeat(self, ahead: Sequence[int] = ()) -> tuple[int, int]:
        """Returns the length of the longest end of the text and `ahead` that occurs earlier, and where its newest occurrence ends."""
        state = max(self._link[self._last], 0)
        length = self._length[state]
        for token in ahead:
            while state > 0 and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return length, self._end[state]


class TextMemory:
    """Guesses what followed the longest earlier occurrence of the newest tokens. Implements `sources.Source`."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._automaton = SuffixAutomaton()
        self.add(tokens[-MOST_TOKENS:])

    def add(self, tokens: Sequence[int]) -> None:
        """Adds emitted tokens."""
        for token in tokens:
            self._automaton.append(token)

    def guess(self, ahead: Sequence[int], most: int) -> Guess:
        """A copy that reaches the end of the text repeats itself, so that a loop is guessed as a loop."""
        length, end = self._automaton.longest_repeat(ahead)
        if length < SHORTEST_MATCH:
            return Guess(NAME)
        copy = [*self._automaton.tokens[end : end + most], *ahead] if end + most > len(self._automaton.tokens) else []
        copy = copy or self._automaton.tokens[end : end + most]
        while copy and len(copy) < most:
            copy += copy
        return Guess(NAME, tuple(copy[:most]), tuple(_bin(length + place) for place in range(len(copy[:most]))))


def _bin(length: int) -> str:
    return f"{NAME} {_BOUNDS[bisect_right(_BOUNDS, length) - 1]}"
