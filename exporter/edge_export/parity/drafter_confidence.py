"""What the drafter's confidence is worth, measured at export along text that the target writes itself: where a runtime begins to learn."""

from __future__ import annotations

from typing import Any

from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.policies import CountingPolicy
from edge_runtime.interfaces import Drafter, Target

# Tokens that are written, and tokens of each draft. A few hundred drafts are seen, which takes as long as about 25 forwards of 5 rows.
WRITTEN, DRAFT_LENGTH = 96, 4
ROOM = WRITTEN + DRAFT_LENGTH + 1


class _Learner(CountingPolicy):
    """Drafts always as far, and has a model learn what became of it."""

    def __init__(self) -> None:
        self.model = AcceptanceModel()
        self._kinds: list[int] = []

    def should_continue(self, confidence: float) -> bool:  # type: ignore[override]
        """Takes in how sure the drafter is."""
        self._kinds.append(self.model.kind(confidence, len(self._kinds)))
        return True

    def draft_length(self, requests: int = 1, *, any_prefix: bool = True) -> int:  # noqa: ARG002
        """The same every round."""
        self._kinds = []
        return DRAFT_LENGTH

    def observe(self, drafted: int, accepted: int) -> None:
        """Learns from a round."""
        self.model.observe(self._kinds, drafted, accepted)


def drafter_confidence(target: Target, drafter: Drafter | None, last: int) -> dict[str, Any] | None:
    """Returns the counts of an `AcceptanceModel` after WRITTEN tokens that follow the cache's and `last`, greedily.

    None where there is no room for them, or the drafter says nothing of its confidence.
    """
    if drafter is None or not drafter.stepwise or target.context - target.length < ROOM:
        return None
    learner = _Learner()
    for _ in decode(target, drafter, Decoding(target, last, learner, max_tokens=WRITTEN)):
        pass
    return learner.model.to_json() if learner.model.observed else None
