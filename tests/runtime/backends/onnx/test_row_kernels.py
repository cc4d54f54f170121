"""The row kernels in onnxruntime's place: which nodes they take, and that verifies of any size give each row the same products."""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

onnx = pytest.importorskip("onnx", reason="needs edge-mtp[export]")
ort = pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from onnx import TensorProto, helper

from edge_runtime.backends.kernels import loader
from edge_runtime.backends.onnx import loader as ort_library
from edge_runtime.backends.onnx.row_kernels import DOMAIN, FEED_FORWARD, PRODUCT, STATIC, with_row_kernels
from edge_runtime.session.open import open_session
from row_calls import gate, multiplication

Bundles = Callable[[str], Path]
built = pytest.mark.skipif(not loader.usable_variants(), reason="the row kernels were not built: pip install -e . builds them")


def product(*extra: str, k: int = 64, block: int = 32, bits: int = 4) -> onnx.NodeProto:
    return helper.make_node("MatMulNBits", ["x", "b", "s", *extra], ["y"], domain="com.microsoft", K=k, N=8, bits=bits, block_size=block)


def model(*nodes: onnx.NodeProto) -> bytes:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])
    return encoded(helper.make_graph(list(nodes), "g", [value], []))


def encoded(graph: onnx.GraphProto) -> bytes:
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString())


def test_products_in_the_graph_and_in_its_loops_are_replaced() -> None:
    body = helper.make_graph([product()], "body", [], [])
    loop = helper.make_node("Loop", ["n", ""], ["z"], body=body)
    changed, count = with_row_kernels(model(product(), loop, helper.make_node("Add", ["x", "x"], ["w"])))
    assert count == 2
    actual = onnx.load_from_string(changed)
    inner = actual.graph.node[1].attribute[0].g.node[0]
    for node in (actual.graph.node[0], inner):
        assert (node.op_type, node.domain, list(node.input)) == (PRODUCT, DOMAIN, ["x", "b", "s"])
        assert {item.name: item.i for item in node.attribute} == {"K": 64, "N": 8, "bits": 4, "block_size": 32}
    assert actual.graph.node[2] == helper.make_node("Add", ["x", "x"], ["w"])
    assert {(item.domain, item.version) for item in actual.opset_import} == {("", 21), ("com.microsoft", 1), (DOMAIN, 1)}


