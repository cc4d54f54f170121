"""The text that is in a target's cache: what is appended and rolled back, hidden and soft rows. What is refused is the contract's."""

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


def test_tokens_of_rounds_that_nobody_read_between_are_those_that_stayed(text: Text) -> None:
    for token in range(80):  # more than are kept unwritten
        text.length = 4
        text.append(np.array([token % 10, (token + 1) % 10]))
    text.length = 5
    text.append(np.array([3]))
    assert text.tokens.tolist() == [4, 5, 6, 7, 9, 3]
    assert not text._unwritten
