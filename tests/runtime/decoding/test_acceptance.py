"""Acceptance on hand-written logits and distributions."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.decoding.acceptance import accept_greedy
from edge_runtime.errors import BackendError


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


@pytest.mark.parametrize(
    ("row", "wrong"), [([0.0, float("nan"), 1.0], "hold NaN"), ([0.0, 0.0, 0.0], "are all 0.0"), ([2.0, 2.0], "are all 2.0")]
)
def test_logits_of_a_broken_model_are_refused(row: list[float], wrong: str) -> None:
    with pytest.raises(BackendError, match=wrong):
        accept_greedy([], np.array([row], np.float32))


@pytest.mark.parametrize("row", [[3.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
def test_rows_that_only_look_alike_are_no_error(row: list[float]) -> None:
    assert accept_greedy([], np.array([row], np.float32)).next_token == 0
