"""Attention by the project's operators: the stock operator's numbers, and each row's bits the same whatever else is in its batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

onnx = pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

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
