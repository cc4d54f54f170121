"""The accuracy of the drafter's confidence, measured at export on text that the target generates: a runtime's first estimate."""

from __future__ import annotations

from typing import Any

from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.policies import RoundPlan, RoundResult
from edge_runtime.interfaces import Drafter, Target

# Tokens to generate, and tokens of each draft. A few hundred drafts take as long as about 25 forwards of 5 rows.
WRITTEN, DRAFT_LENGTH = 96, 4
ROOM = WRITTEN + DRAFT_LENGTH + 1


class _Learner:
    """A policy of one draft length whose rounds train an acceptance model."""

    def __init__(self) -> None:
        self.model = AcceptanceModel()
        self._bins: list[int] = []

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:  # noqa: ARG002
        """Drafts DRAFT_LENGTH tokens and records the drafter's confidence in each."""
        self._bins = []
        return RoundPlan(DRAFT_LENGTH, should_continue=self._record)

    def observe(self, result: RoundResult) -> None:
        """Trains the model on a round."""
        self.model.observe(self._bins, result.verified, result.accepted)

    def _record(self, confidence: float) -> bool:
        self._bins.append(self.model.bin_of(confidence, len(self._bins)))
        return True


def drafter_confidence(target: Target, drafter: Drafter | None, last: int) -> dict[str, Any] | None:
    """Returns the counts of an `AcceptanceModel` after WRITTEN tokens that follow the cache's and `last`, greedily.

    None if there is no room for them, or if the drafter reports no confidence.
    """
    if drafter is None or not drafter.stepwise or target.context - target.length < ROOM:
        return None
    learner = _Learner()
    for _ in decode(target, drafter, Decoding(target, last, learner, max_tokens=WRITTEN)):
        pass
    return learner.model.to_json() if learner.model.observed else None
