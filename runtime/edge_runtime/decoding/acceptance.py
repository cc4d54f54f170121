"""Which drafts of a verified round are accepted: pure functions, independent of models and caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from edge_runtime.decoding.distribution import Distribution
from edge_runtime.errors import BackendError
from edge_runtime.interfaces import Logits


class LogitRows(Protocol):
    """The target's logits at the places of a round; an array [rows, vocabulary] is one."""

    def __getitem__(self, position: int, /) -> Logits:
        """Returns float32 [vocabulary]."""


class VerifyResult(NamedTuple):
    """`accepted` is the number of accepted drafts, from the first on; `next_token` is the target's own token after them."""

    accepted: int
    next_token: int


def accept_greedy(drafts: Sequence[int], logits: LogitRows) -> VerifyResult:
    """Accepts the longest prefix of `drafts` that the target would have chosen itself.

    `logits` are float32 [len(drafts) + 1, vocabulary]; row i predicts the token at the position of draft i. Rows after the first
    mismatch are not read.
    """
    return accept_by_match(drafts, lambda position: likeliest(logits[position]))


def likeliest(row: Logits) -> int:
    """Returns the index of the largest logit of a row [vocabulary].

    Raises BackendError for a row with NaN, which argmax returns first, and for one of equal logits: llama.cpp's own kernels round NaN to 0.
    """
    best = int(row.argmax())
    wrong = ""
    if math.isnan(row[best]):
        wrong = f"hold NaN (first at token {best})"
    elif best == 0 and len(row) > 1 and row[-1] == row[0] and (row == row[0]).all():
        wrong = f"are all {row[0]}"
    if wrong:
        raise BackendError(f"the target's logits {wrong}; model or backend is broken: check the files with edge-run plan --check full")
    return best


def accept_by_match(drafts: Sequence[int], sampler: Callable[[int], int]) -> VerifyResult:
    """Accepts drafts as long as they equal the target's choices; `sampler(i)` is called once per position, in order.

    All emitted tokens are the target's own choices: drafts change only how many of them one forward yields. `sampler` is not called after
    the first mismatch.
    """
    for position, draft in enumerate(drafts):
        choice = sampler(position)
        if choice != draft:
            return VerifyResult(accepted=position, next_token=choice)
    return VerifyResult(accepted=len(drafts), next_token=sampler(len(drafts)))


def accept_by_block(
    drafts: Sequence[int], proposed: Sequence[Distribution], target: Callable[[int], Distribution], random: Callable[[], float]
) -> VerifyResult:
    """Speculative sampling that judges a draft as a whole. Draft i must have been drawn from `proposed[i]`.

    `target(i)` is the target's distribution at draft i, and is read at all places; `random` returns uniform numbers in [0, 1). On average
    at least as many drafts are accepted as by judging them one by one (arXiv 2211.17192, algorithm 1), because a likely token after an
    unlikely one saves both. What counts for the first i drafts is s_i = min(1, s_{i-1} p_i(x_i) / q_i(x_i)). The longest prefix that passes
    is accepted, the last one with probability s_n, a shorter one of i drafts with probability w_i / (w_i + 1 - s_i). There w_i is the sum
    of max(s_i p_{i+1} - q_{i+1}, 0), from which the next token is drawn. The length may depend on the drafts themselves. Source: Sun et
    al. 2024 (arXiv 2403.10444), algorithm 2.
    """
    rows, shares = [], [1.0]
    for position, draft in enumerate(drafts):
        rows.append(target(position))
        shares.append(min(1.0, shares[-1] * rows[-1].of(draft) / proposed[position].of(draft)))
        if not shares[-1]:  # nor can any longer prefix pass
            break
    for accepted in range(len(shares) - 1, -1, -1):
        share = shares[accepted]
        if accepted == len(drafts):
            if random() < share:
                return VerifyResult(accepted=accepted, next_token=target(accepted).draw(random()))
        elif share:
            left = rows[accepted].excess(proposed[accepted], share)
            weight = float(left.sum())
            # Only the whole share of 1 is sure to pass: with nothing left, target and drafter agree up to rounding.
            if share == 1.0 or random() * (weight + 1 - share) < weight:
                return VerifyResult(accepted=accepted, next_token=rows[accepted].proportional_to(left).draw(random()))
    raise AssertionError("the empty prefix always passes")
