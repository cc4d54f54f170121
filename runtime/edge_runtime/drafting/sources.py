"""Drafts that need no drafter, such as what the text repeats, and one calibrated probability for all of them.

A source guesses tokens and sorts each into a bin by its evidence. How often the guesses of a bin are right is counted on every emitted
token, whether the guess was used or not: what the target emitted tells both. So a source costs nothing until it is worth using.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

# Share of an old count that is left after a new one of the same bin, and the weight of the prior probability.
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
        """Returns at most `limit` tokens expected after the emitted ones and `ahead`, none if it expects nothing."""

    def add(self, tokens: Sequence[int]) -> None:
        """Adds emitted tokens."""


class SourceOdds:
    """The probability that a guess of an evidence bin is right, given that those before it are; shared by all requests of a session."""

    def __init__(self, priors: Mapping[str, float]) -> None:
        self._priors = dict(priors)
        self._compared: dict[str, float] = {}
        self._right: dict[str, float] = {}

    def chance(self, index: str) -> float:
        """Returns the probability of a bin; one without a prior counts as a coin toss."""
        right = self._right.get(index, 0.0) + PRIOR_WEIGHT * self._priors.get(index, 0.5)
        return right / (self._compared.get(index, 0.0) + PRIOR_WEIGHT)

    def observe(self, index: str, *, right: bool) -> None:
        """Counts a guess that was compared with an emitted token."""
        self._compared[index] = self._compared.get(index, 0.0) * DECAY + 1
        self._right[index] = self._right.get(index, 0.0) * DECAY + right


class Proposal(NamedTuple):
    """A guess and the probability of each of its tokens, given those before it."""

    guess: Guess
    chances: tuple[float, ...]

    @property
    def expected(self) -> float:
        """Expected number of right tokens."""
        total, chain = 0.0, 1.0
        for chance in self.chances:
            chain *= chance
            total += chain
        return total


NO_PROPOSAL = Proposal(Guess(""), ())


class Sources:
    """The sources of one request. Call `propose` once before a draft and once after it, then `observe` with what was emitted."""

    def __init__(self, sources: Sequence[Source], odds: SourceOdds) -> None:
        self._sources = sources
        self._odds = odds
        self._pending: list[tuple[tuple[int, ...], Guess]] = []

    def propose(self, ahead: Sequence[int], limit: int) -> Proposal:
        """Returns the proposal with the most expected tokens after the emitted ones and `ahead`."""
        best = NO_PROPOSAL
        for source in self._sources if limit > 0 else ():
            guess = source.guess(ahead, limit)
            if guess.tokens:
                self._pending.append((tuple(ahead), guess))
                proposal = Proposal(guess, tuple(self._odds.chance(index) for index in guess.bins))
                if best is NO_PROPOSAL or proposal.expected > best.expected:
                    best = proposal
        return best

    def observe(self, emitted: Sequence[int]) -> None:
        """Compares all guesses of the round with what was emitted, as far as they were right, and adds the tokens to the sources."""
        for ahead, guess in self._pending:
            if tuple(emitted[: len(ahead)]) != ahead:
                continue
            for token, emitted_token, index in zip(guess.tokens, emitted[len(ahead) :], guess.bins, strict=False):
                self._odds.observe(index, right=token == emitted_token)
                if token != emitted_token:
                    break
        self._pending.clear()
        for source in self._sources:
            source.add(emitted)
