"""The text that is in a target's cache: what is appended and rolled back, hidden rows, and arguments that are refused."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.backends.committed_tokens import CommittedText
from edge_runtime.errors import RequestError


class Vocabulary:
    size = 10

    def check(self, token: int) -> None:
        raise RequestError(f"token {token} is not in the vocabulary")


class Text(CommittedText):
    rollback_floor = 3  # type: ignore[assignment]
    open = True

    def require_open(self) -> None:
        if not self.open:
            raise RequestError("closed")


@pytest.fixture
def text() -> Text:
    result = Text(8, Vocabulary(), 2)  # type: ignore[arg-type]
    result.append(np.array([4, 5, 6, 7]))
    return result


def test_tokens_are_appended_and_forgotten(text: Text) -> None:
    assert text.tokens.tolist() == [4, 5, 6, 7]
    text.length = 3
    text.append(np.array([9]))
    assert (text.length, text.tokens.tolist()) == (4, [4, 5, 6, 9])


@pytest.mark.parametrize("length", [0, 3, 4])
def test_the_cache_can_go_back_to_what_it_holds(text: Text, length: int) -> None:
    text.check_rollback(length)


@pytest.mark.parametrize(
    ("length", "output"), [(-1, "holds 4 rows"), (5, "holds 4 rows"), (2, "back 2 rows to 2: older"), (1, "back 3 rows to 1: older")]
)
def test_other_lengths_are_refused(text: Text, length: int, output: str) -> None:
    with pytest.raises(RequestError, match=output):
        text.check_rollback(length)


def test_hidden_rows_belong_to_the_newest_tokens(text: Text) -> None:
    rows = np.array([[1.0], [2.0]], np.float32)
    text.take_hidden(rows)
    for length, expected in ((4, 2.0), (3, 1.0), (2, None), (5, None)):
        text.length = length
        row = text.hidden_row
        assert (None if row is None else row[0]) == expected
    text.length = 4
    text.forget_hidden()
    assert text.hidden_row is None


@pytest.mark.parametrize("length", [0, 1])
def test_a_text_without_a_forward_has_no_hidden_row(length: int) -> None:
    fresh = Text(8, Vocabulary(), 2)  # type: ignore[arg-type]
    fresh.append(np.array([4] * length, np.int64))
    assert fresh.hidden_row is None
    fresh.take_hidden(np.ones((1, 1), np.float32))
    fresh.forget_hidden()
    assert fresh.hidden_row is None


def test_ids_fit_the_vocabulary_and_the_context(text: Text) -> None:
    assert text.checked([0, 9, 1, 2]).tolist() == [0, 9, 1, 2]
    for tokens, output in (
        ([], "give at least one"),
        ([1] * 5, r"4 \+ 5 tokens exceed the context of 8"),
        ([3, -1], "token -1"),
        ([3, 10], "token 10"),
        ([0, 10], "token 10"),
    ):
        with pytest.raises(RequestError, match=output):
            text.checked(tokens)


def soft_rows(count: int) -> NDArray[np.float32]:
    return np.zeros((count, 2), np.float32)


def test_soft_rows_have_negative_ids(text: Text) -> None:
    minimum = int(np.iinfo(np.int32).min)
    assert text.checked_soft([-1, -5, minimum, -2], soft_rows(4)).tolist() == [-1, -5, minimum, -2]
    for ids, output in (
        ([], "at least one id"),
        ([-1, 0], "all negative"),
        ([minimum - 1], "all negative"),
        ([-1] * 5, r"4 \+ 5 rows exceed"),
    ):
        with pytest.raises(RequestError, match=output):
            text.checked_soft(ids, soft_rows(len(ids)))
    for shape in ((1, 2), (2, 3), (2,)):
        with pytest.raises(RequestError, match="soft rows have the shape"):
            text.checked_soft([-1, -2], np.zeros(shape, np.float32))


def test_verifies_are_limited_and_a_closed_target_says_so(text: Text) -> None:
    text.check_rows(3, 3)
    with pytest.raises(RequestError, match="4 rows are too many"):
        text.check_rows(4, 3)
    text.open = False
    for call in (lambda: text.checked([1]), lambda: text.checked_soft([-1], soft_rows(1)), lambda: text.check_rollback(0)):
        with pytest.raises(RequestError, match="closed"):
            call()


def test_tokens_of_rounds_that_nobody_read_between_are_those_that_stayed(text: Text) -> None:
    for token in range(80):  # more than are kept unwritten
        text.length = 4
        text.append(np.array([token % 10, (token + 1) % 10]))
    text.length = 5
    text.append(np.array([3]))
    assert text.tokens.tolist() == [4, 5, 6, 7, 9, 3]
    assert not text._unwritten
