"""The sparse head against its definition, written out the slow way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.backends import sparse_head
from edge_runtime.backends.head_file import read_head
from edge_runtime.backends.sparse_head import SparseHead
from tiny_head import CENTROIDS, HIDDEN, PER_CENTROID, SIZES, TARGET, TOP, VOCABULARY, head_arrays, head_header, write_head_file


def opened(tmp_path: Path, arrays: dict[str, Any], top: int = TOP) -> SparseHead:
    return SparseHead(read_head(write_head_file(tmp_path / "head", arrays, head_header(arrays, top=str(top))), **SIZES))


def widened(rows: Any) -> Any:
    return (rows.astype(np.uint32) << 16).view(np.float32) if rows.dtype == np.uint16 else rows


def definition(arrays: dict[str, Any], output: Any, top: int = TOP) -> Any:
    """Logits of the whole vocabulary [V], -inf outside the clusters of the best centroids."""
    logits = np.full(VOCABULARY, -np.inf)
    for cluster in np.argsort(-(arrays["centroids"] @ output))[:top]:
        for place in range(PER_CENTROID):
            row = widened(arrays["rows"])[cluster, place].astype(np.float64)
            logits[arrays["token_ordering"][cluster, place]] = row @ output
    return logits


@pytest.mark.parametrize("clusters_per_piece", [1, 2, 5])
@pytest.mark.parametrize("top", [1, 5])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_candidates_and_choice_are_those_of_the_definition(
    tmp_path: Path, bfloat16: bool, top: int, clusters_per_piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = head_arrays(3, bfloat16=bfloat16)
    monkeypatch.setattr(sparse_head, "_PIECE_BYTES", clusters_per_piece * arrays["rows"][0].nbytes)
    head = opened(tmp_path, arrays, top)
    for seed in range(50):
        output = np.random.default_rng(seed).normal(size=HIDDEN).astype(np.float32)
        wanted = definition(arrays, output, top)
        tokens, logits = head.candidates(output)
        assert sorted(tokens) == sorted(np.flatnonzero(np.isfinite(wanted)))
        np.testing.assert_allclose(logits, wanted[tokens], rtol=1e-5, atol=1e-5)
        assert head.best_token(output) == wanted.argmax()


def test_equal_logits_give_the_lowest_id_wherever_it_lies(tmp_path: Path) -> None:
    arrays = head_arrays(4)
    arrays["rows"][:] = 1.0
    head = opened(tmp_path, arrays)
    for seed in range(20):
        output = np.random.default_rng(seed).normal(size=HIDDEN).astype(np.float32)
        assert head.best_token(output) == min(head.candidates(output)[0])


def test_damaged_weights_still_give_a_token(tmp_path: Path) -> None:
    arrays = head_arrays(5)
    arrays["rows"][:] = np.nan
    assert 0 <= opened(tmp_path, arrays).best_token(np.ones(HIDDEN, np.float32)) < VOCABULARY


def test_all_centroids_may_be_looked_into(tmp_path: Path) -> None:
    arrays = head_arrays(6)
    head = opened(tmp_path, arrays, CENTROIDS)
    output = np.ones(HIDDEN, np.float32)
    dense = (arrays["rows"].reshape(VOCABULARY, HIDDEN) @ output)[np.argsort(arrays["token_ordering"].reshape(-1))]
    assert head.best_token(output) == dense.argmax()


def test_linear_ends(tmp_path: Path) -> None:
    arrays = head_arrays(7)
    head = opened(tmp_path, arrays)
    random = np.random.default_rng(8)
    embedding, hidden = (random.normal(size=TARGET).astype(np.float32) for _ in range(2))
    output = random.normal(size=HIDDEN).astype(np.float32)
    carry = head.carry_from_hidden(hidden).copy()
    np.testing.assert_allclose(carry, arrays["hidden_projection"] @ hidden, rtol=1e-5)
    wanted = arrays["embedding_projection"] @ (embedding * TARGET**0.5) + carry
    np.testing.assert_allclose(head.block_input(embedding, carry), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(head.carry_from_output(output), arrays["feedback"] @ output, rtol=1e-5)
