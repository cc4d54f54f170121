"""Drafts without a drafter: tokens that repeat an earlier part of the text, each with a calibrated probability."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_runtime.interfaces import DraftSampler, ShouldContinue, Target, Vocabulary

# A source guesses tokens and sorts each into a bin by its evidence. Each emitted token shows whether the guess was right, even if the guess
# was not used. So the accuracy of each bin is known at no cost before a source is used at all.

# An old count is multiplied by DECAY at each new one of the same bin. The prior probability counts as PRIOR_WEIGHT guesses.
DECAY, PRIOR_WEIGHT = 0.98, 4.0
MODEL = "drafter"


class Guess(NamedTuple):
    """The tokens that a source expects next, and the evidence bin of each; bins of different sources have different names."""

    source: str
    tokens: tuple[int, ...] = ()
    bins: tuple[str, ...] = ()


class Source(Protocol):
    """A source of drafts for one request."""

    def guess(self, ahead: Sequence[int], limit: int) -> Guess:
        """Returns at most `limit` tokens that are expected after the emitted ones and `ahead`; none if nothing is expected."""

    def add(self, tokens: Sequence[int]) -> None:
        """Adds emitted tokens."""


class SourceOdds:
    """By evidence bin, the probability that a guess is right if those before it are; shared by all requests of a session."""

    def __init__(self, priors: Mapping[str, float]) -> None:
        self._priors = dict(priors)
        self._compared: dict[str, float] = {}
        self._right: dict[str, float] = {}
        self._chances: dict[str, float] = {}  # cached results of `chance`

    def chance(self, index: str) -> float:
        """Returns the probability of a bin; without a prior it starts from 0.5."""
        known = self._chances.get(index)
        if known is None:
            right = self._right.get(index, 0.0) + PRIOR_WEIGHT * self._priors.get(index, 0.5)
            known = self._chances[index] = right / (self._compared.get(index, 0.0) + PRIOR_WEIGHT)
        return known

    def observe(self, index: str, *, right: bool) -> None:
        """Counts a guess that was compared with an emitted token."""
        self._compared[index] = self._compared.get(index, 0.0) * DECAY + 1
        self._right[index] = self._right.get(index, 0.0) * DECAY + right
        self._chances.pop(index, None)


class Proposal(NamedTuple):
    """A guess and the probability of each of its tokens, given those before it."""

    guess: Guess
    chances: tuple[float, ...]


NO_PROPOSAL = Proposal(Guess(""), ())


class Proposals:
    """The guesses of a request's source. In each round, call `propose` before and after the draft, then `observe`."""

    def __init__(self, source: Source, odds: SourceOdds) -> None:
        self._source = source
        self._odds = odds
        self._pending: list[tuple[tuple[int, ...], Guess]] = []

    def propose(self, ahead: Sequence[int], limit: int) -> Proposal:
        """Returns at most `limit` tokens that the source expects after the emitted tokens and `ahead`, with their probabilities."""
        guess = self._source.guess(ahead, limit) if limit > 0 else None
        if guess is None or not guess.tokens:
            return NO_PROPOSAL
        self._pending.append((tuple(ahead), guess))
        return Proposal(guess, tuple(map(self._odds.chance, guess.bins)))

    def observe(self, emitted: Sequence[int]) -> None:
        """Compares the guesses of the round with the emitted tokens, up to the first wrong one, and adds the tokens to the source."""
        for ahead, guess in self._pending:
            if tuple(emitted[: len(ahead)]) != ahead:
                continue
            for token, emitted_token, index in zip(guess.tokens, emitted[len(ahead) :], guess.bins, strict=False):
                self._odds.observe(index, right=token == emitted_token)
                if token != emitted_token:
                    break
        self._pending.clear()
        self._source.add(emitted)


# A memory of the text. Where the newest tokens occurred before, the guess is that the same tokens follow again.
#
# The text is stored in a suffix automaton (Blumer et al. 1985, Theoretical Computer Science 40), which finds the longest suffix of the text
# that occurred before, in constant time per token. Next to a drafter, it works like SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975):
# the longer the match, the more certain the guess. Instead of a drafter, it is prompt lookup (Saxena 2023, prompt-lookup-decoding), which
# costs nothing and helps where a text repeats itself.

