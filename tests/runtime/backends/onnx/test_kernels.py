"""Attention, norms and capped products by the project's operators: right numbers, and a row's bits the same in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

onnx = pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("onnx", reason="needs edge-mtp[export]")
ort = pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from onnx import TensorProto

from edge_runtime.backends.kernels import loader
from kernel_graphs import graph_of, kernel_node, session_of

Arrays = dict[str, NDArray[Any]]
pytestmark = pytest.mark.skipif(not loader.usable_variants(), reason="the row kernels were not built: pip install -e . builds them")
HEADS, KV_HEADS, DIM, CAPACITY = 4, 2, 48, 320
INPUTS: dict[str, tuple[int, list[int | str]]] = {
    "q": (TensorProto.FLOAT, [1, "t", HEADS * DIM]),
    "k": (TensorProto.FLOAT, [1, "w", KV_HEADS * DIM]),
    "v": (TensorProto.FLOAT, [1, "w", KV_HEADS * DIM]),
    "keys": (TensorProto.FLOAT, [1, KV_HEADS, "n", DIM]),
    "values": (TensorProto.FLOAT, [1, KV_HEADS, "n", DIM]),
    "last": (TensorProto.INT32, [1]),
    "rows": (TensorProto.INT32, []),
    "cosine": (TensorProto.FLOAT, ["c", DIM // 2]),
    "sine": (TensorProto.FLOAT, ["c", DIM // 2]),
    "positions": (TensorProto.INT64, [1, "t"]),
}


def model(window: int, *, writes: bool, stock: bool = False) -> bytes:
    """A graph of one attention on buffers, by a kernel or by onnxruntime's own operator."""
    outputs = ["y", "new_keys", "new_values"] if writes else ["y"]
    facts: dict[str, float] = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "local_window_size": window}
    attention = kernel_node("AttendBuffers" if writes else "ReadBuffers", list(INPUTS), outputs, **facts)
    if stock:
        facts |= {"scale": 1.0, "do_rotary": 1}
        attention = onnx.helper.make_node("GroupQueryAttention", list(INPUTS), outputs, domain="com.microsoft", **facts)
    return graph_of([attention], INPUTS, outputs)


