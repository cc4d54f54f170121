"""Prompt lookup: drafts without a model, copied from an earlier occurrence of the newest tokens (Saxena 2023, prompt-lookup-decoding).

It costs nothing and helps where a text repeats itself (code edits, summaries, quotations); elsewhere it drafts nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_runtime.interfaces import DraftSampler, ShouldContinue, Target

# A longer match predicts better; a match of one token predicts too little to pay for verifying the draft.
LONGEST_MATCH = 4
SHORTEST_MATCH = 2


class LookupDrafter:
    """Drafts what followed the most recent earlier occurrence of the newest tokens. Implements `interfaces.Drafter`."""

    stepwise = False  # a copy costs nothing and has no probability

    def __init__(self, target: Target) -> None:
        self._target = target

    def draft(
        self,
        last: int,
        draft_length: int,
        sampler: DraftSampler | None = None,  # noqa: ARG002
        should_continue: ShouldContinue | None = None,  # noqa: ARG002
    ) -> list[int]:
        """Returns `draft_length` tokens, or none if the newest SHORTEST_MATCH tokens do not occur earlier.

        `sampler` is ignored: there are no logits, and a copied token counts as certain. A copy that reaches the end of the text repeats
        itself, so that a loop is drafted as a loop.
        """
        tokens = self._target.tokens
        for length in range(min(LONGEST_MATCH, len(tokens)), SHORTEST_MATCH - 1, -1):
            end = _latest(tokens, last, length)
            if end is not None:
                copy = [*tokens[end:].tolist(), last]
                while len(copy) < draft_length:
                    copy += copy
                return _text_only(copy[:draft_length])
        return []

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


def _text_only(copy: list[int]) -> list[int]:
    """Cuts a copy before the first soft row of an image or sound, whose id is negative and no token."""
    return copy if min(copy) >= 0 else copy[: next(i for i, token in enumerate(copy) if token < 0)]


def _latest(tokens: NDArray[np.int32], last: int, length: int) -> int | None:
    """Returns where the latest earlier occurrence of the newest `length` tokens, of which `last` is the newest, ends in `tokens`."""
    starts = len(tokens) - length + 1
    found = tokens[length - 1 :] == last
    for i, token in enumerate(tokens[starts:]):
        found &= tokens[i : i + starts] == token
    where = np.flatnonzero(found)
    return int(where[-1]) + length if len(where) else None
