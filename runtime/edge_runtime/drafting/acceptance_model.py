"""How likely drafts are to be accepted, learned while it runs: what the drafter's confidence is worth, and how sure it will be next.

Drafts are sorted into kinds, by how sure the drafter is of them. A draft of a kind stands with the kind's own chance, and what follows one
that stands is of this or that kind with chances of its own: a Markov chain over kinds, so that a sure drafter is expected to stay sure for a
while. All counts fade, so that a change of domain shows, and start from a prior, so that the first rounds are sensible.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH

Chances = NDArray[np.float64]

# Upper ends of the kinds; drafters are mostly sure, so the kinds are narrow there.
CONFIDENCE_BOUNDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
# A prior counts as this many observations: of a kind's chance to stand, of what follows a kind, of the first draft's kind.
ACCEPT_WEIGHT, TRANSITION_WEIGHT, FIRST_WEIGHT = 2.0, 3.0, 2.0
# Share of an old count that is left after a new one of the same sort: memories of about 200, 1000 and 50 observations.
ACCEPT_DECAY, TRANSITION_DECAY, FIRST_DECAY = 0.995, 0.999, 0.98
# Before anything was seen, a kind so many steps away follows with 1/e of the chance of the kind itself.
NEARNESS = 3.0
# Chance of a draft of which nothing is said, before anything was seen: that of a mediocre drafter. It counts as PRIOR_WEIGHT
# observations; the place before as NEIGHBOUR_WEIGHT.
PRIOR, PRIOR_WEIGHT, NEIGHBOUR_WEIGHT = 0.6, 2.0, 1.0
POSITION_DECAY = 0.96
# What was learned in an earlier use counts as at most so many observations of each sort: the text is another one now. What the export
# saw of a single text counts less.
CACHED_WEIGHT, EXPORTED_WEIGHT = 40.0, 10.0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is expected of drafts now, all float64. `stands` [kinds]: the chance of a draft that all before it stand to stand too.

    `follows` [kinds, kinds]: of what kind the next draft is, for the kind of one that stands. `first` [kinds]: of what kind the first
    one is. `further` [longest + 1, kinds]: how many of n more drafts after a standing one of a kind are expected to stand.
    """

    stands: Chances
    follows: Chances
    first: Chances
    further: Chances


class Acceptance(Protocol):
    """What the profit policy asks."""

    def kind(self, confidence: float, position: int) -> int:
        """Returns the kind of a draft: the drafter's probability of it, and how many came before it in its round."""

    def forecast(self, longest: int) -> Forecast:
        """Returns what is expected of drafts of up to `longest` tokens."""

    def observe(self, kinds: Sequence[int], verified: int, accepted: int) -> None:
        """Learns from a round: drafts of these kinds, of which the first `verified` were verified and the first `accepted` stood."""

    def fade(self, weight: float) -> None:
        """While nothing is drafted, what was seen of first drafts counts as at most `weight` observations."""


