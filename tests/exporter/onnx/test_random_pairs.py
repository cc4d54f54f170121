"""Pairs of every member with legal variations drawn at random, built by transformers: float32 graphs equal the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("transformers", reason="needs edge-mtp[verify]")

from edge_export.onnx.request import OnnxRequest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from random_pairs import write_random_pair
from silent import Silent


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_graphs_equal_the_reference(seed: int, tmp_path: Path) -> None:
    _, target, drafter = write_random_pair(seed, tmp_path)
    graphs = OnnxRequest(target="f32", drafter="f32")
    request = ExportRequest(target=str(target), drafter=str(drafter), output=tmp_path / "bundle", gguf=False, onnx=graphs)
    parity = (export_pair(request, Silent()).manifest.parity or {})["onnx"]
    assert parity["unquantized"]["mean_kl"] < 1e-6
    assert parity["drafts"]["unquantized_agreement"] > 0.99
