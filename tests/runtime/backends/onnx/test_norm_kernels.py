"""Norms and capped products on the row kernels: which nodes become one, and that a row's bits depend on nothing else in its batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

onnx = pytest.importorskip("onnx", reason="needs edge-mtp[export]")
ort = pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from onnx import TensorProto, helper

from edge_runtime.backends.kernels import loader
from edge_runtime.backends.onnx.row_kernels import CAPPED, NORM, PRODUCT, RESIDUAL, with_row_kernels

WIDTH, HEADS, HEAD, EPSILON = 72, 3, 24, 1e-3
built = pytest.mark.skipif(not loader.usable_variants(), reason="the row kernels were not built: pip install -e . builds them")


def layer(
    *,
    again: tuple[int, ...] = (0, 0, WIDTH),
    factor: tuple[int, ...] | None = (1,),
    axis: int = -1,
    first: str = "x",
    read: str = "normed",
    parted: str = "y",
) -> bytes:
    """heads = a norm of each head; normed = the norm of total = (x + the norm of y) * factor; `y` is a product, which has a kernel.

    With total as `parted` nothing is normed.
    """
    random = np.random.default_rng(1)
    arrays = {
        "b": random.integers(0, 256, (WIDTH, 2, 16)).astype(np.uint8),
        "s": (random.standard_normal((WIDTH, 2)) / 10).astype(np.float32),
        **{name: random.standard_normal(size).astype(np.float32) for name, size in (("w", WIDTH), ("v", WIDTH), ("h", HEAD))},
        "factor": np.full(factor or (1,), 0.75, np.float32),
        "apart": np.array([0, 0, HEADS, HEAD]),
        "again": np.array(again),
    }

    def norm(value: str, weight: str, out: str) -> Any:
        return helper.make_node("RMSNormalization", [value, weight], [out], axis=axis, epsilon=EPSILON)

    facts = {"K": 64, "N": WIDTH, "bits": 4, "block_size": 32, "accuracy_level": 4}
    nodes = [
        helper.make_node("MatMulNBits", ["rows", "b", "s"], ["y"], domain="com.microsoft", **facts),
        helper.make_node("Reshape", [parted, "apart"], ["parts"]),
        norm("parts", "h", "normed_parts"),
        helper.make_node("Reshape", ["normed_parts", "again"], ["heads"]),
        norm("y", "w", "normed_y"),
        helper.make_node("Add", [first, "normed_y"], ["sum"]),
        helper.make_node("Mul", ["sum", "factor"], ["total"]) if factor is not None else helper.make_node("Identity", ["sum"], ["total"]),
        norm("total", "v", "normed"),
    ]
    if parted == "total":
        nodes = [nodes[0], *nodes[4:7], *nodes[1:4]]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "n", size]) for name, size in (("rows", 64), ("x", WIDTH))]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "heads", "total", read)]
    weights = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString())


def operators(model: bytes) -> list[str]:
    return [node.op_type for node in onnx.load_from_string(with_row_kernels(model)[0]).graph.node]


def test_a_norm_a_sum_its_factor_and_the_next_norm_become_one_operator() -> None:
    changed, count = with_row_kernels(layer())
    nodes = onnx.load_from_string(changed).graph.node
    assert [node.op_type for node in nodes] == [PRODUCT, NORM, RESIDUAL]
    assert list(nodes[1].input) == ["y", "h"]
    assert (list(nodes[2].input), list(nodes[2].output)) == (["x", "y", "w", "factor", "v"], ["total", "normed"])
    assert count == 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"again": (0, -1, WIDTH)}, [PRODUCT, "Reshape", NORM, "Reshape", RESIDUAL]),
        ({"again": ()}, [PRODUCT, "Reshape", NORM, "Reshape", RESIDUAL]),
        ({"factor": (WIDTH,)}, [PRODUCT, NORM, RESIDUAL, "Mul", NORM]),
        ({"axis": 2}, [PRODUCT, "Reshape", "RMSNormalization", "Reshape", "RMSNormalization", "Add", "Mul", "RMSNormalization"]),
        ({"factor": None}, [PRODUCT, NORM, RESIDUAL, "Identity", NORM]),
        ({"read": "sum"}, [PRODUCT, NORM, RESIDUAL, RESIDUAL]),
        ({"parted": "total", "read": "x"}, [PRODUCT, RESIDUAL, NORM]),
    ],
)
def test_what_is_no_such_norm_stays(changes: dict[str, Any], expected: list[str]) -> None:
    """A sum that somebody else reads as well is computed for itself."""
    assert operators(layer(**changes)) == expected


@pytest.mark.parametrize("place", range(3, 8))
def test_a_node_with_another_output_stays(place: int) -> None:
    model = onnx.load_from_string(layer())
    model.graph.output.add(name="other")
    model.graph.node[place].output.append("other")
    assert model.graph.node[place].op_type in operators(model.SerializeToString())


def results(model: bytes, rows: NDArray[np.float32], x: NDArray[np.float32], threads: int = 2) -> list[NDArray[np.float32]]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(loader.kernels_path()))
    values: list[NDArray[np.float32]] = ort.InferenceSession(model, options).run(None, {"rows": rows, "x": x})
    return values


@built
def test_norms_have_stock_numbers_and_a_rows_bits_in_every_batch_and_on_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    rows, x = (random.standard_normal((1, 300, size)).astype(np.float32) for size in (64, WIDTH))
    x[0, 3, 5] = np.nan  # stays in its row
    model = with_row_kernels(layer())[0]
    stock = results(layer(), rows, x)
    first = None
    for variant in loader.usable_variants():
        monkeypatch.setenv(loader.VARIABLE, variant)
        all_rows = results(model, rows, x)
        y, heads, total, normed = all_rows
        np.testing.assert_allclose(y, stock[0], atol=0.02 * np.abs(stock[0]).max())  # stock products round activations in other blocks
        parts = y.astype(np.float64).reshape(1, 300, HEADS, HEAD)
        weights = {item.name: onnx.numpy_helper.to_array(item) for item in onnx.load_from_string(layer()).graph.initializer}

        def norm(value: NDArray[np.float64], weight: str, weights: dict[str, Any] = weights) -> NDArray[np.float64]:
            scaled: NDArray[np.float64] = value / np.sqrt((value**2).mean(axis=-1, keepdims=True) + np.float32(EPSILON)) * weights[weight]
            return scaled

        expected = (x + norm(y.astype(np.float64), "w")) * 0.75
        np.testing.assert_allclose(heads, norm(parts, "h").reshape(1, 300, WIDTH), rtol=2e-6, atol=2e-7)
        np.testing.assert_allclose(total, expected, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(normed, norm(expected, "v"), rtol=1e-5, atol=1e-5)
        assert set(np.nonzero(np.isnan(normed))[1].tolist()) == {3}
        first = all_rows if first is None else first
        for count in (0, 1, 2, 13, 17, 300):
            few = results(model, rows[:, :count], x[:, :count], threads=1)
            assert all(np.array_equal(output, whole[:, :count], equal_nan=True) for output, whole in zip(few, first, strict=True))


def capped(cap: float) -> bytes:
    """c * tanh(product) of 72 outputs, which do not fill a thread's share."""
    graph = onnx.load_from_string(layer()).graph
    nodes = [
        graph.node[0],
        helper.make_node("Tanh", ["y"], ["t"]),
        helper.make_node("Mul", ["t", "cap"], ["logits"]),
        helper.make_node("Identity", ["x"], ["unused"]),
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("logits", "unused")]
    weights = [*graph.initializer, onnx.numpy_helper.from_array(np.array(cap, np.float32), "cap")]
    made = helper.make_graph(nodes, "g", graph.input, outputs, weights)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(made, opset_imports=opsets, ir_version=11).SerializeToString())


