"""The onnxruntime backend on the shipped pair: one cache for both models, and the same tokens with drafts as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from edge_runtime.backends.onnx.drafter import OrtDrafter
from edge_runtime.backends.onnx.open import OrtOptions, open_onnx
from edge_runtime.backends.onnx.target import OrtTarget
from edge_runtime.bundle.bundle import open_bundle

WINDOW = 128
Bundles = Callable[[str], Path]


def options(**changes: Any) -> OrtOptions:
    return OrtOptions(**{"context": 1024, "threads": 1, **changes})


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(300, 4096, count).tolist()


@pytest.fixture(scope="module")
def opened(onnx_pair: Bundles) -> Iterator[tuple[OrtTarget, OrtDrafter]]:
    target, drafter, kind = open_onnx(open_bundle(onnx_pair("f32")), options(), None)
    assert isinstance(drafter, OrtDrafter)
    assert kind == "split"
    with target:
        yield target, drafter


@pytest.fixture
def target(opened: tuple[OrtTarget, OrtDrafter]) -> OrtTarget:
    opened[0].rollback(0)
    return opened[0]


@pytest.fixture
def drafter(opened: tuple[OrtTarget, OrtDrafter]) -> OrtDrafter:
    return opened[1]


def buffers_of(owner: OrtTarget | OrtDrafter) -> dict[str, int]:
    """Addresses of the K/V buffers: of those that are bound once, as they are bound."""
    cache = (owner if isinstance(owner, OrtTarget) else owner._target).cache
    return {name: cache.values[name].data_ptr() if name in cache.values else cache.array(name).ctypes.data for name in cache.names}


def test_both_models_are_bound_to_the_same_memory(target: OrtTarget, drafter: OrtDrafter) -> None:
    before = buffers_of(target)
    target.prefill(random_tokens(5, 600))
    target.verify([300, 301])
    drafter.draft(302, 3)
    assert buffers_of(target) == buffers_of(drafter) == before
    for name, address in before.items():
        assert target.cache.array(name).ctypes.data == address
        assert np.abs(target.cache.array(name)[0, :, 0]).max() > 0, "the graph wrote its rows here"


def test_rows_that_are_rolled_back_are_never_read(target: OrtTarget, drafter: OrtDrafter) -> None:
    target.prefill(random_tokens(7, 50))
    expected = np.array(target.verify([300, 301])), drafter.draft(302, 4)
    target.rollback(50)
    for name in target.cache.names:
        target.cache.array(name)[:, :, 50:] = np.nan
    result = np.array(target.verify([300, 301])), drafter.draft(302, 4)
    np.testing.assert_array_equal(result[0], expected[0])
    assert result[1] == expected[1]


def scores_of(drafter: OrtDrafter, last: int) -> np.ndarray[Any, Any]:
    observed: list[np.ndarray[Any, Any]] = []

    def sampler(scores: np.ndarray[Any, Any], tokens: np.ndarray[Any, Any] | None = None) -> int:
        assert tokens is not None
        order = np.argsort(tokens)
        observed.append(scores[order].copy())
        return int(tokens[scores.argmax()])

    drafter.draft(last, 1, sampler)
    return observed[0]


def test_the_drafters_window_is_the_references(target: OrtTarget, drafter: OrtDrafter) -> None:
    """Distances up to and including the window: one row more than the target's own layers see."""
    target.prefill(random_tokens(8, 200))
    before, values = scores_of(drafter, 300), target.cache.array("value.2")
    values[:, :, 200 - WINDOW - 2] += 50
    np.testing.assert_array_equal(scores_of(drafter, 300), before)
    values[:, :, 200 - WINDOW - 1] += 50
    assert np.abs(scores_of(drafter, 300) - before).max() > 1e-3


def test_every_node_runs_on_the_cpu_and_the_report_says_so(target: OrtTarget, drafter: OrtDrafter) -> None:
    graphs = {**target.assignments(), "drafter": drafter.assignments()}
    assert len(graphs) == 3
    for providers in graphs.values():
        assert set(providers) == {"CPUExecutionProvider"}
    assert graphs["target-f32.onnx"]["CPUExecutionProvider"]["GroupQueryAttention"] == 6