SOURCE = "memory"
# Shorter matches are no evidence. Below: the lower bounds of the bins of match lengths, and the prior of each bin.
SHORTEST_MATCH = 2
_BOUNDS = (2, 3, 4, 6, 9, 14, 22, 40)
TEXT_PRIORS = {f"{SOURCE} {bound}": chance for bound, chance in zip(_BOUNDS, (0.25, 0.35, 0.45, 0.6, 0.7, 0.8, 0.9, 0.95), strict=True)}
# Only this many tokens at the end of a prompt are remembered, because a token takes about 600 bytes.
MAX_TOKENS = 32768
# Tokens that are added to the automaton at a time, which takes 4 ms, or 25 ms in the worst case, a text of two different tokens.
SLICE_TOKENS = 4096
# Up to this many tokens may wait until a guess is possible; adding them then takes 0.2 ms.
WAITING_TOKENS = 256
# A predicted answer is cut to this many characters per token of the context. Texts have 3 to 6 characters per token, so nothing is lost.
PREDICTED_CHARACTERS = 16
# A separator that no text contains: no match and no copy goes across it. Copies also end before soft rows, whose ids are negative.
BORDER = -1
# This many tokens from the end of the prompt are put before a predicted answer, so that the start of the answer is guessed after them.
LEAD = 40
# The most suffixes that are updated per token. Where a text repeats itself endlessly, it would be all of its length.
_MAX_SUFFIXES = 32


class TextMatch(NamedTuple):
    """A state of the automaton, and the length of the match there in tokens."""

    state: int
    length: int


class SuffixAutomaton:
    """A suffix automaton of a growing text. Each state stands for substrings that end at the same positions; state 0 for the empty one."""

    def __init__(self) -> None:
        self._length = [0]
        self._link = [-1]
        self._next: list[dict[int, int]] = [{}]
        self._end = [0]  # by state, where its newest known occurrence ends
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
        """Returns the state of the longest repeated suffix; splits a state if needed."""
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
        """Sets the newest occurrence of the suffixes of the text to its end."""
        link, ends, end = self._link, self._end, len(self.tokens)  # local names: in repetitive text this loop is most of a round's Python
        for _ in range(_MAX_SUFFIXES):
            state = link[state]
            if state <= 0:
                return
            ends[state] = end

    def longest_repeat(self, ahead: Sequence[int] = ()) -> tuple[int, int]:
        """Returns the length of the longest suffix of the text plus `ahead` that occurred before, and where its newest occurrence ends."""
        state = max(self._link[self._last], 0)
        match = TextMatch(state, self._length[state])
        for token in ahead:
            match = self.follow(match, token)
        return match.length, self._end[match.state]

    def follow(self, match: TextMatch, token: int) -> TextMatch:
        """Returns the longest match that ends with `token`, from the longest match before it."""
        state, length = match
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        onward = self._next[state].get(token)
        return TextMatch(0, 0) if onward is None else TextMatch(onward, length + 1)


