"""Whether drafts can change greedy text is compared on the machine, kept, and said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_devices.files.user_cache import CACHE_VARIABLE
from edge_runtime.session import row_equality
from edge_runtime.session.open import open_session
from edge_runtime.session.row_equality import RowEquality, compare_rows, known_row_equality


class Target:
    """Rows of a batch of a size in `other` are moved by a thousandth."""

    def __init__(self, context: int, other: tuple[int, ...] = ()) -> None:
        self.context, self.length, self.other, self.forwards = context, 0, other, 0

    def rollback(self, length: int) -> None:
        self.length = length

    def prefill(self, tokens: list[int]) -> None:
        assert self.length + len(tokens) <= self.context
        self.length += len(tokens)

    def verify(self, tokens: list[int]) -> NDArray[np.float32]:
        self.forwards += 1
        rows = np.arange(self.length, self.length + len(tokens), dtype=np.float32)[:, None] * np.ones(5, np.float32)
        assert rows[-1, 0] < self.context
        self.length += len(tokens)
        return rows + np.float32(1 / 1024) * (len(tokens) in self.other)


@pytest.mark.parametrize(("context", "longest"), [(16, 13), (64, 1), (4096, 13), (400, 5)])
def test_rows_of_every_width_are_compared_within_any_context(context: int, longest: int) -> None:
    target = Target(context)
    equality = compare_rows(target, longest)  # type: ignore[arg-type]
    assert (equality.exact, equality.different, target.length) == (True, 0, 0)
    assert equality.compared >= min(longest, 4)


@pytest.mark.parametrize("width", [1, 4, 8])
def test_rows_that_depend_on_their_number_are_found(width: int) -> None:
    equality = compare_rows(Target(1000, (width,)), 13)  # type: ignore[arg-type]
    assert not equality.exact
    assert equality.largest == 1 / 1024
    assert "drafts may change near ties here" in equality.sentence()


def test_the_result_is_kept_for_the_session_s_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    target = Target(1000)
    first = known_row_equality("files, code, processor", target, 13, print)  # type: ignore[arg-type]
    forwards = target.forwards
    assert known_row_equality("files, code, processor", target, 13, print) == first  # type: ignore[arg-type]
    assert target.forwards == forwards
    known_row_equality("others", target, 13, print)  # type: ignore[arg-type]
    assert target.forwards > forwards


def test_a_damaged_result_is_refused() -> None:
    for values in ((3, 4, 0.0), (3, -1, 0.0), (3, 1, float("nan"))):
        with pytest.raises(ValueError, match="rows differ"):
            RowEquality(compared=values[0], different=values[1], largest=values[2])


def test_a_session_says_it_and_goes_on(exported_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_session(exported_pair, threads=1) as session:
        before = session.generate("abc", max_tokens=8).text()
        assert session.row_equality().compared > 0
        monkeypatch.setattr(row_equality, "compare_rows", lambda *_: pytest.fail("it is known"))
        session.row_equality()
        assert session.generate("abc", max_tokens=8).text() == before
