"""Acceptance on hand-written logits and distributions."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.decoding.acceptance import accept_by_match, accept_by_rejection, accept_greedy
from edge_runtime.decoding.distribution import Distribution
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


def test_rows_after_the_first_mismatch_are_not_read():
    class Rows(list):
        def __getitem__(self, index):
            assert index <= 1, "looked past the mismatch"
            return super().__getitem__(index)

    verdict = accept_greedy([1, 2, 3], Rows(rows(1, 0, 3, 4)))  # type: ignore[arg-type]
    assert verdict.accepted == 1


def shares(*values: float) -> Distribution:
    return Distribution.proportional(np.arange(len(values)), np.array(values))


def numbers(*values: float):
    return iter(values).__next__


def test_match_asks_once_per_place_and_not_beyond_the_mismatch():
    asked: list[int] = []

    def sampler(position: int) -> int:
        asked.append(position)
        return [4, 2, 9][position]

    verdict = accept_by_match([4, 3, 9], sampler)
    assert (verdict.accepted, verdict.next_token, asked) == (1, 2, [0, 1])


@pytest.mark.parametrize(
    ("number", "accepted"),
    [(0.0, 1), (0.49, 1), (0.51, 0), (0.99, 0)],  # p = 0.25, q = 0.5
)
def test_a_draft_stands_with_the_ratio_of_the_probabilities(number, accepted):
    p, q = shares(0.25, 0.75), shares(0.5, 0.5)
    assert accept_by_rejection([0], [q], lambda _: p, numbers(number, 0.0)).accepted == accepted


def test_the_first_rejected_draft_is_drawn_again_from_what_is_left():
    p, q = shares(0.2, 0.5, 0.3), shares(0.6, 0.3, 0.1)  # p - q: -0.4, 0.2, 0.2
    drawn = [accept_by_rejection([0], [q], lambda _: p, numbers(0.99, u)).next_token for u in (0.0, 0.49, 0.51, 0.99)]
    assert drawn == [1, 1, 2, 2]


def test_a_draft_the_target_cannot_write_never_stands():
    p, q = shares(0.0, 0.4, 0.6), shares(0.9, 0.1)
    verdict = accept_by_rejection([0], [q], lambda _: p, numbers(0.0, 0.0))
    assert (verdict.accepted, verdict.next_token) == (0, 1)


def test_after_the_last_draft_the_target_has_its_own_say():
    p = shares(0.5, 0.5)
    verdict = accept_by_rejection([0, 1], [p, p], lambda _: p, numbers(0.99, 0.99, 0.7))
    assert (verdict.accepted, verdict.next_token) == (2, 1)


@pytest.mark.parametrize(
    ("row", "wrong"), [([0.0, float("nan"), 1.0], "hold NaN"), ([0.0, 0.0, 0.0], "are all 0.0"), ([2.0, 2.0], "are all 2.0")]
)
def test_logits_of_a_broken_model_are_refused(row: list[float], wrong: str) -> None:
    with pytest.raises(BackendError, match=wrong):
        accept_greedy([], np.array([row], np.float32))


@pytest.mark.parametrize("row", [[3.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
def test_rows_that_only_look_alike_are_no_error(row: list[float]) -> None:
    assert accept_greedy([], np.array([row], np.float32)).next_token == 0
