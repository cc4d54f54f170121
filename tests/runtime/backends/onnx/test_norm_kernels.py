"""Norms and capped products on the row kernels: their numbers, and that a row's bits depend on nothing else in its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx", reason="needs edge-mtp[export]")
ort = pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from onnx import TensorProto

from edge_runtime.backends.kernels import loader
from kernel_graphs import graph_of, kernel_node, session_of

WIDTH, HEADS, HEAD, EPSILON = 72, 3, 24, 1e-3
FACTS = {"K": 64, "N": WIDTH, "bits": 4, "block_size": 32}
pytestmark = pytest.mark.skipif(not loader.usable_variants(), reason="the row kernels were not built: pip install -e . builds them")


def drawn() -> dict[str, NDArray[Any]]:
    """The constants of the graphs."""
    random = np.random.default_rng(1)
    return {
        "b": random.integers(0, 256, (WIDTH, 2, 16)).astype(np.uint8),
        "s": (random.standard_normal((WIDTH, 2)) / 10).astype(np.float32),
        **{name: random.standard_normal(size).astype(np.float32) for name, size in (("w", WIDTH), ("v", WIDTH), ("h", HEAD))},
        "factor": np.full(1, 0.75, np.float32),
    }


PRODUCT = kernel_node("MatMulRows", ["rows", "b", "s"], ["y"], **FACTS)
HEAD_NORM = kernel_node("NormRows", ["y", "h"], ["heads"], epsilon=EPSILON, width=WIDTH)


def residual(*inputs: str, outputs: Sequence[str] = ("total", "normed")) -> Any:
    return kernel_node("ResidualRows", inputs, outputs, epsilon=EPSILON, width=WIDTH)


def graph_with(*nodes: Any) -> bytes:
    """A graph that gives all that its nodes give."""
    outputs = [name for node in nodes for name in node.output if name]
    return graph_of(nodes, {"rows": (TensorProto.FLOAT, [1, "n", 64]), "x": (TensorProto.FLOAT, [1, "n", WIDTH])}, outputs, drawn())


LAYER = graph_with(PRODUCT, HEAD_NORM, residual("x", "y", "w", "factor", "v"))


def results(model: bytes, rows: NDArray[np.float32], x: NDArray[np.float32], threads: int = 2) -> list[NDArray[np.float32]]:
    values: list[NDArray[np.float32]] = session_of(model, threads=threads).run(None, {"rows": rows, "x": x})
    return values


def test_norms_have_their_numbers_and_a_rows_bits_in_every_batch_and_on_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    rows, x = (random.standard_normal((1, 300, size)).astype(np.float32) for size in (64, WIDTH))
    x[0, 3, 5] = np.nan  # stays in its row
    weights, first = drawn(), None

    def norm(value: NDArray[np.float64], weight: str) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = value / np.sqrt((value**2).mean(axis=-1, keepdims=True) + np.float32(EPSILON)) * weights[weight]
        return scaled

    for variant in loader.usable_variants():
        monkeypatch.setenv(loader.VARIABLE, variant)
        all_rows = results(LAYER, rows, x)
        y, heads, total, normed = all_rows
        parts = y.astype(np.float64).reshape(1, 300, HEADS, HEAD)
        expected = (x + norm(y.astype(np.float64), "w")) * 0.75
        np.testing.assert_allclose(heads, norm(parts, "h").reshape(1, 300, WIDTH), rtol=2e-6, atol=2e-7)
        np.testing.assert_allclose(total, expected, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(normed, norm(expected, "v"), rtol=1e-5, atol=1e-5)
        assert set(np.nonzero(np.isnan(normed))[1].tolist()) == {3}
        first = all_rows if first is None else first
        for count in (0, 1, 2, 13, 17, 300):
            few = results(LAYER, rows[:, :count], x[:, :count], threads=1)
            assert all(np.array_equal(output, whole[:, :count], equal_nan=True) for output, whole in zip(few, first, strict=True))


def test_a_sum_alone_and_one_without_a_factor_have_the_bits_of_all_at_once() -> None:
    rows, x = (np.random.default_rng(4).standard_normal((1, 5, size)).astype(np.float32) for size in (64, WIDTH))
    (_, alone), (_, plain, normed) = (
        results(graph_with(PRODUCT, node), rows, x)
        for node in (residual("x", "y", "w", outputs=["total"]), residual("x", "y", "w", "", "v"))
    )
    assert np.array_equal(alone, plain)
    _, again = results(graph_with(PRODUCT, kernel_node("NormRows", ["x", "v"], ["n"], epsilon=EPSILON, width=WIDTH)), rows, plain)
    assert np.array_equal(again, normed)


def test_a_capped_product_is_the_products_cap_in_every_batch() -> None:
    """c * tanh(product) of 72 outputs, which do not fill a thread's share."""
    rows = np.random.default_rng(3).standard_normal((1, 40, 64)).astype(np.float32)
    x = np.zeros((1, 40, WIDTH), np.float32)
    (product,) = results(graph_with(PRODUCT), rows, x)
    model = graph_with(kernel_node("MatMulCapRows", ["rows", "b", "s"], ["logits"], cap=3.0, **FACTS))
    (whole,) = results(model, rows, x)
    np.testing.assert_allclose(whole, 3 * np.tanh(product.astype(np.float64)), rtol=1e-6)
    for count in (0, 1, 12, 13):
        assert np.array_equal(results(model, rows[:, :count], x[:, :count])[0], whole[:, :count])


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (residual("rows", "y", "w"), "both inputs must have the same shape"),
        (residual("x", "y", "h", "factor", "v"), "a weight has as many values as a row"),
        (residual("x", "y", "w", "h", "v"), "a factor has one"),
        (residual("x", "y", "w", "factor", "v", outputs=["total"]), "a second output goes with a second weight"),
        (residual("x", "y", "w", "factor"), "a second output goes with a second weight"),
        (residual("x", "y", "w", "factor", "v", outputs=["total", ""]), "has no name|a second output goes with"),
        (kernel_node("NormRows", ["y", "h"], ["n"], epsilon=EPSILON, width=HEAD), "the last dimension must be `width`"),
        (kernel_node("NormRows", ["y", "factor"], ["n"], epsilon=EPSILON, width=-WIDTH), "the last dimension must be `width`"),
        (kernel_node("MatMulRows", ["rows", "b", "s"], ["z"], **FACTS | {"N": 2 * WIDTH}), "another size than K, N"),
        (kernel_node("MatMulRows", ["rows", "b", "s"], ["z"], **FACTS | {"block_size": 3}), "no kernel takes K, N"),
        (kernel_node("MatMulRows", ["rows", "x", "s"], ["z"], **FACTS), "Type Error|must be constants"),
        (kernel_node("MatMulCapRows", ["rows", "b", "s"], ["z"], cap=-1.0, **FACTS), "cap must be positive"),
        (kernel_node("MatMulStatic", ["rows", "b", "s"], ["z"], input_scale=0.0, output_scale=0.0, **FACTS), "must be positive"),
        (
            kernel_node(
                "FeedForwardRows", ["rows", "b", "s", "b", "s"], ["z"], **FACTS, **{f"second_{name}": n for name, n in FACTS.items()}
            ),
            "second_K must be half of N",
        ),
        (kernel_node("AttendRows", ["x", "x", "x", "x", "x", "x", "x"], ["z"], num_heads=0), "Type Error|num_heads"),
    ],
)
def test_an_operator_that_does_not_fit_is_refused(node: Any, words: str) -> None:
    """A hostile file may say anything of an operator that the kernels take."""
    rows, x = np.ones((1, 2, 64), np.float32), np.ones((1, 2, WIDTH), np.float32)
    with pytest.raises(Exception, match=words):
        results(graph_with(PRODUCT, node), rows, x)


def test_rows_of_another_number_are_refused() -> None:
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.Fail, match="ResidualRows: both inputs must have the same shape"):
        results(LAYER, np.ones((1, 2, 64), np.float32), np.ones((1, 1, WIDTH), np.float32))
