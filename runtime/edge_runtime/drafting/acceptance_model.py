"""Acceptance probabilities of drafts, learned while decoding from the drafter's confidence or from positions.

Here a draft is one drafted token. Drafts are sorted into bins by the drafter's confidence. A draft is accepted with the probability of its
bin, and its bin depends on the bin of the draft before it. That is a Markov chain over bins: a confident drafter is expected to stay
confident for a while. All counts decay, to follow a change of the text's domain, and start from a prior, for sensible first rounds.
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

# Upper bounds of the confidence bins. Drafters are mostly confident, so the bins are narrow at the upper end.
CONFIDENCE_BOUNDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
# The priors count as this many observations: of a bin's acceptance, of the bin after a bin, of the bin of a round's first draft.
ACCEPT_WEIGHT, TRANSITION_WEIGHT, FIRST_WEIGHT = 2.0, 3.0, 1.0
# An old count is multiplied by this at each new observation of the same sort: windows of about 200, 1000 and 50 observations.
ACCEPT_DECAY, TRANSITION_DECAY, FIRST_DECAY = 0.995, 0.999, 0.98
# The prior of a transition falls to 1/e over this many bins.
NEARNESS = 3.0
# Without confidences: the prior acceptance probability, that of a mediocre drafter; the observations that it counts as; and those that the
# estimate of the position before counts as.
PRIOR, PRIOR_WEIGHT, NEIGHBOUR_WEIGHT = 0.6, 2.0, 1.0
POSITION_DECAY = 0.96
# Cached counts weigh at most as much as this many observations of each sort, because they come from another text. The counts of the export
# come from a single text, and weigh less.
CACHED_WEIGHT, EXPORTED_WEIGHT = 40.0, 10.0
_MAX_UNCOUNTED = 32


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Probabilities of the next drafts, all float64.

    - `accept_prob` [bins]: that a draft in this bin is accepted, given that all drafts before it are.
    - `transition` [bins, bins]: that after an accepted draft in the first bin, the next draft is in the second.
    - `first` [bins]: that the first draft of a round is in this bin.
    - `further` [longest + 1, bins]: after an accepted draft in this bin, the expected number of accepted drafts among the next n.
    """

    accept_prob: Chances
    transition: Chances
    first: Chances
    further: Chances


class Acceptance(Protocol):
    """The acceptance estimates that the profit policy needs."""

    @property
    def bounds(self) -> Chances:
        """Ascending probabilities [bins - 1]; each is the lower bound of the bin above it. Empty if bins do not depend on confidence."""

    @property
    def is_measured(self) -> bool:
        """Whether it started from counts of this pair rather than from the prior alone."""

    def bin_of(self, confidence: float, position: int) -> int:
        """Returns the bin of a draft from the drafter's probability of it, and its position in the round, from 0."""

    def forecast(self, longest: int) -> Forecast:
        """Returns the probabilities for drafts of up to `longest` tokens."""

    def observe(self, bins: Sequence[int], verified: int, accepted: int) -> None:
        """Learns from a round whose drafts were in these bins: the first `verified` were verified, the first `accepted` accepted."""

    def fade(self, weight: float) -> None:
        """Limits the weight of old observations of first drafts to `weight`. Called while drafting is off, so that a few probes count."""


