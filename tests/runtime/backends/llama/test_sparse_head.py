"""The sparse head against its definition, written out the slow way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")
gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")

from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.backends.llama.mapped_gguf import map_gguf
from edge_runtime.backends.llama.sparse_head import SparseHead, read_head
from edge_runtime.errors import BackendError
from tiny_head import CENTROIDS, HIDDEN, KEYS, PER_CENTROID, SIZES, TARGET, TOP, VOCABULARY, head_arrays, write_head_file, write_tensors

# ggml rounds what it multiplies to the type that goes with the rows' type: to 8 bits per block of 32 beside quantized ones.
TOLERANCE = {"F32": 1e-5, "F16": 1e-5, "BF16": 1e-5, "Q8_0": 0.15, "Q4_0": 0.15}


def table() -> Any:
    return (np.round(8 * np.random.default_rng(9).normal(size=(VOCABULARY, TARGET))) / 8).astype(np.float16)


def opened(tmp_path: Path, arrays: dict[str, Any], top: int = TOP, rows: str = "F16", threads: int = 1) -> SparseHead:
    head = write_head_file(tmp_path / "head", arrays, KEYS | {"drafter_head.top_centroids": top}, rows)
    embedding = write_tensors(tmp_path / "target", {"token_embd.weight": table()}, {}, {})
    found = map_gguf(llama_library(), embedding, ("token_embd.weight",)).tensor("token_embd.weight", (TARGET, VOCABULARY))
    return SparseHead(llama_library(), read_head(llama_library(), head, **SIZES), found, threads)


def outputs(count: int) -> Any:
    """Outputs of the blocks whose values float16 and bfloat16 hold exactly."""
    for seed in range(count):
        yield (np.round(8 * np.random.default_rng(seed).normal(size=HIDDEN)) / 8).astype(np.float32)


def definition(arrays: dict[str, Any], rows: Any, output: Any, top: int = TOP) -> Any:
    """Logits of the whole vocabulary [V], -inf outside the clusters of the best centroids."""
    logits = np.full(VOCABULARY, -np.inf)
    for cluster in np.argsort(-(arrays["centroids"].astype(np.float64) @ output))[:top]:
        for place in range(PER_CENTROID):
            logits[arrays["token_ordering"][cluster, place]] = rows[cluster, place].astype(np.float64) @ output
    return logits


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("top", [1, 5])
@pytest.mark.parametrize("rows", list(TOLERANCE))
def test_candidates_and_choice_are_those_of_the_definition(tmp_path: Path, rows: str, top: int, threads: int) -> None:
    arrays = head_arrays(3)
    kind = gguf.GGMLQuantizationType[rows]
    stored = gguf.quants.dequantize(gguf.quants.quantize(arrays["rows"].astype(np.float32), kind), kind)
    head = opened(tmp_path, arrays, top, rows, threads)
    for output in outputs(50):
        wanted = definition(arrays, stored, output, top)
        head.feed(output)
        tokens, logits = head.candidates()
        assert sorted(tokens) == sorted(np.flatnonzero(np.isfinite(wanted)))
        np.testing.assert_allclose(logits, wanted[tokens], rtol=1e-5, atol=TOLERANCE[rows])
        assert wanted.max() - wanted[head.best_token()] <= 2 * TOLERANCE[rows]
    head.close()


def test_equal_logits_give_the_lowest_id_wherever_it_lies(tmp_path: Path) -> None:
    arrays = head_arrays(4)
    arrays["rows"][:] = 1.0
    head = opened(tmp_path, arrays)
    for output in outputs(20):
        head.feed(output)
        assert head.best_token() == min(head.candidates()[0])


@pytest.mark.parametrize("name", ["rows", "centroids"])
def test_damaged_weights_still_give_a_token(tmp_path: Path, name: str) -> None:
    arrays = head_arrays(5)
    arrays[name][:] = np.nan
    head = opened(tmp_path, arrays)
    head.feed(np.ones(HIDDEN, np.float32))
    assert len(set(head.candidates()[0].tolist())) == TOP * PER_CENTROID
    assert 0 <= head.best_token() < VOCABULARY


def test_all_centroids_may_be_looked_into(tmp_path: Path) -> None:
    arrays = head_arrays(6)
    head = opened(tmp_path, arrays, CENTROIDS)
    output = np.ones(HIDDEN, np.float32)
    dense = (arrays["rows"].reshape(VOCABULARY, HIDDEN).astype(np.float32) @ output)[np.argsort(arrays["token_ordering"].reshape(-1))]
    head.feed(output)
    assert head.best_token() == dense.argmax()


def test_linear_ends(tmp_path: Path) -> None:
    arrays = head_arrays(7)
    head = opened(tmp_path, arrays)
    matrices = {name: arrays[name].astype(np.float64) for name in ("hidden_projection", "embedding_projection", "feedback")}
    hidden = (np.round(8 * np.random.default_rng(8).normal(size=TARGET)) / 8).astype(np.float32)
    output = next(outputs(1))
    carry = head.first_carry(hidden).copy()
    np.testing.assert_allclose(carry, matrices["hidden_projection"] @ hidden, rtol=1e-5)
    for token in (0, 7, VOCABULARY - 1):
        wanted = matrices["embedding_projection"] @ (table()[token].astype(np.float64) * TARGET**0.5) + carry
        np.testing.assert_allclose(head.block_input(token, carry), wanted, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(head.feed(output), matrices["feedback"] @ output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_row_that_is_not_there_is_never_read(tmp_path: Path, token: int) -> None:
    with pytest.raises(BackendError, match=f"token id {token} is not one of {VOCABULARY}"):
        opened(tmp_path, head_arrays()).block_input(token, np.zeros(HIDDEN, np.float32))
