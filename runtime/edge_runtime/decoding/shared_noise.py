"""The distribution of the next token, and noise that makes target and drafter often draw the same token, whatever was drafted before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Weights = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Distribution:
    """A distribution of tokens: `tokens` int64 [n], ascending and distinct; `probabilities` float64 [n], all above 0, with sum 1.

    Other tokens have probability 0.
    """

    tokens: Tokens
    probabilities: Weights

    @classmethod
    def certain(cls, token: int) -> Self:
        """Returns the distribution with all probability on one token."""
        return cls(np.array([token], dtype=np.int64), np.ones(1))

    @classmethod
    def proportional(cls, tokens: Tokens, weights: Weights) -> Self:
        """Normalises `weights` float64 [n] of ascending `tokens` int64 [n]; none is negative, and at least one is positive."""
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
        # `uniform` is at most 1 - 2^-53, so the product rounds to less than the last sum, and the index is in range.
        return int(self.tokens[int(np.searchsorted(sums, uniform * sums[-1], side="right"))])

    def excess(self, other: Distribution, share: float = 1.0) -> Weights:
        """Returns max(share * self - other, 0) at each of `tokens`, float64 [n], not normalised."""
        left = share * self.probabilities
        places, shared = self._places(other.tokens)
        left[places] -= other.probabilities[shared]
        return np.maximum(left, 0.0, out=left)

    def proportional_to(self, weights: Weights) -> Distribution:
        """Returns the distribution over `tokens` that is proportional to `weights` float64 [n]; `self` if all are 0."""
        return Distribution.proportional(self.tokens, weights) if weights.any() else self

    def _places(self, tokens: Tokens) -> tuple[Tokens | slice, Tokens | slice]:
        """Returns the indices in this distribution of those ascending `tokens` that are in it, and the indices of these in `tokens`."""
        if self.tokens[-1] == len(self.tokens) - 1:  # the tokens are 0 to n - 1, as those of a whole vocabulary
            inside = slice(int(np.searchsorted(tokens, len(self.tokens))))
            return tokens[inside], inside
        places = np.minimum(np.searchsorted(self.tokens, tokens), len(self.tokens) - 1)
        shared = np.flatnonzero(self.tokens[places] == tokens)
        return places[shared], shared


# Noise that target and drafter share, so that they often choose the same token, and the text depends on the seed alone.
#
# At every place (position in the text) every token has an arrival time: an exponentially distributed number that is a function of seed,
# place and token id. A distribution chooses the token with the smallest ratio of arrival time to weight (an exponential race, equivalent to
# the Gumbel-max trick). The chosen token has exactly that distribution. The drafter runs the race with its own weights, but the same
# arrival times. Source: Daliri, Musco and Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding" (arXiv
# 2408.07978).
#
# The arrival times are the same with every version, processor and engine. With unsigned 64-bit arithmetic, SplitMix64's finalizer `mix`
# (Steele, Lea and Flood, OOPSLA 2014) and `output(key, n) = mix(key + (n + 1) * 0x9E3779B97F4A7C15)`:
#
#     key = output(output(s, 0), place), with the seed's 64-bit words folded into s: s = output(s, word), from s = 0, lowest word first
#     group = (token >> 15) * 512 + (token & 511), member = (token >> 9) & 63
#     h = output(key, 2^32 + group); first = -ln(((h >> 12) + 0.5) / 2^52) / 64
#     arrival = first if member = h & 63, else first - ln(((output(key, token) >> 12) + 0.5) / 2^52)
#
# So all times of the 64 tokens of a group are computed from the first arrival among them. The minimum of 64 exponential numbers is itself
# exponential, and each of them is the minimum with the same probability. Exponential numbers have no memory, so the others start anew from
# the minimum. Hence the times are independent, as they should be. This allows to search a vocabulary 64 tokens at a time: most groups can
# be excluded by their first arrival. The tokens of a group are 512 apart, so that the largest logits of groups can be found in vector
# registers. The logarithm uses only additions, multiplications and divisions, whose results IEEE 754 defines to the bit.

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1
# The number of tokens in a group, and the distance between them. _APART groups together cover a contiguous stretch of the vocabulary.
_MEMBERS, _APART = 64, 512
_STRETCH = _MEMBERS * _APART
# How many groups are searched first, for an upper bound of the winner's time.
_LIKELY = 8
# The numbers of outputs for groups start after those for tokens of any vocabulary.
_GROUPS = np.uint64(1 << 32)
_LN2 = 0.6931471805599453
_HALF_ROOT = 0.7071067811865476
# Coefficients of ln((1 + s) / (1 - s)) = 2 (s + s^3 / 3 + s^5 / 5 + ...). Here s is at most 0.172, so the error is below 1e-12.
_ODD = tuple(2.0 / n for n in range(15, 0, -2))


class Race(Protocol):
    """A faster way to find the winner of a race; `key` is the place's."""

    def choose(self, key: int, tokens: Tokens, weights: Weights) -> int:
        """See `PlaceNoise.choose`."""

    def choose_of_all(self, key: int, logits: NDArray[np.float32], temperature: float) -> int:
        """See `PlaceNoise.choose_of_all`."""


