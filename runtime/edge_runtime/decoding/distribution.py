"""Distribution of the next token: the ids of nonzero probability and their probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Weights = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Distribution:
    """`tokens` int64 [n], ascending, each once; `probabilities` float64 [n], all above 0, summing to 1. The rest has probability 0."""

    tokens: Tokens
    probabilities: Weights

    @classmethod
    def certain(cls, token: int) -> Self:
        """All probability on one token."""
        return cls(np.array([token], dtype=np.int64), np.ones(1))

    @classmethod
    def proportional(cls, tokens: Tokens, weights: Weights) -> Self:
        """Normalises `weights` float64 [n], some above 0 and none below, of ascending `tokens` int64 [n]."""
        if not weights.all():
            kept = np.flatnonzero(weights)
            tokens, weights = tokens[kept], weights[kept]
        return cls(tokens, weights / weights.sum())

    def of(self, token: int) -> float:
        """Returns the probability of one token."""
        index = int(np.searchsorted(self.tokens, token))
        present = index < len(self.tokens) and int(self.tokens[index]) == token
        return float(self.probabilities[index]) if present else 0.0

    def draw(self, uniform: float) -> int:
        """Returns the token at `uniform`, a number in [0, 1), in the cumulative distribution."""
        sums = np.cumsum(self.probabilities)
        # A number below 1 is at most 1 - 2^-53, so that the product rounds to less than the last sum.
        return int(self.tokens[int(np.searchsorted(sums, uniform * sums[-1], side="right"))])

    def excess(self, other: Distribution, share: float = 1.0) -> Weights:
        """Returns max(share * self - other, 0) at each of `tokens`, float64 [n], not normalised."""
        left = share * self.probabilities
        places, shared = self._places(other.tokens)
        left[places] -= other.probabilities[shared]
        return np.maximum(left, 0.0, out=left)

    def proportional_to(self, weights: Weights) -> Distribution:
        """Returns the distribution over `tokens` in proportion to `weights` float64 [n], `self` if all are 0."""
        return Distribution.proportional(self.tokens, weights) if weights.any() else self

    def _places(self, tokens: Tokens) -> tuple[Tokens | slice, Tokens | slice]:
        """Returns where `tokens`, ascending, are among this distribution's, and which of them are."""
        if self.tokens[-1] == len(self.tokens) - 1:  # ascending ids from 0 on: all of a vocabulary
            inside = slice(int(np.searchsorted(tokens, len(self.tokens))))
            return tokens[inside], inside
        places = np.minimum(np.searchsorted(self.tokens, tokens), len(self.tokens) - 1)
        shared = np.flatnonzero(self.tokens[places] == tokens)
        return places[shared], shared
