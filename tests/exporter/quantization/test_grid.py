"""Weights that were trained for q4_0 are found on their grid and written without loss, into GGUF and into ONNX blocks of 32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

gguf = pytest.importorskip("gguf")

from edge_export.checkpoint.checkpoint import open_checkpoint
from edge_export.checkpoint.safetensors import read_values
from edge_export.checkpoint.tokenizer_vocabulary import read_vocabulary
from edge_export.checkpoint.weight_formats import BLOCK, find_grid
from edge_export.gguf.writer import ExactReport, matrices, plan_exact, trained_for_q4
from edge_export.onnx.block_quantization import WeightSpec, dequantize, quantize_matrix
from edge_export.onnx.request import OnnxRequest
from edge_export.onnx.weights import WeightFile, layers_format
from published_formats import bfloat16, grid_blocks, to_q4_grid

Folders = Callable[[str], Path]
Floats = NDArray[np.float32]


@pytest.mark.parametrize("half_scales", [True, False])
def test_every_block_is_found_again(half_scales: bool) -> None:
    weights = grid_blocks(5000, half_scales=half_scales)
    grid = find_grid(weights, half_scales=half_scales)
    assert grid.on_grid.all()
    assert (bfloat16(grid.levels * grid.scales[:, None]) == weights).all()
    assert grid.exact.all()
    # llama.cpp's rule, scale = extremum / -8, loses most blocks.
    extremum = np.take_along_axis(weights, np.abs(weights).argmax(1)[:, None], 1)
    step = np.where(extremum == 0, 1, extremum / -8)
    naive = bfloat16(np.clip(np.rint(weights / step), -8, 7) * step)
    assert (naive == weights).all(axis=1).mean() < 0.75


def test_scales_that_float16_cannot_hold_are_off_by_a_bit_at_most() -> None:
    weights = grid_blocks(2000, half_scales=False)
    grid = find_grid(weights, half_scales=True)
    assert grid.on_grid.all()
    back = bfloat16(grid.levels * grid.scales[:, None])
    assert (back == weights).mean() > 0.9
    assert (np.abs(back - weights) <= np.abs(weights) * 2**-7).all()


def test_ordinary_weights_lie_on_no_grid() -> None:
    weights = np.random.default_rng(2).standard_normal((20_000, BLOCK)).astype(np.float32)
    assert not find_grid(weights, half_scales=True).on_grid.any()
    assert not find_grid(bfloat16(weights), half_scales=True).on_grid.any()


def test_extreme_weights_are_no_failure() -> None:
    weights = np.zeros((4, BLOCK), np.float32)
    weights[1, 3], weights[2, :2], weights[3] = 1e-42, (3e38, -3e38), np.float32(65504 * 7)
    grid = find_grid(weights, half_scales=False)
    assert np.isfinite(grid.scales).all()
    assert grid.on_grid[0]


def test_blocks_of_onnx_are_exact() -> None:
    weights = grid_blocks(40, half_scales=False).reshape(10, 4 * BLOCK)
    packed = quantize_matrix(weights, WeightSpec(bits=4, block=32))
    assert (bfloat16(dequantize(packed)) == weights).all()
    other = weights + np.random.default_rng(3).standard_normal(weights.shape).astype(np.float32) * 0.01
    searched = dequantize(quantize_matrix(other, WeightSpec(bits=4, block=32)))
    assert 0 < np.abs(searched - other).max() < 0.05


@pytest.fixture
def trained(copy: Folders) -> Path:
    """A member whose matrices lie on grids, all but one."""
    folder = copy("31b")
    to_q4_grid(folder, off_grid="layers.2.mlp.up_proj")
    return folder


def test_a_gguf_is_exact_tensor_by_tensor(trained: Path, member_folder: Folders, tmp_path: Path) -> None:
    assert not trained_for_q4(open_checkpoint(member_folder("31b")))
    checkpoint, path, report = open_checkpoint(trained), tmp_path / "exact.gguf", ExactReport()
    assert trained_for_q4(checkpoint)
    plan = plan_exact(checkpoint, read_vocabulary(trained), report)
    plan.write(path, lambda _: None)
    assert path.stat().st_size == plan.bytes
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.file_type"].contents() == int(gguf.LlamaFileType.MOSTLY_Q4_0)
    written = {tensor.name: tensor for tensor in reader.tensors}
    exact = 0
    for name, source in matrices(checkpoint).items():
        tensor, values = written[name], read_values(source)
        back = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        if name == "blk.2.ffn_up.weight":
            assert tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0
            assert np.abs(back - values).max() < 0.05
        elif not source.shape[-1] % BLOCK:
            assert tensor.tensor_type == gguf.GGMLQuantizationType.Q4_0
            assert (bfloat16(back) == values).all(), name
            exact += 1
    assert exact > 20
    assert report.off_grid == ["blk.2.ffn_up.weight"]
    assert report.values == report.equal
    assert len(report.values) == exact
    blocks = sum(report.values.values())
    assert report.counts() == {"matrices": exact, "blocks": blocks, "equal_blocks": blocks, "off_grid": 1}
    assert "100.00% of their blocks bit for bit; 1 do not and are q8_0: blk.2.ffn_up.weight" in report.sentence()


def test_a_graph_gives_a_matrix_on_no_grid_eight_bits(trained: Path, tmp_path: Path) -> None:
    checkpoint, format = open_checkpoint(trained), layers_format(OnnxRequest(block=32, on_grid=True))
    with WeightFile(tmp_path / "data") as weights:
        for layer, bits in ((1, 4), (2, 8)):
            names = [f"model.layers.{layer}.mlp.{half}_proj.weight" for half in ("gate", "up")]
            stored = weights.matrix(checkpoint, names, format).format.spec
            assert stored is not None
            assert (stored.bits, stored.block) == (bits, 32)
