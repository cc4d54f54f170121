"""The kernels' drafter on the ONNX backend: the graph's drafts, from the same weights and rows, in one call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from edge_runtime.backends.kernels.loader import variant
from edge_runtime.backends.onnx.devices import SessionOptions
from edge_runtime.backends.onnx.drafter import KernelDrafter, OrtDrafter
from edge_runtime.backends.onnx.open import OrtOptions, open_pair
from edge_runtime.backends.onnx.target import OrtTarget, pair_of
from edge_runtime.bundle.bundle import open_bundle

if variant() is None:
    pytest.skip("the row kernels were not built: pip install -e . builds them", allow_module_level=True)

Bundles = Callable[..., Path]
OPTIONS = OrtOptions(context=1024, threads=1)
# onnxruntime adds norms and softmax in another order, so that a value in between may be rounded to the next level.
NEAR = 0.02


def both(folder: Path) -> tuple[OrtTarget, KernelDrafter, OrtDrafter]:
    files = pair_of(open_bundle(folder), drafter=True)
    target, drafter = open_pair(files, OPTIONS)
    assert isinstance(target, OrtTarget)
    assert isinstance(drafter, KernelDrafter)
    assert files.drafter is not None
    return target, drafter, OrtDrafter(files.drafter, target, SessionOptions(threads=1))


def text(target: OrtTarget, count: int) -> list[int]:
    return target.vocabulary.encode(Path(__file__).read_text("utf-8"))[:count]


@pytest.mark.parametrize(("weights", "kv"), [("int4", "f32"), ("int8", "f32"), ("int8", "f16"), ("int8", "int8")])
def test_drafts_are_the_graphs(onnx_pair: Bundles, weights: str, kv: Any) -> None:
    target, drafter, graph = both(onnx_pair(weights, kv=kv))
    with target:
        tokens = text(target, 320)
        target.prefill(tokens[:20])
        equal = drafted = 0
        for token in tokens[20:]:  # beyond the window of 128
            mine, its = drafter.draft(token, 3), graph.draft(token, 3)
            equal += next((n for n in range(3) if mine[n] != its[n]), 3)
            drafted += 3
            shares: list[list[float]] = [[], []]
            for kept, of in zip(shares, (drafter, graph), strict=True):
                of.draft(token, 1, None, lambda share, kept=kept: kept.append(share) or True)
            assert shares[0] == pytest.approx(shares[1], abs=NEAR)
            target.verify([token])
        assert equal > 0.98 * drafted


def test_rows_that_are_rolled_back_are_never_read(onnx_pair: Bundles) -> None:
    target, drafter, _ = both(onnx_pair("int8"))
    with target:
        target.prefill(text(target, 50))
        target.verify([300, 301])
        drafts = drafter.draft(302, 4)
        target.rollback(50)
        for name in target.cache.names:
            target.cache.array(name)[:, :, 50:] = np.nan
        target.verify([300, 301])
        assert drafter.draft(302, 4) == drafts
