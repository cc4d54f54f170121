"""Rows that nobody reads are not computed by the row kernels; what follows has the bits of computing all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kept import shipped_bundle

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.llama.context import Batch, LlamaOptions
from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.backends.llama.target import LlamaSequence, LlamaTarget, Rows
from edge_runtime.bundle.gguf_header import KvType
from edge_runtime.interfaces import KvRows
from row_calls import unread_rows

pytestmark = pytest.mark.skipif(llama_library().row_kernels is None, reason=f"stock kernels run: {llama_library().stock_reason}")
CHUNK = 64
# Of the shipped target 4 of 8 layers read K/V of earlier ones. Products of such a layer: Q and attention's output, gate, up and down, and
# two of per-layer embeddings. The last owner of K/V has them too. Of the last layer llama.cpp itself leaves out all behind the first two.
PRODUCTS = 7 * 4 + 2


def options(**changes: Any) -> LlamaOptions:
    return LlamaOptions(**{"context": 1024, "threads": 1, "batch": CHUNK, "max_draft_length": 12, **changes})


@pytest.fixture(scope="module")
def path() -> Path:
    pytest.importorskip("gguf", reason="needs edge-mtp[export]")
    return next(shipped_bundle().glob("target-*.gguf"))


def tokens_of(target: LlamaTarget, count: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(8, target.vocabulary.size, count).tolist()
    return drawn


@contextmanager
def left_out() -> Iterator[list[int]]:
    """Collects by how much the rows of products that were not computed grew."""
    before, grown = unread_rows(), []
    yield grown
    grown.append(unread_rows() - before)


def assert_same_rows(rows: KvRows, expected: KvRows) -> None:
    assert np.array_equal(rows.full, expected.full)
    assert np.array_equal(rows.sliding, expected.sliding)


def append_all(sequence: LlamaSequence, tokens: Sequence[int]) -> None:
    """Appends tokens by verifies, which compute every row."""
    with left_out() as grown:
        for first in range(0, len(tokens), sequence.max_rows):
            sequence.verify(tokens[first : first + sequence.max_rows])
    assert grown == [0]


@pytest.mark.parametrize(("kv_type", "draft"), [("f16", False), ("f16", True), ("q8_0", False), ("q4_0", True)])
def test_prompts_of_every_length_leave_what_all_rows_leave(path: Path, kv_type: KvType, *, draft: bool) -> None:
    """Beyond the sliding window, whose cells are written anew."""
    with LlamaTarget(path, options(kv_type=kv_type, draft=draft)) as target:
        text = tokens_of(target, 405)
        for count in (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 400):
            after = text[count : count + 5]
            target.rollback(0)
            append_all(target, text[:count])
            hidden = target.hidden_row.copy() if target.hidden_row is not None else None
            state, logits = target.state(), target.verify(after).copy()
            target.rollback(0)
            with left_out() as grown:
                target.prefill(text[:count])
            assert grown[0] >= (count - draft) * PRODUCTS
            assert (hidden is None) is not draft
            if hidden is not None:
                assert np.array_equal(target.hidden_row, hidden)
            assert_same_rows(target.state(), state)
            assert np.array_equal(target.verify(after), logits), count


@pytest.mark.parametrize(
    ("quantization", "seed"), [("q4_0", 0), ("q4_0", 1), ("q4_0", 2), ("q4_0", 3), ("q4_0", 4), ("bf16", 0), ("bf16", 3)]
)
def test_random_members_leave_what_all_rows_leave(seed: int, quantization: str) -> None:
    """Shapes of E2B, E4B, 12B, 26B-A4B and 31B; those that share no K/V have unread rows in the last layer alone.

    Weights of float16 would lie in a buffer of llama.cpp's own kernels on a processor with AMX.
    """
    pytest.importorskip("torch", reason="needs edge-mtp[verify]")
    from random_pairs import kept_bundle

    _, bundle = kept_bundle(seed, target_quantization=quantization)
    with LlamaTarget(next(bundle.glob("target-*.gguf")), options()) as target:
        text = tokens_of(target, 400)
        append_all(target, text[:300])
        state, logits = target.state(), target.verify(text[300:305]).copy()
        target.rollback(0)
        with left_out() as grown:
            target.prefill(text[:300])
        assert grown[0] >= 299 * 2
        assert_same_rows(target.state(), state)
        assert np.array_equal(target.verify(text[300:305]), logits)


def test_rows_are_named_for_each_batch_of_several_requests(path: Path) -> None:
    """Prompts and verifies share batches. Two batches of the same sizes have the same graph, but other rows are read."""
    sizes = [
        ((20, 1), (5, 5), (7, 0), (3, 3)),
        ((5, 5), (20, 1), (7, 0), (3, 3)),
        ((1, 0), (3, 1), (12, 12), (30, 0)),
        ((2, 2), (2, 1), (2, 2), (2, 0)),
        ((4, 0), (1, 0), (9, 0), (1, 1)),
    ]
    result: dict[int, list[NDArray[np.float32]]] = {number: [] for number in range(4)}
    with LlamaTarget(path, options(sequences=4)) as target:
        texts = [tokens_of(target, 100, seed) for seed in range(4)]
        sequences = target.shared.sequences
        for batch in sizes:
            rows = [
                Rows(sequence=item, ids=np.asarray(texts[item.number][item.length :][:count], np.int64), flagged=flagged)
                for item, (count, flagged) in zip(sequences, batch, strict=True)
            ]
            with left_out() as grown:
                target.shared.forward(rows)
            assert grown == [sum(count - flagged for count, flagged in batch) * PRODUCTS]
            hidden = [item.hidden_row for item in sequences]
            for item, (_, flagged) in zip(sequences, batch, strict=True):
                if flagged:
                    row = hidden[item.number]
                    assert row is not None
                    result[item.number].append(row.copy())
        lengths = [item.length for item in sequences]
        logits = [item.verify(texts[item.number][item.length :][:4]).copy() for item in sequences]
    for number, text in enumerate(texts):
        with LlamaTarget(path, options()) as alone:
            position, expected = 0, []
            for batch in sizes:
                count, flagged = batch[number]
                append_all(alone, text[position : position + count])
                position += count
                if flagged and alone.hidden_row is not None:
                    expected.append(alone.hidden_row.copy())
            assert position == lengths[number]
            assert all(np.array_equal(*pair) for pair in zip(expected, result[number], strict=True))
            assert np.array_equal(alone.verify(text[position : position + 4]), logits[number])


@pytest.mark.parametrize("whole", [False, True])
def test_soft_rows_leave_what_all_rows_leave(path: Path, monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> None:
    with LlamaTarget(path, options(bidirectional=whole)) as target:
        text = tokens_of(target, 60)
        rows = np.random.default_rng(7).standard_normal((13, target.hidden_size)).astype(np.float32)

        def appended() -> tuple[KvRows, NDArray[np.float32]]:
            target.rollback(0)
            target.prefill(text[:40])
            target.prefill_rows([-1] * len(rows), rows, whole=whole)
            target.prefill(text[40:50])
            return target.state(), target.verify(text[50:55]).copy()

        with left_out() as grown:
            state, logits = appended()
        assert grown == [(39 + 13 + 9) * PRODUCTS]
        add_rows = Batch.add_rows

        def add_read_rows(batch: Batch, *arguments: Any) -> None:
            add_rows(batch, *arguments)
            batch._flags[: len(rows)] = 1

        monkeypatch.setattr(Batch, "add_rows", add_read_rows)
        with left_out() as grown:
            all_state, all_logits = appended()
        assert grown == [(39 + 9) * PRODUCTS]
        assert_same_rows(state, all_state)
        assert np.array_equal(logits, all_logits)


def test_threads_plan_graphs_of_their_own(path: Path) -> None:
    def prefilled(seed: int) -> NDArray[np.float32]:
        with LlamaTarget(path, options(threads=1)) as target:
            text = tokens_of(target, 300, seed)
            for _ in range(3):
                target.rollback(0)
                target.prefill(text[:290])
            return target.verify(text[290:]).copy()

    expected = [prefilled(seed) for seed in range(4)]
    with left_out() as grown, ThreadPoolExecutor(4) as pool:
        together = list(pool.map(prefilled, range(4)))
    assert grown == [4 * 3 * 289 * PRODUCTS]
    assert all(np.array_equal(*pair) for pair in zip(expected, together, strict=True))
