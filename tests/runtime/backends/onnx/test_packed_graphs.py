"""Packed weights of ONNX graphs in files: later sessions map them and compute the same bits."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from onnx import TensorProto

from edge_runtime.backends.kernels import loader, packed_cache
from edge_runtime.backends.kernels.packed_cache import PackedCache, PackedSource, packed_files
from edge_runtime.session.open import open_session
from kernel_graphs import graph_of, kernel_node, session_of
from polling import packed_weights_written

if not loader.usable_variants():
    pytest.skip("the row kernels were not built: pip install -e . builds them", allow_module_level=True)
SIZE = 64
ROWS = np.random.default_rng(2).standard_normal((5, SIZE)).astype(np.float32)


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "LEAST", 0)


def products(path: Path, *weights: tuple[str, str], seed: int = 1) -> PackedSource:
    """Writes a graph of products of x with matrices of these levels and scales, whose outputs are y0, y1 and so on."""
    random, facts = np.random.default_rng(seed), {"K": SIZE, "N": SIZE, "bits": 4, "block_size": 32}
    levels = {name: random.integers(0, 256, (SIZE, 2, 16)).astype(np.uint8) for name, _ in weights}
    scales = {name: random.standard_normal((SIZE, 2)).astype(np.float32) for _, name in weights}
    outputs = [f"y{number}" for number in range(len(weights))]
    nodes = [kernel_node("MatMulRows", ["x", *names], [output], **facts) for names, output in zip(weights, outputs, strict=True)]
    path.write_bytes(graph_of(nodes, {"x": (TensorProto.FLOAT, ["r", SIZE])}, outputs, levels | scales))
    return PackedSource(path=path, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def results_of(*sources: PackedSource) -> list[NDArray[np.float32]]:
    return [array for source in sources for array in session_of(source.path).run(None, {"x": ROWS})]


def kept(cache: PackedCache, *sources: PackedSource) -> list[NDArray[np.float32]]:
    with cache.loading(*sources):
        results = results_of(*sources)
    packed_weights_written()
    return results


def test_levels_with_other_scales_are_another_matrix(cache: PackedCache, tmp_path: Path, said: list[str]) -> None:
    source = products(tmp_path / "graph.onnx", ("b", "s"), ("b", "t"), ("b", "s"))
    expected = results_of(source)
    assert not np.array_equal(expected[0], expected[1])
    for _ in range(2):
        assert all(map(np.array_equal, kept(cache, source), expected))
        assert len(packed_files(cache.folder)) == 1
    assert said == []


def test_names_that_two_graphs_give_to_different_weights_are_not_kept(cache: PackedCache, tmp_path: Path, said: list[str]) -> None:
    sources = [products(tmp_path / f"{seed}.onnx", ("b", "s"), seed=seed) for seed in (1, 2)]
    expected = results_of(*sources)
    for _ in range(2):
        assert all(map(np.array_equal, kept(cache, *sources), expected))
        assert packed_files(cache.folder) == []
    assert all("is not used" in sentence for sentence in said)


def test_names_that_are_too_long_are_packed_at_each_start(cache: PackedCache, tmp_path: Path) -> None:
    for length in (126, 127, 300):
        source = products(tmp_path / "graph.onnx", ("b" * length, "s"), ("c", "t" * (128 - 2)))
        expected = results_of(source)
        for _ in range(2):
            assert all(map(np.array_equal, kept(cache, source), expected))


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_bundle_gives_the_same_rows_from_a_packed_file(
    weights: str, onnx_pair: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path))
    tokens, rows, texts, inodes = list(range(50, 62)), [], [], []
    for packed in (False, True, True):
        with open_session(onnx_pair(weights), backend="onnx", threads=2, context=256, packed_cache=packed) as session:
            texts.append(session.generate("def area", max_tokens=8, draft_length=3).text())
            session.target.rollback(0)
            rows.append(session.target.verify(tokens).copy())
            if packed and sys.platform == "linux":
                assert ".packed" in Path("/proc/self/maps").read_text()
        packed_weights_written()
        inodes.append([path.stat().st_ino for _, _, path in packed_files(packed_cache.default_folder())])
    assert texts[0] == texts[1] == texts[2]
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])
    assert inodes[0] == []
    assert len(inodes[1]) == 1
    assert inodes[2] == inodes[1], "made anew"