def test_a_cap_goes_with_its_product() -> None:
    assert operators(capped(30)) == [CAPPED, "Identity"]
    assert operators(capped(-1)) == [PRODUCT, "Tanh", "Mul", "Identity"]


@built
def test_a_capped_product_is_the_products_cap_in_every_batch() -> None:
    rows = np.random.default_rng(3).standard_normal((1, 40, 64)).astype(np.float32)
    x = np.zeros((1, 40, WIDTH), np.float32)
    product = results(with_row_kernels(layer())[0], rows, x)[0]
    model = with_row_kernels(capped(3))[0]
    whole = results(model, rows, x)[0]
    np.testing.assert_allclose(whole, 3 * np.tanh(product.astype(np.float64)), rtol=1e-6)
    for count in (0, 1, 12, 13):
        assert np.array_equal(results(model, rows[:, :count], x[:, :count])[0], whole[:, :count])


@built
@pytest.mark.parametrize(("first", "shape"), [("rows", (1, 2, 64)), ("x", (1, 1, WIDTH))])
def test_shapes_that_do_not_fit_are_refused(first: str, shape: tuple[int, ...]) -> None:
    rows, x = np.ones((1, 2, 64), np.float32), np.ones(shape if first == "x" else (1, 2, WIDTH), np.float32)
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.Fail, match="ResidualRows: both inputs must have the same shape"):
        results(with_row_kernels(layer(first=first))[0], rows, x)
