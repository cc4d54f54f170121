"""How likely drafts are to be accepted: running estimates per draft position, and what the drafter's own confidence is worth.

All counts fade, so that a change of domain shows within some rounds, and start from a prior, so that the first rounds are sensible.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from edge_runtime.bundle import MAX_DRAFT_LENGTH

# Acceptance of a position given that all before it were accepted, before anything was seen: that of a mediocre drafter.
PRIOR = 0.6
# A prior counts as this many observations.
PRIOR_WEIGHT = 2.0
NEIGHBOUR_WEIGHT = 1.0
# Share of an old count that is left after each new observation of the same kind: memories of about 25 and 100 observations.
POSITION_KEPT, CLASS_KEPT = 0.96, 0.99
# Upper ends of the classes of confidence; drafters are mostly sure, so the classes are narrow there.
CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)


class FadingShare:
    """A mean of observations between 0 and 1, of which the old ones fade, the prior among them."""

    def __init__(self, prior: float, weight: float, kept: float) -> None:
        self.weight = weight
        self._sum = prior * weight
        self._kept = kept

    def add(self, observed: float) -> None:
        """Counts one observation."""
        self.weight = self.weight * self._kept + 1.0
        self._sum = self._sum * self._kept + observed

    def fade(self, weight: float) -> None:
        """Lets what was observed count as at most `weight` observations: the mean stays, but new ones move it faster."""
        if self.weight > weight:
            self._sum *= weight / self.weight
            self.weight = weight

    def mean(self, neighbour: float = 0.0, weight: float = 0.0) -> float:
        """The estimate, drawn towards a neighbour's, which counts as `weight` observations."""
        return (self._sum + neighbour * weight) / (self.weight + weight)


class AcceptanceModel:
    """Estimates for one drafter and one target, kept from request to request."""

    def __init__(self, prior: float = PRIOR, *, longest: int = MAX_DRAFT_LENGTH) -> None:
        first = FadingShare(prior, PRIOR_WEIGHT, POSITION_KEPT)
        self._positions = [first, *(FadingShare(prior, 0.0, POSITION_KEPT) for _ in range(1, longest))]
        ends = (0.0, *CONFIDENCES, 1.0)
        middles = [(low + high) / 2 for low, high in pairwise(ends)]
        self._classes = [FadingShare(middle, PRIOR_WEIGHT, CLASS_KEPT) for middle in middles]

    def positions(self) -> list[float]:
        """Probability that each draft is accepted, given that all before it are; nothing is known of the drafts yet.

        Each is drawn towards the one before it, so that the first ones speak for those that are seldom or never tried.
        """
        means = [self._positions[0].mean()]
        for share in self._positions[1:]:
            means.append(share.mean(means[-1], NEIGHBOUR_WEIGHT))
        return means

    def drafted(self, confidence: float) -> float:
        """Probability that a draft is accepted of which the drafter says it is the likeliest with this probability.

        The prior is a calibrated drafter's, which is right as often as it says (Guo et al. 2017, arXiv 1706.04599).
        """
        return self._classes[bisect_right(CONFIDENCES, confidence)].mean()

    def observe(self, drafted: int, accepted: int, confidences: Sequence[float] = ()) -> None:
        """Learns from a round: of `drafted` tokens the first `accepted` stood. What follows the first mismatch was never tried."""
        for index in range(min(accepted + 1, drafted)):
            stood = observed = float(index < accepted)
            if index < len(confidences):
                # What was foreseen of this draft says as much about the next ones as what happened, and varies less.
                observed = (stood + self.drafted(confidences[index])) / 2
                self._classes[bisect_right(CONFIDENCES, confidences[index])].add(stood)
            self._positions[min(index, len(self._positions) - 1)].add(observed)

    def fade(self, first: float, others: float) -> None:
        """Lets old observations of the first position, and of the others, count little: while nothing is drafted they grow old unseen."""
        for index, share in enumerate(self._positions):
            share.fade(others if index else first)