class PlaceNoise:
    """The noise at one place of a text: the arrival times of all tokens."""

    def __init__(self, key: int, race: Race | None = None) -> None:
        self._key = np.uint64(key)
        self._race = race

    def arrivals(self, tokens: Tokens) -> Weights:
        """Returns the arrival times of `tokens` int64 [n], ids below 2^32: positive float64 [n]."""
        groups = (tokens // _STRETCH * _APART + tokens % _APART).astype(np.uint64)
        outputs = _outputs(self._key, np.concatenate([groups + _GROUPS, tokens.astype(np.uint64)]))
        first, own = np.split(_exponential(outputs), 2)
        owners = (outputs[: len(tokens)] % np.uint64(_MEMBERS)).astype(np.int64)
        own[tokens // _APART % _MEMBERS == owners] = 0.0
        return first / _MEMBERS + own

    def choose(self, tokens: Tokens, weights: Weights) -> int:
        """Returns the token that wins the race. `weights` float64 [n] need not sum to 1; none is negative, at least one is positive."""
        if self._race is not None:
            return self._race.choose(int(self._key), tokens, weights)
        with np.errstate(divide="ignore"):  # a weight of 0 never arrives
            return int(tokens[int((self.arrivals(tokens) / weights).argmin())])

    def choose_of_all(self, logits: NDArray[np.float32], temperature: float) -> int:
        """Returns the token that wins among the whole vocabulary, with the weights exp(logit / temperature).

        `logits` is [vocabulary]; the largest one is finite. A group is skipped if its first arrival is too late even with its largest
        weight.
        """
        if self._race is not None:
            return self._race.choose_of_all(int(self._key), np.ascontiguousarray(logits), temperature)
        best = logits[int(logits.argmax())]
        firsts = _exponential(_outputs(self._key, np.arange(_group_count(len(logits)), dtype=np.uint64) + _GROUPS)) / _MEMBERS
        with np.errstate(divide="ignore"):
            earliest = firsts / _weights(_group_maxima(logits), best, temperature)
        likely = np.argpartition(earliest, _LIKELY - 1)[:_LIKELY]
        tokens = _tokens_of(likely, len(logits))
        with np.errstate(divide="ignore"):
            bound = (self.arrivals(tokens) / _weights(logits[tokens], best, temperature)).min()
        tokens = _tokens_of(np.flatnonzero(earliest <= bound), len(logits))
        return self.choose(tokens, _weights(logits[tokens], best, temperature))


class SharedNoise:
    """The noise of one seed, a whole number of at least 0. `race` finds winners in native code; None: NumPy does."""

    def __init__(self, seed: int, race: Race | None = None) -> None:
        self._race = race
        state = 0
        while True:
            state = _output(state, seed & _WORD)
            seed >>= 64
            if not seed:
                break
        self._state = _output(state, 0)

    def at(self, place: int) -> PlaceNoise:
        """Returns the noise at a place: the number of tokens before it, including those of the prompt."""
        return PlaceNoise(_output(self._state, place), self._race)


def _group_count(vocabulary: int) -> int:
    return -(-vocabulary // _STRETCH) * _APART


def _group_maxima(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the largest logit of each group, -inf for a group without tokens."""
    rest = len(logits) % _STRETCH
    whole: NDArray[np.float32] = logits[: len(logits) - rest].reshape(-1, _MEMBERS, _APART).max(axis=1).ravel()
    if not rest:
        return whole
    padded = np.full(_STRETCH, -np.inf, np.float32)
    padded[:rest] = logits[-rest:]
    return np.append(whole, padded.reshape(_MEMBERS, _APART).max(axis=0))


def _tokens_of(groups: NDArray[np.int64], vocabulary: int) -> Tokens:
    """Returns the ids of the tokens in these groups."""
    tokens = ((groups // _APART * _STRETCH + groups % _APART)[:, None] + np.arange(0, _STRETCH, _APART)).ravel()
    return tokens[tokens < vocabulary]


def _weights(logits: NDArray[np.float32], best: np.float32, temperature: float) -> Weights:
    """Returns exp((logit - best) / temperature), float64."""
    with np.errstate(over="ignore"):  # dividing by a tiny temperature may give -inf, which exp accepts
        return np.exp((logits.astype(np.float64) - float(best)) / temperature)


def _output(key: int, number: int) -> int:
    """Returns what `_outputs` does, for one number."""
    mixed = (key + (number + 1) * _GAMMA) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _WORD
    return mixed ^ (mixed >> 31)


def _outputs(key: np.uint64, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the outputs number `numbers` of the SplitMix64 generator whose state starts at `key`."""
    mixed = (numbers + np.uint64(1)) * np.uint64(_GAMMA)
    mixed += key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_FIRST)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _exponential(outputs: NDArray[np.uint64]) -> Weights:
    """Returns -ln(u) of the uniform numbers u = ((output >> 12) + 0.5) / 2^52, with the same bits on every machine."""
    mantissas, exponents = np.frexp((outputs >> np.uint64(12)).astype(np.float64) + 0.5)
    small = mantissas < _HALF_ROOT
    mantissas[small] *= 2.0
    exponents = exponents - small
    quotient = (mantissas - 1.0) / (mantissas + 1.0)
    square = quotient * quotient
    series = np.full_like(square, _ODD[0])
    for coefficient in _ODD[1:]:
        series *= square
        series += coefficient
    series *= quotient
    return (52 - exponents) * _LN2 - series
