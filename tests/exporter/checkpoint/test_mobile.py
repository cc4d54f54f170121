"""Checkpoints of the layouts of -qat-mobile-transformers and -ct: weights bit for bit, activations rounded in the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs edge-mtp[export]")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("transformers", reason="needs edge-mtp[verify]")


from edge_export.checkpoint.checkpoint import open_checkpoint
from edge_export.checkpoint.safetensors import read_values, stored_tensors
from edge_export.checkpoint.weight_formats import with_codes
from edge_export.errors import CheckpointError, ExportError
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.request import OnnxRequest
from edge_export.onnx.weights import WeightFile
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_runtime.backends.kernels.loader import kernels_path, usable_variants
from edge_runtime.session.open import open_session
from published_formats import packed_codes, to_mobile

Folders = Callable[[str], Path]


Mobile = Callable[[bool], tuple[Path, dict[str, np.ndarray]]]


@pytest.fixture
def mobile(copy: Folders) -> Mobile:
    """Writes a member in either layout; returns its folder and the weights that its matrices stand for, by their text-only names."""
    return lambda compressed: (copy("e2b"), to_mobile(copy("e2b"), compressed=compressed))


@pytest.mark.parametrize("compressed", [False, True])
def test_weights_are_read_bit_for_bit(mobile: Mobile, compressed: bool) -> None:
    folder, values = mobile(compressed)
    checkpoint = open_checkpoint(folder)
    assert len(values) > 40
    for name, expected in values.items():
        assert np.array_equal(read_values(checkpoint.tensors[name]), expected), name
    assert {tensor.bits for tensor in checkpoint.tensors.values()} == {0, 2, 4, 8}
    assert len(checkpoint.rounding) == len(values)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_product_rounds_as_transformers_does(bits: int, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers.integrations.gemma_quant import QuantizedLinear

    rng, rows, columns = np.random.default_rng(bits), 64, 256
    layer = QuantizedLinear(columns, rows, num_bits=bits)
    half = 1 << (bits - 1)
    codes = rng.integers(0, 2 * half, (rows, columns))
    layer.weight.data = torch.from_numpy((codes - half).astype(np.int8) if bits == 8 else packed_codes(codes, bits))
    layer.weight_scale.data = torch.from_numpy(rng.uniform(0.01, 0.1, (rows, 1)).astype(np.float32))
    layer.input_activation_scale.data, layer.output_activation_scale.data = torch.tensor(0.02), torch.tensor(0.3)
    save_file(layer.state_dict(), tmp_path / "model.safetensors")
    tensors, rounding = with_codes(
        {f"x.{name}": result for name, result in stored_tensors(tmp_path).items()}, {"x.weight": (rows, columns)}
    )
    graph = GraphBuilder("product", kernels=True)
    with WeightFile(tmp_path / "data") as weights:
        matrix = weights.codes(tensors["x.weight"])
        assert matrix is not None
        value = graph.input("x", "f32", (1, "t", columns))
        product = graph.linear(value, replace(matrix, rounding=rounding["x.weight"]))
        graph.output(graph.op("Identity", product, name="y"), "f32", (1, "t", rows))
    graph.save(tmp_path / "product.onnx")
    # Some inputs are beyond the range.
    values = rng.normal(0, 1.5, (1, 5, columns)).astype(np.float32)
    (result,) = onnxruntime.InferenceSession(tmp_path / "product.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": values})
    expected = layer(torch.from_numpy(values)).detach().numpy()
    # A sum on the edge between two levels may get either.
    assert (np.abs(result - expected) < 1e-5).mean() > 0.99
    assert np.abs(result - expected).max() < 0.31
    if not usable_variants():
        return
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(kernels_path()))
    session = onnxruntime.InferenceSession(tmp_path / "product.onnx", options, providers=["CPUExecutionProvider"])
    (rows,) = session.run(None, {"x": values})
    exact = layer.double()(torch.from_numpy(values.astype(np.float64))).detach().numpy()
    assert np.abs(rows - exact).max() < 1e-5, "sums of integers lie on an edge only where exact ones do"
    for row in range(5):
        assert np.array_equal(session.run(None, {"x": values[:, row : row + 1]})[0], rows[:, row : row + 1])


def test_graphs_equal_transformers(mobile: Mobile, member_folder: Folders, tmp_path: Path) -> None:
    """Only feed-forward activations are rounded: a random model makes chaos of levels that flip in all its layers."""
    from safetensors.torch import load_file, save_file

    folder, _ = mobile(False)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    unrounded = {name: 0 * tensor for name, tensor in tensors.items() if name.endswith("activation_scale") and ".mlp." not in name}
    save_file(tensors | unrounded, path, metadata={"format": "pt"})
    drafter = str(member_folder("e2b-assistant"))
    request = ExportRequest(target=str(folder), drafter=drafter, output=tmp_path / "bundle", gguf=False, onnx=OnnxRequest())
    parity = (export_pair(request).manifest.parity or {})["onnx"]
    assert parity["unquantized"]["mean_kl"] < 1e-6
    assert parity["quantized"]["mean_kl"] < 1e-6, "the codes are the same"


@pytest.mark.skipif(not usable_variants(), reason="the row kernels were not built: pip install -e . builds them")
def test_rows_are_exact_and_equal_transformers_in_float64(mobile: Mobile, member_folder: Folders, tmp_path: Path) -> None:
    """With all activations rounded, in every layer; the last bits of another processor's norms may move a level, and rows behind it."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, _ = mobile(False)
    pair = {"target": str(folder), "drafter": str(member_folder("e2b-assistant"))}
    export_pair(ExportRequest(**pair, output=tmp_path / "bundle", gguf=False, onnx=OnnxRequest(), verify=False))
    tokens = np.random.default_rng(1).integers(50, 250, 48).tolist()
    with open_session(tmp_path / "bundle", backend="onnx", threads=2) as session:
        assert session.row_kernels is not None
        compared = session.row_equality()
        assert compared.compared
        assert compared.different == 0
        target = session.target
        target.prefill(tokens[:16])
        rows = np.concatenate([target.verify(tokens[at : at + 8]).copy() for at in range(16, 48, 8)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens])).logits[0, 16:].numpy()
    assert (np.abs(rows - expected).max(axis=1) < 1e-5).mean() > 0.5


@pytest.mark.parametrize("compressed", [False, True])
def test_other_formats_are_refused(mobile: Mobile, compressed: bool, member_folder: Folders, tmp_path: Path) -> None:
    folder, drafter = str(mobile(compressed)[0]), str(member_folder("e2b-assistant"))
    for formats in ({"gguf": True}, {"gguf": False, "onnx": OnnxRequest(device="static")}):
        with pytest.raises(ExportError, match="rounds its activations too"):
            export_pair(ExportRequest(target=folder, drafter=drafter, output=tmp_path / "bundle", **formats))


def test_codes_without_fitting_scales_are_refused(mobile: Mobile) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder, _ = mobile(False)
    tensors = load_file(folder / "model.safetensors")
    name = "model.language_model.layers.0.mlp.up_proj.weight_scale"
    for wrong in (tensors[name][:-1], tensors[name].reshape(-1), torch.zeros(tensors[name].shape, dtype=torch.int32)):
        save_file(tensors | {name: wrong.contiguous()}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match="is no matrix"):
            open_checkpoint(folder)
    scale = "model.language_model.layers.0.mlp.up_proj.input_activation_scale"
    for value, words in ((float("nan"), "holds NaN"), (float("inf"), "is no scale"), (-1.0, "is no scale")):
        save_file(tensors | {scale: torch.tensor(value)}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(folder)