def drawn(past: int, tokens: int, *, writes: bool = True, capacity: int = CAPACITY, most: int = 60) -> Arrays:
    """Inputs of `tokens` rows behind `past` ones; a fewer number of tokens gets the rows of the first of `most`."""
    random = np.random.default_rng(past)
    angles = np.outer(np.arange(capacity + 80), 1 / 10 ** np.linspace(0, 3, DIM // 2))
    held = random.standard_normal((2, 1, KV_HEADS, capacity, DIM)).astype(np.float32)
    rows = random.standard_normal((3, 1, most, HEADS * DIM)).astype(np.float32)
    return {
        "q": rows[0, :, :tokens],
        "k": rows[1, :, : tokens * writes, : KV_HEADS * DIM],
        "v": rows[2, :, : tokens * writes, : KV_HEADS * DIM],
        "keys": held[0],
        "values": held[1],
        "last": np.array([past + tokens - 1], np.int32),
        "rows": np.array(past + tokens, np.int32),
        "cosine": np.cos(angles).astype(np.float32),
        "sine": np.sin(angles).astype(np.float32),
        "positions": np.arange(past, past + tokens)[None],
    }


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("window", [-1, 20, 150])
def test_attention_on_buffers_is_that_of_the_stock_operator(window: int, writes: bool) -> None:
    stock, ours = (session_of(model(window, writes=writes, stock=stock)) for stock in (True, False))
    for past, tokens in [(0, 1), (0, 40), (7, 5), (127, 3), (200, 8), (250, 60), (300, 13)]:
        inputs = drawn(past, tokens, writes=writes)
        expected, actual = (item.run(None, inputs) for item in (stock, ours))
        for item, other in zip(expected, actual, strict=True):
            rows = slice(None) if item.ndim == 3 else slice(past + tokens)
            np.testing.assert_allclose(other[..., rows, :], item[..., rows, :], atol=2e-5)


def test_a_rows_attention_has_the_same_bits_in_every_batch_and_on_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = []
    for variant in loader.usable_variants():
        monkeypatch.setenv(loader.VARIABLE, variant)
        ours = session_of(model(150, writes=True))
        actual.append({(past, n): ours.run(["y"], drawn(past, n))[0][0] for past in (0, 100, 123, 250) for n in (1, 2, 5, 8, 13, 60)})
    for few in actual:
        for (past, tokens), rows in few.items():
            assert np.array_equal(rows, actual[0][past, 60][:tokens]), (past, tokens)


def test_rows_behind_a_long_context_have_the_bits_of_a_prompts() -> None:
    """There, spans are attended to in turns for few rows, and each group of queries by one thread for many."""
    past, most = 16_000, 600
    stock, ours = (session_of(model(-1, writes=True, stock=stock)) for stock in (True, False))
    rows = {n: ours.run(["y"], drawn(past, n, capacity=past + most, most=most))[0][0] for n in (1, 8, 60, most)}
    for tokens, few in rows.items():
        assert np.array_equal(few, rows[most][:tokens]), tokens
    expected = stock.run(["y"], drawn(past, 8, capacity=past + most, most=most))[0][0]
    np.testing.assert_allclose(rows[8], expected, atol=2e-5)


def test_a_reader_takes_no_queries_at_all() -> None:
    """A piece of a prompt that another piece follows has none behind the last layer with K/V rows."""
    ours = session_of(model(20, writes=False))
    for past in (0, 100):
        assert ours.run(["y"], drawn(past, 0, writes=False))[0].shape == (1, 0, HEADS * DIM)
    with pytest.raises(Exception, match="queries must be"):
        session_of(model(20, writes=True)).run(["y"], drawn(100, 0))


@pytest.mark.parametrize("name", ["q", "keys", "values"])
def test_what_is_no_number_reaches_the_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = drawn(200, 3)
    inputs[name] = inputs[name].copy()
    inputs[name][..., 100 if name != "q" else 1, 7] = np.nan
    for variant in loader.usable_variants():
        monkeypatch.setenv(loader.VARIABLE, variant)
        result = session_of(model(-1, writes=True)).run(["y"], inputs)[0][0]
        assert np.isnan(result[1]).any(), variant
        assert name != "q" or not np.isnan(result[[0, 2]]).any(), variant


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", np.array(CAPACITY + 1, np.int32)),
        ("rows", np.array(2, np.int32)),
        ("positions", np.arange(3, 8)[None]),
        ("positions", np.array([[100, 101, 103, 104, 105]])),
        ("positions", np.array([[398, 399, 400, 401, 402]])),
        ("positions", np.arange((1 << 63) - 5, 1 << 63, dtype=np.uint64).astype(np.int64)[None]),
        ("positions", np.array([[-5, -4, -3, -2, -1]])),
        ("k", np.zeros((1, 4, KV_HEADS * DIM), np.float32)),
    ],
)
def test_rows_and_positions_outside_the_buffers_are_refused(name: str, value: NDArray[Any]) -> None:
    ours = session_of(model(20, writes=True))
    with pytest.raises(Exception, match="attention: "):
        ours.run(None, drawn(7, 5) | {name: value})


WIDTH, GROUPS, HEAD, EPSILON = 72, 3, 24, 1e-3
FACTS = {"K": 64, "N": WIDTH, "bits": 4, "block_size": 32}


def constants() -> dict[str, NDArray[Any]]:
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
    return graph_of(nodes, {"rows": (TensorProto.FLOAT, [1, "n", 64]), "x": (TensorProto.FLOAT, [1, "n", WIDTH])}, outputs, constants())


LAYER = graph_with(PRODUCT, HEAD_NORM, residual("x", "y", "w", "factor", "v"))


def results(model: bytes, rows: NDArray[np.float32], x: NDArray[np.float32], threads: int = 2) -> list[NDArray[np.float32]]:
    values: list[NDArray[np.float32]] = session_of(model, threads=threads).run(None, {"rows": rows, "x": x})
    return values


def test_norms_have_their_numbers_and_a_rows_bits_in_every_batch_and_on_every_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    rows, x = (random.standard_normal((1, 300, size)).astype(np.float32) for size in (64, WIDTH))
    x[0, 3, 5] = np.nan  # stays in its row
    weights, first = constants(), None

    def norm(value: NDArray[np.float64], weight: str) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = value / np.sqrt((value**2).mean(axis=-1, keepdims=True) + np.float32(EPSILON)) * weights[weight]
        return scaled

    for variant in loader.usable_variants():
        monkeypatch.setenv(loader.VARIABLE, variant)
        all_rows = results(LAYER, rows, x)
        y, heads, total, normed = all_rows
        parts = y.astype(np.float64).reshape(1, 300, GROUPS, HEAD)
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
