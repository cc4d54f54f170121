"""The distribution of the next token, and the noise by which target and drafter often draw the same one, whatever the drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

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


# Noise that target and drafter share, so that they often choose the same token and the text depends on the seed alone.
#
# Every token has an arrival time at every place of the text: an exponential number, a function of seed, place and token id. A distribution
# chooses the token whose arrival time divided by its weight is smallest (an exponential race, the same as the Gumbel-max trick). The
# chosen token has exactly that distribution. The drafter runs the race with its own weights against the same arrival times. Source:
# Daliri, Musco and Suresh 2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding" (arXiv 2408.07978).
#
# The arrival times are the same with every version, processor and engine. With unsigned 64-bit arithmetic, SplitMix64's finalizer `mix`
# (Steele, Lea and Flood, OOPSLA 2014) and `output(key, n) = mix(key + (n + 1) * 0x9E3779B97F4A7C15)`:
#
#     key = output(output(s, 0), place), with the seed's 64-bit words folded into s: s = output(s, word), from s = 0, lowest word first
#     group = (token >> 15) * 512 + (token & 511), member = (token >> 9) & 63
#     h = output(key, 2^32 + group); first = -ln(((h >> 12) + 0.5) / 2^52) / 64
#     arrival = first if member = h & 63, else first - ln(((output(key, token) >> 12) + 0.5) / 2^52)
#
# So the 64 tokens of a group share the time of the first arrival among them. The minimum of 64 exponential numbers is exponential, belongs
# to each of them with the same chance, and the others start anew from it because they have no memory: the times are independent. It means
# that a whole vocabulary is searched by 64 tokens at a time. A group's tokens are 512 apart, because the largest logits of groups are then
# found in vector registers. The logarithm is computed by additions, multiplications and divisions alone, which IEEE 754 defines to the
# bit.

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1
# Tokens of a group, and how far they are apart; so many groups are a stretch of the vocabulary.
_MEMBERS, _APART = 64, 512
_STRETCH = _MEMBERS * _APART
# Groups that are searched for a bound on the winner's time: a few more than can win in a flat distribution.
_LIKELY = 8
# Outputs of groups begin behind those of any vocabulary.
_GROUPS = np.uint64(1 << 32)
_LN2 = 0.6931471805599453
_HALF_ROOT = 0.7071067811865476
# Of ln((1 + s) / (1 - s)) = 2 (s + s^3 / 3 + s^5 / 5 + ...); s is at most 0.172 here, so the rest is below 1e-12.
_ODD = tuple(2.0 / n for n in range(15, 0, -2))


class Race(Protocol):
    """A faster way to find the winner of a race; `key` is that of the place."""

    def choose(self, key: int, tokens: Tokens, weights: Weights) -> int:
        """As `PlaceNoise.choose`."""

    def choose_of_all(self, key: int, logits: NDArray[np.float32], temperature: float) -> int:
        """As `PlaceNoise.choose_of_all`."""


class PlaceNoise:
    """The arrival times at one place of a text."""

    def __init__(self, key: int, race: Race | None = None) -> None:
        self._key = np.uint64(key)
        self._race = race

    def arrivals(self, tokens: Tokens) -> Weights:
        """Returns the arrival times of `tokens` int64 [n], each below 2^32: float64 [n], above 0."""
        groups = (tokens // _STRETCH * _APART + tokens % _APART).astype(np.uint64)
        outputs = _outputs(self._key, np.concatenate([groups + _GROUPS, tokens.astype(np.uint64)]))
        first, own = np.split(_exponential(outputs), 2)
        owners = (outputs[: len(tokens)] % np.uint64(_MEMBERS)).astype(np.int64)
        own[tokens // _APART % _MEMBERS == owners] = 0.0
        return first / _MEMBERS + own

    def choose(self, tokens: Tokens, weights: Weights) -> int:
        """Returns the token that wins the race; `weights` float64 [n], some above 0 and none below, need not sum to 1."""
        if self._race is not None:
            return self._race.choose(int(self._key), tokens, weights)
        with np.errstate(divide="ignore"):  # a weight of 0 never arrives
            return int(tokens[int((self.arrivals(tokens) / weights).argmin())])

    def choose_of_all(self, logits: NDArray[np.float32], temperature: float) -> int:
        """Returns the token that wins among a whole vocabulary with weights exp(logit / temperature).

        `logits` [vocabulary], the largest finite. A group whose first arrival is too late even for its best weight is left out.
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
    """The noise of one seed, a whole number of 0 or more. `race` finds winners; None: arrays of NumPy do, which need no native code."""

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
        """Returns the noise at a place: the number of tokens before it, those of the prompt included."""
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
    with np.errstate(over="ignore"):  # a difference over a tiny temperature may be -inf, which exp takes
        return np.exp((logits.astype(np.float64) - float(best)) / temperature)


def _output(key: int, number: int) -> int:
    """As `_outputs`, of one number."""
    mixed = (key + (number + 1) * _GAMMA) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * _FIRST) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * _SECOND) & _WORD
    return mixed ^ (mixed >> 31)


def _outputs(key: np.uint64, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the outputs with these numbers of the SplitMix64 generator that starts at `key`."""
    mixed = (numbers + np.uint64(1)) * np.uint64(_GAMMA)
    mixed += key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_FIRST)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_SECOND)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _exponential(outputs: NDArray[np.uint64]) -> Weights:
    """Returns -ln(u) of the uniform numbers u = ((output >> 12) + 0.5) / 2^52, with the same bits everywhere."""
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
