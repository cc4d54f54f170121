"""Graphs of fixed shapes of every member against transformers, in plain operators alone, and what the manifest says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from click.testing import CliRunner

from edge_export.cli.command import main
from edge_export.errors import ExportError
from edge_runtime.bundle.bundle import Bundle, open_bundle
from tiny_members import settled

Folders = Callable[[str], Path]
GRAPHS = ("target_prefill", "target", "target_row", "drafter")


def parity_of(bundle: Bundle) -> dict[str, Any]:
    assert bundle.manifest.parity is not None
    return dict(bundle.manifest.parity["onnx"])


def test_shapes_are_fixed_and_operators_plain(exported: Callable[..., Bundle]) -> None:
    bundle = exported("e4b", "int4", "static", verify=False)
    facts = bundle.manifest.static
    assert facts is not None
    rows = {"target_prefill": facts.prefill_rows, "target": facts.verify_rows, "target_row": 1, "drafter": 1}
    for role in GRAPHS:
        model = onnx.load(bundle.path(role, "onnx"), load_external_data=False)
        assert {(opset.domain, opset.version) for opset in model.opset_import} == {("", 21)}
        assert not {node.domain for node in model.graph.node} - {""}
        for value in (*model.graph.input, *model.graph.output):
            sizes = value.type.tensor_type.shape.dim
            assert sizes
            assert all(size.dim_value > 0 for size in sizes)
        embedded = next(value for value in model.graph.input if value.name == "embedded")
        assert embedded.type.tensor_type.shape.dim[1].dim_value == rows[role]
        assert ("logits" in {value.name for value in model.graph.output}) == (role in ("target", "target_row"))
        assert "DequantizeLinear" in {node.op_type for node in model.graph.node}
    assert bundle.manifest.onnx is not None
    assert (bundle.manifest.onnx.opset, bundle.manifest.onnx.contrib_ops) == (21, ())


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_columns_mean_the_weights_that_were_rounded(weights: Any, member_folder: Folders, tmp_path: Path) -> None:
    """onnx's own DequantizeLinear and MatMul make of a stored matrix what was rounded."""
    from onnx.reference import ReferenceEvaluator

    from edge_export.checkpoint.checkpoint import open_checkpoint
    from edge_export.checkpoint.safetensors import read_values
    from edge_export.onnx.block_quantization import WeightSpec, dequantize, quantize_matrix
    from edge_export.onnx.graph_builder import PlainGraph
    from edge_export.onnx.weights import PlainWeightFile, WeightFormat

    checkpoint = open_checkpoint(settled(member_folder, "31b"))
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in ("q", "k", "v")]
    spec = WeightSpec(bits=8 if weights == "int8" else 4, block=32)
    with PlainWeightFile(tmp_path / "data.onnx_data") as file:
        matrix = file.matrix(checkpoint, names, WeightFormat(kind="blocks", spec=spec))
    expected = np.concatenate([read_values(checkpoint.tensors[name]) for name in names])
    graph = PlainGraph("one")
    graph.input("x", "f32", (1, matrix.columns, matrix.columns))
    graph.output(graph.op("Identity", graph.linear("x", matrix), name="y"), "f32", (1, matrix.columns, matrix.rows))
    graph.save(tmp_path / "one.onnx")
    model = onnx.load(tmp_path / "one.onnx")
    actual = ReferenceEvaluator(model).run(None, {"x": np.eye(matrix.columns, dtype=np.float32)[None]})[0][0]
    assert np.array_equal(actual.T, dequantize(quantize_matrix(expected, spec)))


@pytest.mark.parametrize(
    ("member", "weights", "device", "words"),
    [
        ("26b-a4b", "f32", "static", "is a mixture of experts"),
        ("12b", "int4", "qnn", "wrong products with int4"),
        ("e2b", "int8", "qnn", "fails on integer weights beside per-layer embeddings.*take f16"),
    ],
)
def test_what_no_device_computes_is_refused_and_nothing_is_left(
    member: str, weights: str, device: str, words: str, exported: Callable[..., Bundle], tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=words):
        exported(member, weights, device)
    assert not (tmp_path / "out").exists()


def test_openvinos_profile_shares_a_scale_among_128_weights(tmp_path: Path) -> None:
    arguments = ["reference", "-o", str(tmp_path / "out"), "--format", "onnx", "--device", "openvino-npu", "--no-verify"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    bundle = open_bundle(tmp_path / "out")
    assert bundle.file("target").quantization == "int4-b128"
    assert bundle.manifest.static is not None
    assert bundle.manifest.static.device == "openvino-npu"
    model = onnx.load(bundle.path("target"), load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert {types[node.input[0]] for node in nodes} == {onnx.TensorProto.INT4}
    assert all(len(node.input) == 2 for node in nodes), "symmetric: no zero points"
    assert 128 in {attribute.i for node in nodes for attribute in node.attribute if attribute.name == "block_size"}


def test_qnns_profile_rounds_what_goes_into_and_comes_out_of_matrices(exported: Callable[..., Bundle]) -> None:
    bundle = exported("12b", "int8", "qnn")
    parity = parity_of(bundle)
    assert parity["unquantized"]["max_abs_difference"] < 1e-4
    assert 0 < parity["quantized"]["mean_kl"] < 0.005
    for role in GRAPHS:
        graph = onnx.load(bundle.path(role, "onnx"), load_external_data=False).graph
        types = {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in graph.initializer}
        made = {name: node for node in graph.node for name in node.output}
        stored = [node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in types]
        products = [node for node in graph.node if node.op_type == "MatMul" and made.get(node.input[1]) in stored]
        assert len(products) == len(stored) > 0
        for node in products:
            weight = made[node.input[1]]
            levels, scales = types[weight.input[0]], types[weight.input[1]]
            assert levels[0] == onnx.TensorProto.INT8
            assert scales[1] == levels[1][1:], "a scale for each channel"
            assert made[node.input[0]].op_type == "DequantizeLinear"
            (after,) = (other for other in graph.node if node.output[0] in other.input)
            assert after.op_type == "QuantizeLinear"
            assert types[after.input[2]][0] == onnx.TensorProto.UINT16
        assert not [value.name for value in graph.output if value.name.startswith("range.")]


def test_qnns_profile_is_float16_unless_asked(tmp_path: Path) -> None:
    arguments = ["reference", "-o", str(tmp_path / "out"), "--format", "onnx", "--device", "qnn", "--no-verify"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert {open_bundle(tmp_path / "out").file(role, "onnx").quantization for role in GRAPHS} == {"f16"}
