"""Which drafted tokens stand: pure functions over one verified round. Knows no model and no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_runtime.backends.base import Logits


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`accepted` drafts stand, in order from the first; `next_token` is the target's own token after them, always there."""

    accepted: int
    next_token: int


def accept_greedy(drafts: Sequence[int], logits: Logits) -> Verdict:
    """Accepts the longest prefix of `drafts` that the target would have chosen itself.

    `logits` are float32 [len(drafts) + 1, vocabulary]; row i predicts the token at draft i's place. Rows after the first
    mismatch are not looked at.
    """
    for position, draft in enumerate(drafts):
        choice = int(logits[position].argmax())
        if choice != draft:
            return Verdict(accepted=position, next_token=choice)
    return Verdict(accepted=len(drafts), next_token=int(logits[len(drafts)].argmax()))
