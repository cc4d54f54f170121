"""How many drafts a text confirms: acceptance of drafts of a fixed length along texts that the target wrote.

Imports torch: import it only where a drafter is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edge_export.tuning.texts import Tokens
from edge_export.tuning.unrolled import Segment, draft_states, greedy_choice, target_rows

RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Drafted and accepted tokens of each text, int64 [texts]."""

    drafted: NDArray[np.int64]
    accepted: NDArray[np.int64]

    @property
    def rate(self) -> float:
        """Accepted / drafted."""
        return float(self.accepted.sum() / self.drafted.sum())


def acceptance(target: Any, drafter: Any, texts: Tokens, *, prompt: int, length: int, batch: int) -> Accepted:
    """Walks rounds of `length` drafts over texts [N, T], after their first `prompt` tokens.

    A round at position n accepts the longest prefix of its drafts that the text confirms, and moves on by that plus one.
    """
    segment = Segment(first=prompt - 1, count=texts.shape[1] - length - prompt + 1, steps=length)
    drafted, accepted = [], []
    for begin in range(0, len(texts), batch):
        for run in _confirmed(target, drafter, torch.from_numpy(texts[begin : begin + batch]), segment):
            at = rounds = confirmed = 0
            while at < segment.count:
                rounds, confirmed, at = rounds + 1, confirmed + int(run[at]), at + int(run[at]) + 1
            drafted.append(rounds * length)
            accepted.append(confirmed)
    return Accepted(drafted=np.array(drafted), accepted=np.array(accepted))


def _confirmed(target: Any, drafter: Any, tokens: Any, segment: Segment) -> Tokens:
    """Returns how many drafts from each position of the segment the text confirms, [N, count]."""
    first, last = segment.first, segment.first + segment.count
    with torch.inference_mode():
        rows = target_rows(target, tokens, segment)
        states = enumerate(draft_states(drafter, rows, segment), start=1)
        right = [greedy_choice(drafter, state) == tokens[:, first + step : last + step] for step, state in states]
        found: Tokens = torch.stack(right).long().cumprod(0).sum(0).numpy()
    return found


def gain(before: Accepted, after: Accepted) -> tuple[float, float]:
    """Returns the 95% interval of the difference of two acceptance rates on the same texts, by bootstrap over texts."""
    chosen = np.random.default_rng(1).integers(len(before.drafted), size=(RESAMPLES, len(before.drafted)))
    rates = [one.accepted[chosen].sum(1) / one.drafted[chosen].sum(1) for one in (after, before)]
    low, high = np.quantile(rates[0] - rates[1], (0.025, 0.975))
    return float(low), float(high)
