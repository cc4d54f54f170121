"""The row kernels in onnxruntime's place: verifies of any size give each row the same products, and memory is given back."""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

onnx = pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from onnx import TensorProto, helper

from edge_runtime.backends.kernels import loader
from edge_runtime.session.open import open_session
from kernel_graphs import graph_of, kernel_node, session_of
from row_calls import gate, multiplication

Bundles = Callable[[str], Path]
built = pytest.mark.skipif(not loader.usable_variants(), reason="the row kernels were not built: pip install -e . builds them")


def gated(width: int = 64, *, block: int = 32, outputs: int = 40, kernel: bool = False) -> tuple[bytes, dict[str, NDArray[Any]]]:
    """y = gelu(gates) * values by a matrix, from a product with both: one operator, or stock ones; `block`, `outputs`: the matrix's.

    Returns the graph and its weights.
    """
    random = np.random.default_rng(1)
    weights: dict[str, NDArray[Any]] = {"sizes": np.array([width, width])}

    def matrix(names: list[str], k: int, n: int, block: int) -> onnx.NodeProto:
        levels, scales = random.integers(0, 256, (n, k // block, block // 2)), random.standard_normal((n, k // block)) / 100
        weights[names[1]], weights[names[2]] = levels.astype(np.uint8), scales.astype(np.float32)
        facts = {"K": k, "N": n, "bits": 4, "block_size": block, "accuracy_level": 4}
        return helper.make_node("MatMulNBits", names[:3], names[3:], domain="com.microsoft", **facts)

    nodes = [
        matrix(["x", "b", "s", "both"], 64, 2 * width, 32),
        helper.make_node("Split", ["both", "sizes"], ["gates", "values"], axis=-1),
        helper.make_node("Gelu", ["gates"], ["gelu"], approximate="tanh"),
        helper.make_node("Mul", ["gelu", "values"], ["hidden"]),
        matrix(["hidden", "c", "t", "y"], width, outputs, block),
    ]
    if kernel:
        facts = {"K": 64, "N": 2 * width, "bits": 4, "block_size": 32}
        facts |= {"second_K": width, "second_N": outputs, "second_bits": 4, "second_block_size": block}
        nodes = [kernel_node("FeedForwardRows", ["x", "b", "s", "c", "t"], ["y"], **facts)]
    return graph_of(nodes, {"x": (TensorProto.FLOAT, ["r", 64])}, ["y"], weights), weights


def by_parts(arrays: dict[str, NDArray[Any]], block: int, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the kernels of the parts make of `gated`, with floats between them."""
    levels, scales = arrays["b"].reshape(len(arrays["b"]), -1), arrays["s"]
    both = multiplication(levels, scales, 4, 32, rows).here(loader.usable_variants()[0])
    halves = (half.copy().reshape(-1) for half in np.split(both, 2, axis=1))
    hidden = gate(*halves).here(loader.usable_variants()[0]).reshape(len(rows), -1)
    return multiplication(arrays["c"].reshape(len(arrays["c"]), -1), arrays["t"], 4, block, hidden).here(loader.usable_variants()[0])


@built
@pytest.mark.parametrize(
    ("width", "block", "outputs"),
    # Of the last two, a thread's last piece of the gates or of the second product is smaller than the others.
    [(64, 32, 40), (320, 64, 40), (384, 128, 40), (8384, 32, 40), (64, 32, 6200)],
)
def test_feed_forwards_have_stock_numbers_and_a_rows_bits_in_every_batch_and_on_every_variant(
    width: int, block: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, weights = gated(width, block=block, outputs=outputs)
    rows = np.random.default_rng(2).standard_normal((300, 64)).astype(np.float32)
    stock = session_of(graph).run(None, {"x": rows})[0]
    first = None
    for variant in loader.usable_variants():
        monkeypatch.setenv(loader.VARIABLE, variant)
        ours = session_of(gated(width, block=block, outputs=outputs, kernel=True)[0])
        actual = {count: ours.run(None, {"x": rows[:count]})[0] for count in (0, 1, 5, 8, 12, 13, 16, 17, 25, 300)}
        # Where the first products' last bits differ, a value between them may be rounded to the next level.
        np.testing.assert_allclose(actual[300], stock, atol=0.01 * np.abs(stock).max())
        first = by_parts(weights, block, rows) if first is None else first
        assert all(np.array_equal(rows, first[:count]) for count, rows in actual.items())


@built
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from /proc")
def test_threads_that_end_leave_no_memory_behind() -> None:
    """A call on 5,000 rows of 64 values takes 0.7 MB of work memory, which each new thread used to keep for ever."""
    session = session_of(gated(kernel=True)[0])
    rows = np.ones((5_000, 64), np.float32)

    def resident_after(count: int) -> int:
        for _ in range(count):
            thread = threading.Thread(target=session.run, args=(None, {"x": rows}))
            thread.start()
            thread.join()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    few = resident_after(30)  # each of malloc's arenas grows, too
    assert resident_after(200) - few < 60e6  # 160 MB were left behind


@built
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_bundle_drafts_and_verifies_on_the_kernels(onnx_pair: Bundles, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = onnx_pair(weights)
    with open_session(folder, threads=1) as session:
        assert session.row_kernels == loader.variant()
        fast = session.generate("class Stack:", max_tokens=24, draft_length=3).text()
    monkeypatch.setenv(loader.VARIABLE, "none")
    with open_session(folder, threads=1) as session:
        stock = session.generate("class Stack:", max_tokens=24, draft_length=0).text()
    assert fast[:16] == stock[:16]


def cached_share(path: Path) -> float:
    """How much of a file is in the system's cache."""
    pages = -(-path.stat().st_size // mmap.PAGESIZE)
    resident = np.zeros(pages, np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        place = np.frombuffer(mapped, np.uint8)
        libc = ctypes.CDLL(None)
        assert libc.mincore(ctypes.c_void_p(place.ctypes.data), ctypes.c_size_t(place.size), ctypes.c_void_p(resident.ctypes.data)) == 0
        del place
    return float((resident & 1).mean())


@built
@pytest.mark.skipif(sys.platform != "linux", reason="pages are given back on Linux")
def test_an_opened_bundle_leaves_its_files_in_the_cache_of_the_system(onnx_pair: Bundles) -> None:
    """Other programs that need memory may drop pages meanwhile, but hardly three times."""
    folder, shares = onnx_pair("int4"), list[float]()
    (data,) = folder.glob("target*.onnx_data")
    for _ in range(3):
        data.read_bytes()
        with open_session(folder, threads=1) as session:
            assert session.row_kernels
        shares.append(cached_share(data))
        if shares[-1] > 0.9:
            return
    pytest.fail(f"shares of the file that stayed in the cache: {shares}")
