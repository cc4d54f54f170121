"""Prompt lookup: drafts without a model, copied from where the newest tokens stood before (Saxena 2023, prompt-lookup-decoding).

Free of cost where a text repeats itself (code edits, summaries, quotations), useless where it does not: then it drafts nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_runtime.interfaces import DraftSampler, ShouldContinue, Target

# A longer match says more about what follows; one token alone says too little to pay for verifying the draft.
LONGEST_MATCH = 4
SHORTEST_MATCH = 2


class LookupDrafter:
    """Drafts what followed the most recent earlier occurrence of the newest tokens. Implements `interfaces.Drafter`."""

    stepwise = False  # a copy costs nothing, and has no probability

    def __init__(self, target: Target) -> None:
        self._target = target

    def draft(
        self,
        last: int,
        draft_length: int,
        sampler: DraftSampler | None = None,  # noqa: ARG002
        should_continue: ShouldContinue | None = None,  # noqa: ARG002
    ) -> list[int]:
        """Returns `draft_length` tokens, or none where the newest SHORTEST_MATCH tokens are new to the text.

        There are no logits for `sampler` to pick from: what is copied counts as certain. Where the copy reaches the end of the text it goes on with itself, so that a loop is drafted as a loop.
        """
        tokens = self._target.tokens
        for length in range(min(LONGEST_MATCH, len(tokens)), SHORTEST_MATCH - 1, -1):
            end = _latest(tokens, last, length)
            if end is not None:
                copy = [*tokens[end:].tolist(), last]
                while len(copy) < draft_length:
                    copy += copy
                return copy[:draft_length]
        return []

    def close(self) -> None:
        """There is nothing to free."""


def _latest(tokens: NDArray[np.int32], last: int, length: int) -> int | None:
    """Returns where the latest earlier occurrence of the newest `length` tokens, of which `last` is the newest, ends in `tokens`."""
    starts = len(tokens) - length + 1
    found = tokens[length - 1 :] == last
    for i, token in enumerate(tokens[starts:]):
        found &= tokens[i : i + starts] == token
    where = np.flatnonzero(found)
    return int(where[-1]) + length if len(where) else None