class AcceptanceModel:
    """For drafters that say how sure they are. The prior is a calibrated one's, which is right as often as it says (Guo et al. 2017,
    arXiv 1706.04599).
    """

    def __init__(self) -> None:
        middles = np.array([(low + high) / 2 for low, high in pairwise((0.0, *CONFIDENCE_BOUNDS, 1.0))])
        kinds = np.arange(len(middles))
        near = np.exp(-np.abs(np.subtract.outer(kinds, kinds)) / NEARNESS)
        self._seen = np.full(len(middles), ACCEPT_WEIGHT)
        self._stood = middles * ACCEPT_WEIGHT
        self._follows = TRANSITION_WEIGHT * near / near.sum(axis=1, keepdims=True)
        self._first = np.full(len(middles), FIRST_WEIGHT / len(middles))
        self._observed = False

    def kind(self, confidence: float, position: int) -> int:  # noqa: ARG002
        """The class of the confidence."""
        return bisect_right(CONFIDENCE_BOUNDS, confidence)

    def forecast(self, longest: int) -> Forecast:
        """From the counts."""
        return _forecast(
            self._stood / self._seen, self._follows / self._follows.sum(axis=1, keepdims=True), self._first / self._first.sum(), longest
        )

    def observe(self, kinds: Sequence[int], verified: int, accepted: int) -> None:
        """What follows the first mismatch was never tried; of what kind the first draft was is known of every round."""
        if not kinds:
            return
        self._observed = True
        self._first *= FIRST_DECAY
        self._first[kinds[0]] += 1
        for kind, stood in zip(kinds[:verified], [1.0] * accepted + [0.0], strict=False):
            self._seen[kind] = self._seen[kind] * ACCEPT_DECAY + 1
            self._stood[kind] = self._stood[kind] * ACCEPT_DECAY + stood
        for kind, following in pairwise(kinds[: accepted + 1]):
            self._follows[kind] *= TRANSITION_DECAY
            self._follows[kind, following] += 1

    def fade(self, weight: float) -> None:
        """The proportions stay, but new observations move them faster."""
        self._first *= min(1.0, weight / self._first.sum())

    @property
    def observed(self) -> bool:
        """Whether it has learned anything since it was made."""
        return self._observed

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys; no tokens."""
        return {
            "seen": self._seen.tolist(),
            "stood": self._stood.tolist(),
            "follows": self._follows.tolist(),
            "first": self._first.tolist(),
        }

    @classmethod
    def from_json(cls, data: object, most: float = CACHED_WEIGHT) -> Self | None:
        """Returns what `to_json` wrote, counted as at most so many observations of each sort; None for anything else."""
        model = cls()
        if not isinstance(data, Mapping):
            return None
        seen, stood, follows, first = (
            _counts(data.get(name), like)
            for name, like in (("seen", model._seen), ("stood", model._stood), ("follows", model._follows), ("first", model._first))
        )
        if seen is None or stood is None or follows is None or first is None or (stood > seen).any():
            return None
        share = np.minimum(1.0, most / seen)
        model._seen, model._stood = seen * share, stood * share
        model._follows = follows * np.minimum(1.0, most / follows.sum(axis=1, keepdims=True))
        model._first = first
        model.fade(most)
        return model


class PositionModel:
    """For drafters that say nothing: a draft's kind is its position. Each is drawn towards the one before it, so that the first ones speak
    for those that are seldom or never tried.
    """

    def __init__(self, prior: float = PRIOR, *, longest: int = MAX_DRAFT_LENGTH) -> None:
        self._seen = np.zeros(longest)
        self._stood = np.zeros(longest)
        self._seen[:1], self._stood[:1] = PRIOR_WEIGHT, prior * PRIOR_WEIGHT
        self._prior = prior

    def kind(self, confidence: float, position: int) -> int:  # noqa: ARG002
        """The position."""
        return position

    def forecast(self, longest: int) -> Forecast:
        """From the counts."""
        stands, before = np.empty(len(self._seen)), self._prior
        for position, (seen, stood) in enumerate(zip(self._seen, self._stood, strict=True)):
            before = stands[position] = (stood + before * NEIGHBOUR_WEIGHT) / (seen + NEIGHBOUR_WEIGHT)
        first = np.zeros(len(stands))
        first[:1] = 1.0
        return _forecast(stands, np.eye(len(stands), k=1), first, longest)

    def observe(self, kinds: Sequence[int], verified: int, accepted: int) -> None:
        """What follows the first mismatch was never tried."""
        for kind, stood in zip(kinds[:verified], [1.0] * accepted + [0.0], strict=False):
            self._seen[kind] = self._seen[kind] * POSITION_DECAY + 1
            self._stood[kind] = self._stood[kind] * POSITION_DECAY + stood

    def fade(self, weight: float) -> None:
        """Later positions are forgotten sooner: they are seen last when drafting begins again."""
        for position, seen in enumerate(self._seen):
            share = min(1.0, (1.0 if position else weight) / max(seen, 1e-9))
            self._seen[position] *= share
            self._stood[position] *= share


def _counts(data: object, like: Chances) -> Chances | None:
    """Returns what a file holds as counts above 0 of the same shape as others; None for anything else."""
    try:
        counts = np.asarray(data, np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    # The tiny value is added to what fading has made as good as nothing.
    return counts + 1e-9 if counts.shape == like.shape and ((counts >= 0) & (counts < 1e6)).all() else None


def _forecast(stands: Chances, follows: Chances, first: Chances, longest: int) -> Forecast:
    all_stand, further = np.ones(len(stands)), np.zeros((longest + 1, len(stands)))
    for more in range(1, longest + 1):
        all_stand = follows @ (stands * all_stand)  # the next `more` drafts after one of a kind all stand
        further[more] = further[more - 1] + all_stand
    return Forecast(stands=stands, follows=follows, first=first, further=further)
