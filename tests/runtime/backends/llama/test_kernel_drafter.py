"""The kernels' drafter on llama.cpp's cells: the drafts of llama.cpp's own drafter, of one sequence and of several, and its fallback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="needs edge-mtp[llama]")

from edge_runtime.backends.kernels import ggml
from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.drafter import LlamaDrafter
from edge_runtime.backends.llama.kernel_drafter import LlamaKernelDrafter
from edge_runtime.backends.llama.loader import llama_library
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import DraftRequest

if llama_library().row_kernels is None:
    pytest.skip("the row kernels do not run here", allow_module_level=True)


def options(**changes: Any) -> LlamaOptions:
    return LlamaOptions(**{"context": 1024, "threads": 1, "batch": 64, **changes})


def kernel_drafter(pair: Any, target: LlamaTarget, *, sparse: bool = False) -> LlamaKernelDrafter:
    return LlamaKernelDrafter(pair.drafter, pair.head if sparse else None, target, pair.target)


def text(target: LlamaTarget, count: int) -> list[int]:
    return target.vocabulary.encode(Path(__file__).read_text("utf-8"))[:count]


@pytest.fixture(params=["f16", "q8_0", "q4_0"])
def target(reference_pair: Any, request: pytest.FixtureRequest) -> Iterator[LlamaTarget]:
    with LlamaTarget(reference_pair.target, options(kv_type=request.param)) as target:
        yield target


@pytest.mark.parametrize("sparse", [False, True])
def test_drafts_are_llama_cpps(reference_pair: Any, target: LlamaTarget, sparse: bool) -> None:
    drafter, stock = kernel_drafter(reference_pair, target, sparse=sparse), LlamaDrafter(reference_pair.drafter, target, options())
    tokens = text(target, 320)
    target.prefill(tokens[:20])
    equal = 0
    for token in tokens[20:]:  # beyond the window of 128, of whose rows llama.cpp's drafter sees one fewer
        mine, its = drafter.draft(token, 3), stock.draft(token, 3)
        equal += next((n for n in range(3) if mine[n] != its[n]), 3)
        target.verify([token])
    assert equal > 0.9 * 3 * 300


def test_a_rollback_leaves_the_rows_that_the_kept_token_attends_to(reference_pair: Any) -> None:
    with LlamaTarget(reference_pair.target, options()) as target:
        drafter, tokens = kernel_drafter(reference_pair, target), text(target, 40)
        target.prefill(tokens[:30])
        target.verify(tokens[30:32])
        drafts = drafter.draft(tokens[32], 5)
        target.rollback(30)
        assert drafter.draft(tokens[30], 5) == [], "there is no hidden row"
        target.verify([*tokens[30:32], 7, 8, 9])
        target.rollback(32)
        assert drafter.draft(tokens[32], 5) == drafts


def test_sequences_that_share_a_memory_draft_as_alone(reference_pair: Any) -> None:
    alone = []
    with LlamaTarget(reference_pair.target, options()) as target:
        drafter, tokens = kernel_drafter(reference_pair, target), text(target, 90)
        for first in (0, 30):
            target.rollback(0)
            target.prefill(tokens[first : first + 20])
            target.verify(tokens[first + 20 : first + 22])
            alone.append(drafter.draft(tokens[first + 22], 5))
    with LlamaTarget(reference_pair.target, options(sequences=2)) as target:
        drafter = kernel_drafter(reference_pair, target)
        one, other = target.shared.sequences
        one.prefill(tokens[:20])
        other.prefill(tokens[30:50])
        target.shared.verify_all([(one, tokens[20:22]), (other, tokens[50:52])])
        requests = [DraftRequest(sequence=n, last=tokens[30 * n + 22], draft_length=5) for n in (0, 1)]
        assert drafter.draft_all(requests) == alone
        other.verify(tokens[52:54])  # the hidden row of the first sequence is kept
        assert drafter.draft_all(requests[:1]) == alone[:1]


def test_without_known_cells_there_are_no_drafts_and_no_drafter_is_opened(reference_pair: Any) -> None:
    with LlamaTarget(reference_pair.target, options(use_extra_bufts=False)) as target:
        drafter, tokens = kernel_drafter(reference_pair, target), text(target, 30)
        target.prefill(tokens[:-1])
        assert len(drafter.draft(tokens[-1], 3)) == 3
        ggml.switch(enabled=False)  # llama.cpp's own attention
        try:
            target.verify(tokens[-1:])
            assert drafter.draft(300, 3) == []
            with pytest.raises(ValueError, match="its rows"):
                kernel_drafter(reference_pair, target)
        finally:
            ggml.switch(enabled=True)
        target.verify([300])
        assert len(drafter.draft(301, 3)) == 3


def test_fewer_candidates_take_fewer_clusters(reference_pair: Any) -> None:
    with LlamaTarget(reference_pair.target, options(max_candidates=130)) as target:
        drafter = kernel_drafter(reference_pair, target, sparse=True)
        target.prefill(text(target, 20))
        counts: list[int] = []
        drafter.draft(300, 1, lambda scores, tokens=None: counts.append(len(scores)) or int(tokens[0]))  # type: ignore[func-returns-value]
        assert counts == [128]
    with (
        LlamaTarget(reference_pair.target, options(max_candidates=63)) as target,
        pytest.raises(RequestError, match="max_candidates is 63"),
    ):
        kernel_drafter(reference_pair, target, sparse=True)


def test_a_closed_drafter_says_so(reference_pair: Any) -> None:
    with LlamaTarget(reference_pair.target, options()) as target:
        drafter = kernel_drafter(reference_pair, target)
        with pytest.raises(RequestError, match="longer than the 12"):
            drafter.draft(300, 13)
    with pytest.raises(RequestError, match="the drafter is closed"):
        drafter.draft(300, 1)
