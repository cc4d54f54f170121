"""What a constraint does to drafts: acceptance rules on masked logits.

A masked target is another model, one that writes only valid text; the guarantees of the rules hold for it too. So the output with drafts
equals constrained plain decoding, token for token or in distribution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_runtime.decoding.acceptance import LogitRows, VerifyResult, accept_by_match
from edge_runtime.decoding.acceptance_rules import GREEDY, AcceptanceRule
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import DraftSampler, Logits
from edge_runtime.text.grammar import Constraint

_NEVER = np.float32(-np.inf)


def constrained(rule: AcceptanceRule, constraint: Constraint) -> AcceptanceRule:
    """Returns `rule` on masked logits. Every emitted token must be passed to `constraint.advance` before the next round."""
    return ConstrainedGreedyRule(constraint) if rule is GREEDY else ConstrainedSampledRule(rule, constraint)


class _ConstrainedRule(ABC):
    """Drafts are valid by construction where the drafter calls `sampler`, and cut where it does not."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._drawn: list[int] = []

    @property
    def sampler(self) -> DraftSampler | None:
        """Picks a valid draft; ends drafting where the drafter has no valid candidate."""
        return self._choose

    def cut(self, drafts: list[int]) -> list[int]:
        """Returns the drafts before the first invalid one; drafts that were picked are valid."""
        picked, self._drawn = len(self._drawn), []
        return drafts if len(drafts) == picked else drafts[: max(picked, self._constraint.valid(drafts))]

    def _choose(self, logits: Logits, tokens: NDArray[np.integer] | None = None) -> int | None:
        if self._constraint.closed(self._drawn):
            return None
        token = self._pick(logits, tokens)
        if token is not None:
            self._drawn.append(token)
        return token

    @abstractmethod
    def _pick(self, logits: Logits, tokens: NDArray[np.integer] | None) -> int | None:
        """Returns a valid draft, or None if there is no valid candidate."""

    def _masked(self, row: Logits, ahead: Sequence[int], tokens: NDArray[np.integer] | None = None) -> Logits:
        allowed = self._constraint.allowed(ahead)
        return np.where(allowed if tokens is None else allowed[tokens], row, _NEVER)


class ConstrainedGreedyRule(_ConstrainedRule):
    """Always the target's likeliest valid token. Masks a row only where the likeliest token is not valid."""

    any_prefix = True

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """Accepts the longest prefix that the target would have chosen itself. Raises RequestError if no token is valid."""
        return accept_by_match(drafts, lambda position: self._target(drafts[:position], logits[position]))

    def _target(self, ahead: Sequence[int], row: Logits) -> int:
        token = self._likeliest(row, None, ahead)
        if token is None:
            raise RequestError("the model gives no finite logit to any token that the grammar allows; check the model")
        return token

    def _pick(self, logits: Logits, tokens: NDArray[np.integer] | None) -> int | None:
        return self._likeliest(logits, tokens, self._drawn)

    def _likeliest(self, row: Logits, tokens: NDArray[np.integer] | None, ahead: Sequence[int]) -> int | None:
        best = int(row.argmax())
        token = best if tokens is None else int(tokens[best])
        if self._constraint.allows(ahead, token):
            return token
        masked = self._masked(row, ahead, tokens)
        best = int(masked.argmax())
        if not masked[best] > _NEVER:  # also true for NaN
            return None
        return best if tokens is None else int(tokens[best])


class ConstrainedSampledRule(_ConstrainedRule):
    """A sampled rule on masked logits: options such as top-k and top-p count valid tokens only."""

    def __init__(self, rule: AcceptanceRule, constraint: Constraint) -> None:
        super().__init__(constraint)
        self._rule = rule
        self.any_prefix = rule.any_prefix

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
        """As the other rule; rows are masked when they are read."""
        return self._rule.accept(drafts, _MaskedRows(self, drafts, logits))

    def _pick(self, logits: Logits, tokens: NDArray[np.integer] | None) -> int | None:
        masked = self._masked(logits, self._drawn, tokens)
        best = int(masked.argmax())
        if not masked[best] > _NEVER:
            return None
        assert self._rule.sampler is not None, "a sampled rule draws its drafts"
        token = self._rule.sampler(masked, tokens)
        # A bias may have banned every token that the constraint allows.
        return token if token is not None and self._constraint.allowed(self._drawn)[token] else None


@dataclass(frozen=True)
class _MaskedRows:
    """The target's logits after `drafts`, each row masked when it is read."""

    rule: ConstrainedSampledRule
    drafts: Sequence[int]
    logits: LogitRows

    def __getitem__(self, position: int) -> Logits:
        return self.rule._masked(self.logits[position], self.drafts[:position])