class TextMemory:
    """Guesses the tokens that followed the longest earlier occurrence of the newest tokens. Implements `Source`.

    A long text is added to the automaton in slices, one per call, and nothing is guessed until all of it is added. Otherwise other requests
    would wait for this one. The newest tokens are added only if the last two occurred before, so a text without repetitions costs little.
    """

    def __init__(self, tokens: Sequence[int], predicted: Sequence[int] = ()) -> None:
        """`predicted` are tokens that the output is expected to repeat, wholly or in parts."""
        self._automaton = SuffixAutomaton()
        self._unread: list[int] = []
        # All pairs of adjacent tokens, including unread ones; the newest token; and whether the newest pair occurred before.
        self._pairs: set[tuple[int, int]] = set()
        self._newest, self._recurs = BORDER, False
        before = [*tokens[-LEAD:], *predicted[:MAX_TOKENS], BORDER] if predicted else []
        self.add([*before, *tokens[-MAX_TOKENS:]])

    def add(self, tokens: Sequence[int]) -> None:
        if not tokens:
            return
        pairs = list(zip((self._newest, *tokens), tokens, strict=False))
        self._pairs.update(pairs[:-1])
        self._newest, self._recurs = tokens[-1], pairs[-1] in self._pairs
        self._pairs.add(pairs[-1])
        self._unread += tokens
        if len(self._unread) > WAITING_TOKENS:
            self._read()

    def _read(self) -> None:
        for token in self._unread[:SLICE_TOKENS]:
            self._automaton.append(token)
        del self._unread[:SLICE_TOKENS]

    def _occurred(self, ahead: Sequence[int]) -> bool:
        """Whether the last two tokens (SHORTEST_MATCH) of the text plus `ahead` occurred before."""
        if not ahead:
            return self._recurs
        return (ahead[-2] if len(ahead) > 1 else self._newest, ahead[-1]) in self._pairs

    def guess(self, ahead: Sequence[int], limit: int) -> Guess:
        """See `Source.guess`. A copy that reaches the end of the text continues from its own start, so a loop is guessed as a loop."""
        if not self._occurred(ahead) or len(self._unread) > WAITING_TOKENS:
            return NO_GUESS
        self._read()
        length, end = self._automaton.longest_repeat(ahead)
        ends = end + limit > len(self._automaton.tokens)
        copy = self._automaton.tokens[end : end + limit] + (list(ahead) if ends else [])
        if copy and min(copy) < 0:
            copy, ends = within_text(copy), False
        while ends and copy and len(copy) < limit:
            copy += copy
        tokens = tuple(copy[:limit])
        return Guess(SOURCE, tokens, evidences(length, len(tokens)))


class LookupDrafter:
    """Drafts the guesses of a memory of the target's text: prompt lookup, without a model. Implements `interfaces.Drafter`."""

    stepwise = False  # copying costs nothing, and has no confidence to stop by

    def __init__(self, target: Target) -> None:
        self._target = target
        self._text: NDArray[np.int32] = np.empty(0, np.int32)
        self._memory = TextMemory([])

    def draft(
        self,
        last: int,
        draft_length: int,
        sampler: DraftSampler | None = None,  # noqa: ARG002
        should_continue: ShouldContinue | None = None,  # noqa: ARG002
    ) -> list[int]:
        """Returns `draft_length` tokens, or none if the newest SHORTEST_MATCH tokens did not occur before.

        `sampler` is ignored: there are no logits, and a copied token counts as drafted with probability 1.
        """
        text, known = np.append(self._target.tokens, np.int32(last)), len(self._text)
        if np.array_equal(text[:known], self._text):
            self._memory.add(text[known:].tolist())
        else:  # the text of another request, or a text that was rolled back
            self._memory = TextMemory(text.tolist())
        self._text = text
        return list(self._memory.guess((), draft_length).tokens)

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


def predicted_tokens(text: str, vocabulary: Vocabulary, context: int) -> list[int]:
    """Returns the tokens of a predicted output, at most as many as an output can have. The rest of the text is not tokenized."""
    room = min(context, MAX_TOKENS)
    return vocabulary.encode(text[: PREDICTED_CHARACTERS * room], add_bos=False)[:room] if text else []


def within_text(tokens: list[int]) -> list[int]:
    """Returns the tokens before the first border or soft row."""
    return list(itertools.takewhile(lambda token: token >= 0, tokens))


def evidence(length: int, source: str = SOURCE) -> str:
    """Returns the bin of a match of this length."""
    return f"{source} {_BOUNDS[bisect_right(_BOUNDS, length) - 1]}"


def evidences(length: int, count: int) -> tuple[str, ...]:
    """Returns the bins of the `count` tokens after a match of this length; each token makes the match longer."""
    first = min(length, _BOUNDS[-1])
    return (_EVIDENCE[first : first + count] + _EVIDENCE[-1:] * count)[:count]


NO_GUESS = Guess(SOURCE)
# The bins by length of the match, computed once because each round needs many.
_EVIDENCE = ("", "", *(evidence(length) for length in range(_BOUNDS[0], _BOUNDS[-1] + 1)))
