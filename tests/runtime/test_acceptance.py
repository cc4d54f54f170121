"""Greedy acceptance on hand-written logits."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.acceptance import accept_greedy


def rows(*choices: int) -> np.ndarray:
    logits = np.full((len(choices), 5), -1.0, dtype=np.float32)
    logits[np.arange(len(choices)), choices] = 2.0
    return logits


@pytest.mark.parametrize(
    ("drafts", "choices", "accepted", "following"),
    [([], [3], 0, 3), ([1], [1, 4], 1, 4), ([1], [2, 4], 0, 2), ([1, 2, 3], [1, 2, 3, 0], 3, 0), ([1, 2, 3], [1, 0, 3, 4], 1, 0)],
)
def test_longest_prefix_and_the_targets_own_token(drafts, choices, accepted, following):
    verdict = accept_greedy(drafts, rows(*choices))
    assert (verdict.accepted, verdict.next_token) == (accepted, following)


def test_rows_after_the_first_mismatch_are_not_read():
    class Rows(list):
        def __getitem__(self, index):
            assert index <= 1, "looked past the mismatch"
            return super().__getitem__(index)

    verdict = accept_greedy([1, 2, 3], Rows(rows(1, 0, 3, 4)))  # type: ignore[arg-type]
    assert verdict.accepted == 1
