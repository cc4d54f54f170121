"""What one form of a model keeps of another's answers, row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_runtime.decoding.quality import (
    KINDS,
    SKIPPED_ROWS,
    RowFigures,
    held_out_text,
    joined,
    read_reference,
    row_figures,
    write_reference,
)
from edge_runtime.errors import RequestError


def test_figures_are_of_the_rows_behind_the_first() -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(5, size=40).tolist()
    reference = random.normal(size=(40, 5)).astype(np.float32)
    same = row_figures(reference, [reference], tokens).quality
    assert (same.rows, same.mean_kl, same.greedy_agreement) == (40 - SKIPPED_ROWS - 1, 0.0, 1.0)
    assert same.perplexity == same.reference_perplexity
    export = reference.copy()
    export[:SKIPPED_ROWS] = export[-1:] = random.normal(size=5)
    assert row_figures(reference, [export[:7], export[7:]], tokens).quality == same, "pieces of any size"
    following = np.exp(reference[np.arange(8, 39), tokens[9:]]) / np.exp(reference[8:39]).sum(1)
    assert same.perplexity == pytest.approx(float(np.exp(-np.log(following).mean())), rel=1e-5)
    export[20] = np.nan
    assert row_figures(reference, [export], tokens).quality.mean_kl == float("inf")


def test_all_rows_of_several_texts_count_alike() -> None:
    def rows(count: int, kl: float, surprise: float, agreed: int) -> RowFigures:
        agrees = tuple(row < agreed for row in range(count))
        return RowFigures(kl=(kl,) * count, surprise=(surprise,) * count, reference_surprise=(2.0,) * count, agrees=agrees)

    both = joined({"english": rows(100, 0.1, 1.0, 90), "code": rows(300, 0.5, 3.0, 150)})
    assert (both.quality.rows, both.quality.mean_kl, both.quality.greedy_agreement) == (400, pytest.approx(0.4), pytest.approx(0.6))
    assert both.quality.perplexity == pytest.approx(np.exp(0.25 + 3 * 0.75))
    assert both.kl_error == pytest.approx(np.sqrt(3) / 10 / 20), "the deviation of a quarter at 0.1 and the rest at 0.5, over 400 rows"


def test_a_reference_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).normal(size=(3, 7)).astype(np.float32)
    write_reference(tmp_path, "code", [5, 6, 7], [rows[:2], rows[2:]])
    text = read_reference(tmp_path, "code")
    assert text.tokens == (5, 6, 7)
    assert np.array_equal(text.logits, rows)


def test_a_folder_without_room_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot be kept in .* \(No such file or directory\); choose another temporary folder"):
        write_reference(tmp_path / "missing", "code", [1], [])


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_long_enough(kind: str) -> None:
    assert len(held_out_text(kind)) > 5000