@pytest.mark.parametrize(
    "node",
    [product("zero_points"), product(k=48), product(bits=3), product(block=256), helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"])],
    ids=["zero points", "a block that is not full", "3 bits", "blocks of 256", "another domain"],
)
def test_what_the_kernels_do_not_take_stays(node: onnx.NodeProto) -> None:
    before = model(node)
    assert with_row_kernels(before) == (before, 0)


def trained(
    *, end: str = "step", lowest: float = -128, block: int = 32, accuracy_level: int = 1, step: float = 0.1, before: bool = True
) -> onnx.GraphProto:
    """y = a product of rounded activations whose results are rounded by another scale, as checkpoints that were trained for it have it."""
    random = np.random.default_rng(1)
    constants = {"step": np.float32(step), "end": np.float32(0.5), "lowest": np.float32(lowest), "highest": np.float32(127)}
    constants |= {
        "b": random.integers(0, 256, (24, 64 // block, block // 2)).astype(np.uint8),
        "s": np.full((24, 64 // block), 0.01, np.float32),
    }

    def rounding(value: str, scale: str, name: str, last: str) -> list[onnx.NodeProto]:
        names = [f"{name}{part}" for part in range(3)]
        return [
            helper.make_node("Div", [value, scale], names[:1]),
            helper.make_node("Round", names[:1], names[1:2]),
            helper.make_node("Clip", [names[1], "lowest", "highest"], names[2:]),
            helper.make_node("Mul", [names[2], last], [name]),
        ]

    sizes = {"K": 64, "N": 24, "bits": 4, "block_size": block, "accuracy_level": accuracy_level}
    product = helper.make_node("MatMulNBits", ["r" if before else "x", "b", "s"], ["p"], domain="com.microsoft", **sizes)
    nodes = [*rounding("x", "step", "r", end), product, *rounding("p", "end", "y", "end")]
    weights = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    rows, result = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", ["r", 64]), ("y", None)))
    return helper.make_graph(nodes, "g", [rows], [result], weights)


def test_a_product_and_the_roundings_around_it_become_one_operator() -> None:
    model, count = with_row_kernels(encoded(trained()))
    (node,) = onnx.load_from_string(model).graph.node
    assert (node.op_type, list(node.input), list(node.output), count) == (STATIC, ["x", "b", "s"], ["y"], 1)
    numbers = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    assert numbers == {"K": 64, "N": 24, "bits": 4, "block_size": 32, "input_scale": np.float32(0.1), "output_scale": 0.5}


@pytest.mark.parametrize(
    "change",
    [{"end": "end"}, {"lowest": -127}, {"step": 0}, {"step": float("nan")}, {"step": -1}, {"before": False}],
    ids=["two scales of one rounding", "other levels", "no scale", "NaN", "a negative scale", "activations as they are"],
)
def test_products_without_such_a_rounding_stay(change: dict[str, float]) -> None:
    assert "MatMulNBits" in operators(encoded(trained(**change)))


def gated(
    sizes: tuple[int, ...] = (64, 64), *, n: int = 128, approximate: str = "tanh", swapped: bool = False, block: int = 32, outputs: int = 40
) -> onnx.GraphProto:
    """y = gelu(gates) * values by a matrix, from a product with both; `sizes`: of the split; `block`, `outputs`: the second one's."""
    random = np.random.default_rng(1)
    weights = [onnx.numpy_helper.from_array(np.array(sizes), "sizes")]

    def matrix(names: list[str], k: int, n: int, block: int) -> onnx.NodeProto:
        levels, scales = random.integers(0, 256, (n, k // block, block // 2)), random.standard_normal((n, k // block)) / 100
        arrays = (levels.astype(np.uint8), scales.astype(np.float32))
        weights.extend(onnx.numpy_helper.from_array(item, name) for item, name in zip(arrays, names[1:3], strict=True))
        facts = {"K": k, "N": n, "bits": 4, "block_size": block, "accuracy_level": 4}
        return helper.make_node("MatMulNBits", names[:3], names[3:], domain="com.microsoft", **facts)

    nodes = [
        matrix(["x", "b", "s", "both"], 64, n, 32),
        helper.make_node("Split", ["both", "sizes"], ["gates", "values"], axis=-1),
        helper.make_node("Gelu", ["gates"], ["gelu"], approximate=approximate),
        helper.make_node("Mul", ["values", "gelu"] if swapped else ["gelu", "values"], ["hidden"]),
        matrix(["hidden", "c", "t", "y"], n // 2, outputs, block),
    ]
    rows, result = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", ["r", 64]), ("y", None)))
    return helper.make_graph(nodes, "g", [rows], [result], weights)


def operators(model: bytes) -> list[str]:
    return [node.op_type for node in onnx.load_from_string(with_row_kernels(model)[0]).graph.node]


@pytest.mark.parametrize(("width", "block"), [(64, 16), (64, 64), (192, 64), (256, 128)])
def test_a_gated_feed_forward_becomes_one_operator(width: int, block: int) -> None:
    assert operators(encoded(gated((width, width), n=2 * width, block=block))) == [FEED_FORWARD]


@pytest.mark.parametrize(
    "graph",
    [gated((32, 96)), gated((96, 96), n=192), gated(approximate="none"), gated(swapped=True)],
    ids=["parts of other sizes", "outputs that do not fill a thread's share", "another GELU", "another order"],
)
def test_other_gates_stay(graph: onnx.GraphProto) -> None:
    assert operators(encoded(graph)) == [PRODUCT, "Split", "Gelu", "Mul", PRODUCT]


def test_what_others_read_of_a_gate_stays() -> None:
    graph = gated()
    graph.output.append(helper.make_tensor_value_info("values", TensorProto.FLOAT, None))
    assert operators(encoded(graph)) == [PRODUCT, "Split", FEED_FORWARD]


def test_a_gate_in_a_branch_reads_the_sizes_and_is_read_outside() -> None:
    outer, inner = gated(), gated()
    sizes = [item for item in outer.initializer if item.name == "sizes"]
    for field in (inner.initializer, inner.input, outer.node):
        del field[:]
    inner.initializer.extend([item for item in outer.initializer if item.name != "sizes"])
    del outer.initializer[:], outer.output[:]
    outer.initializer.extend(sizes)
    outer.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    outer.node.append(helper.make_node("If", ["on"], ["z"], then_branch=inner, else_branch=inner))
    changed = onnx.load_from_string(with_row_kernels(encoded(outer))[0])
    assert [[node.op_type for node in branch.g.node] for branch in changed.graph.node[0].attribute] == [[FEED_FORWARD]] * 2


def by_parts(graph: onnx.GraphProto, block: int, rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the kernels of the parts make of `gated`, with floats between them."""
    arrays = {item.name: onnx.numpy_helper.to_array(item) for item in graph.initializer}
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
    graph = gated((width, width), n=2 * width, block=block, outputs=outputs)
    model = encoded(graph)
    rows = np.random.default_rng(2).standard_normal((300, 64)).astype(np.float32)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    stock = ort.InferenceSession(model, options).run(None, {"x": rows})[0]
    options.register_custom_ops_library(str(loader.kernels_path()))
    first = None
    for variant in loader.usable_variants():
        monkeypatch.setenv(loader.VARIABLE, variant)
        ours = ort.InferenceSession(with_row_kernels(model)[0], options)
        actual = {count: ours.run(None, {"x": rows[:count]})[0] for count in (0, 1, 5, 8, 12, 13, 16, 17, 25, 300)}
        # Where the first products' last bits differ, a value between them may be rounded to the next level.
        np.testing.assert_allclose(actual[300], stock, atol=0.01 * np.abs(stock).max())
        first = by_parts(graph, block, rows) if first is None else first
        assert all(np.array_equal(rows, first[:count]) for count, rows in actual.items())


@built
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from /proc")
def test_threads_that_end_leave_no_memory_behind() -> None:
    """A call on 5,000 rows of 64 values takes 0.7 MB of work memory, which each new thread used to keep for ever."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(loader.kernels_path()))
    session = ort.InferenceSession(with_row_kernels(encoded(gated()))[0], options)
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
    opened: list[int] = []
    real = ort_library._open_fastest

    def counted(*arguments: object) -> object:
        session, replaced = real(*arguments)  # type: ignore[arg-type]
        opened.append(replaced)
        return session, replaced

    monkeypatch.setattr(ort_library, "_open_fastest", counted)
    with open_session(folder, threads=1) as session:
        fast = session.generate("class Stack:", max_tokens=24, draft_length=3).text()
    assert all(opened)
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
    folder = onnx_pair("int4")
    (data,) = folder.glob("target*.onnx_data")
    data.read_bytes()
    assert cached_share(data) == 1
    with open_session(folder, threads=1) as session:
        assert session.row_kernels
    assert cached_share(data) > 0.9