class AcceptanceModel:
    """The model for drafters that report a confidence. Implements `Acceptance`.

    Its prior is a calibrated drafter: one whose confidence equals its accuracy (Guo et al. 2017, arXiv 1706.04599).
    """

    bounds = np.array(CONFIDENCE_BOUNDS)

    def __init__(self) -> None:
        middles = np.array([(low + high) / 2 for low, high in pairwise((0.0, *CONFIDENCE_BOUNDS, 1.0))])
        bins = np.arange(len(middles))
        near = np.exp(-np.abs(np.subtract.outer(bins, bins)) / NEARNESS)
        self._verified = np.full(len(middles), ACCEPT_WEIGHT)
        self._accepted = middles * ACCEPT_WEIGHT
        self._transition = TRANSITION_WEIGHT * near / near.sum(axis=1, keepdims=True)
        self._first = np.full(len(middles), FIRST_WEIGHT / len(middles))
        self._observed = self._measured = False
        self._uncounted: list[tuple[Sequence[int], int, int]] = []  # arguments of `observe` that are not counted yet

    def bin_of(self, confidence: float, position: int) -> int:  # noqa: ARG002
        """Returns the bin of the confidence."""
        return bisect_right(CONFIDENCE_BOUNDS, confidence)

    def forecast(self, longest: int) -> Forecast:
        """Returns the probabilities that follow from the counts."""
        self._count_rounds()
        return _forecast(
            self._accepted / self._verified,
            self._transition / self._transition.sum(axis=1, keepdims=True),
            self._first / self._first.sum(),
            longest,
        )

    def observe(self, bins: Sequence[int], verified: int, accepted: int) -> None:
        """Counts drafts up to the first rejection; those after it were not compared. The bin of the first draft always counts."""
        if not bins:
            return
        self._observed = True
        self._uncounted.append((bins, verified, accepted))
        if len(self._uncounted) >= _MAX_UNCOUNTED:
            self._count_rounds()

    def _count_rounds(self) -> None:
        """Counts several rounds at once. A forward evicts the counts from the CPU's caches, and reading them again takes most of the time.

        Python lists are used, because changing single elements of an array is slower. Where all counts of a sort would have to decay at a
        new observation, the new one gets a higher weight instead, and all are scaled at the end.
        """
        rounds, self._uncounted = self._uncounted, []
        if not rounds:
            return
        compared, stood, first = self._verified.tolist(), self._accepted.tolist(), self._first.tolist()
        transition, weights, weight = self._transition.tolist(), [1.0] * len(first), 1.0
        for bins, verified, accepted in rounds:
            weight /= FIRST_DECAY
            first[bins[0]] += weight
            for place, index in enumerate(bins[: min(verified, accepted + 1)]):
                compared[index] = compared[index] * ACCEPT_DECAY + 1
                stood[index] = stood[index] * ACCEPT_DECAY + (place < accepted)
            # Drafts that were left out of the verify count too, with the probability that they would have been accepted. They were left out
            # because they are doubtful, so without them drafts would seem to be followed by better ones than they are.
            chance = 1.0
            for place, (index, following) in enumerate(pairwise(bins)):
                if place >= accepted:
                    if accepted < verified:
                        break
                    chance *= stood[index] / compared[index]
                weights[index] /= 1 - (1 - TRANSITION_DECAY) * chance
                transition[index][following] += chance * weights[index]
        self._verified, self._accepted, self._first = np.array(compared), np.array(stood), np.array(first) / weight
        self._transition = np.array(transition) / np.array(weights)[:, None]

    def fade(self, weight: float) -> None:
        """Keeps the proportions of first drafts, but lets new observations change them faster."""
        self._count_rounds()
        self._first *= min(1.0, weight / self._first.sum())

    @property
    def is_measured(self) -> bool:
        return self._measured

    @property
    def observed(self) -> bool:
        """Whether it has learned anything since it was created."""
        return self._observed

    def to_json(self) -> dict[str, Any]:
        """Returns the counts as plain values under stable keys; they contain no tokens."""
        self._count_rounds()
        return {
            "seen": self._verified.tolist(),
            "stood": self._accepted.tolist(),
            "follows": self._transition.tolist(),
            "first": self._first.tolist(),
        }

    @classmethod
    def from_json(cls, data: object, max_weight: float = CACHED_WEIGHT) -> Self | None:
        """Reads the result of `to_json`, with a weight of at most `max_weight` observations of each sort; None for anything else."""
        model = cls()
        if not isinstance(data, Mapping):
            return None
        verified, stood, transition, first = (
            _counts(data.get(name), like)
            for name, like in (
                ("seen", model._verified),
                ("stood", model._accepted),
                ("follows", model._transition),
                ("first", model._first),
            )
        )
        if verified is None or stood is None or transition is None or first is None or (stood > verified).any():
            return None
        share = np.minimum(1.0, max_weight / verified)
        model._verified, model._accepted = verified * share, stood * share
        model._transition = transition * np.minimum(1.0, max_weight / transition.sum(axis=1, keepdims=True))
        model._first, model._measured = first, True
        model.fade(max_weight)
        return model


class PositionModel:
    """The model for drafters without a confidence: the bin of a draft is its position. Implements `Acceptance`.

    The estimate for a position is pulled towards that of the position before it, because later positions are rarely or never tried.
    """

    bounds = np.zeros(0)
    is_measured = False

    def __init__(self, prior: float = PRIOR, *, longest: int = MAX_DRAFT_LENGTH) -> None:
        self._verified = np.zeros(longest)
        self._accepted = np.zeros(longest)
        self._verified[:1], self._accepted[:1] = PRIOR_WEIGHT, prior * PRIOR_WEIGHT
        self._prior = prior

    def bin_of(self, confidence: float, position: int) -> int:  # noqa: ARG002
        return position

    def forecast(self, longest: int) -> Forecast:
        """Returns the probabilities that follow from the counts."""
        accept_prob, before = np.empty(len(self._verified)), self._prior
        for position, (verified, stood) in enumerate(zip(self._verified, self._accepted, strict=True)):
            before = accept_prob[position] = (stood + before * NEIGHBOUR_WEIGHT) / (verified + NEIGHBOUR_WEIGHT)
        first = np.zeros(len(accept_prob))
        first[:1] = 1.0
        return _forecast(accept_prob, np.eye(len(accept_prob), k=1), first, longest)

    def observe(self, bins: Sequence[int], verified: int, accepted: int) -> None:
        """Counts drafts up to the first rejection; those after it were not compared."""
        for index, stood in zip(bins[:verified], [1.0] * accepted + [0.0], strict=False):
            self._verified[index] = self._verified[index] * POSITION_DECAY + 1
            self._accepted[index] = self._accepted[index] * POSITION_DECAY + stood

    def fade(self, weight: float) -> None:
        """Limits the first position to `weight` and later ones to one observation, since they are tried last when drafting resumes."""
        for position, verified in enumerate(self._verified):
            share = min(1.0, (1.0 if position else weight) / max(verified, 1e-9))
            self._verified[position] *= share
            self._accepted[position] *= share


def _counts(data: object, like: Chances) -> Chances | None:
    """Returns `data` as positive counts with the shape of `like`; None for anything else."""
    try:
        counts = np.asarray(data, np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    # Fading can produce zeros, by which nothing may be divided.
    return counts + 1e-9 if counts.shape == like.shape and ((counts >= 0) & (counts < 1e6)).all() else None


def _forecast(accept_prob: Chances, transition: Chances, first: Chances, longest: int) -> Forecast:
    # Row n of `chains` is the probability that the next n drafts are all accepted. The sum over n is the expected number of accepted ones.
    chains, onward = np.zeros((longest + 1, len(accept_prob))), transition * accept_prob
    all_accepted = np.ones(len(accept_prob))
    for more in range(1, longest + 1):
        chains[more] = all_accepted = onward @ all_accepted
    further = chains.cumsum(axis=0)
    return Forecast(accept_prob=accept_prob, transition=transition, first=first, further=further)
