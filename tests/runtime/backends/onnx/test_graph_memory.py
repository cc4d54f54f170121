"""The memory of ONNX graphs, computed before onnxruntime is given them: shapes as onnxruntime's own, and bombs that are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from onnx import TensorProto, helper, numpy_helper

from edge_runtime.backends.onnx import graph_memory
from edge_runtime.backends.onnx.devices import onnxruntime_module
from edge_runtime.backends.onnx.graph_memory import RULES, Value, check_graph_memory, output_values
from edge_runtime.backends.onnx.open import check_pair_memory, open_onnx
from edge_runtime.backends.onnx.target import OrtOptions, pair_of
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.onnx_file import read_graph
from edge_runtime.bundle.onnx_graph import CONTRIB_OPS, KERNELS, ONNX_OPS, check_onnx
from edge_runtime.errors import BackendError, BundleError

GB = 10**9
Bundles = Callable[..., Path]


Memory = Callable[[int | None], None]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Sets how many bytes the system says are available."""
    return lambda count: monkeypatch.setattr(graph_memory, "available_memory_bytes", lambda: count)


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def large(*shape: int) -> np.ndarray:
    return np.broadcast_to(np.float32(1), shape)


def i64(*items: int) -> np.ndarray:
    return np.array(items, np.int64)


def saved(
    folder: Path, nodes: Sequence[Any], inputs: dict[str, tuple[Any, ...]], constants: dict[str, np.ndarray], outputs: Sequence[str]
) -> Path:
    """Writes a graph of float32 inputs."""
    passed = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)) for name, shape in inputs.items()]
    passed += (
        [helper.make_tensor_value_info("draft_length", TensorProto.INT64, [])] if any(node.op_type == "Loop" for node in nodes) else []
    )
    graph = helper.make_graph(
        list(nodes),
        "g",
        passed,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    path = folder / "g.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString())
    return path


def test_every_operator_that_is_admitted_has_a_shape() -> None:
    assert set(RULES) | {"If", "Loop"} == ONNX_OPS | CONTRIB_OPS


@pytest.mark.parametrize(
    ("operator", "arrays", "attributes"),
    [
        ("Add", [f32(3, 1, 4), f32(5, 1)], {}),
        ("ArgMax", [f32(3, 4)], {"axis": 1, "keepdims": 0}),
        ("Concat", [f32(2, 3), f32(2, 4)], {"axis": -1}),
        ("Conv", [f32(1, 2, 9, 8), f32(3, 2, 3, 3)], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("DynamicQuantizeLinear", [f32(2, 3)], {}),
        ("Expand", [f32(3, 1), i64(2, 1, 4)], {}),
        ("Flatten", [f32(2, 3, 4)], {"axis": 2}),
        ("Gather", [f32(5, 6, 7), np.zeros((2, 3), np.int64)], {"axis": 1}),
        ("MatMul", [f32(2, 1, 3, 4), f32(5, 4, 6)], {}),
        ("NonZero", [f32(3, 4)], {}),
        ("RMSNormalization", [f32(2, 4), f32(4)], {}),
        ("ReduceMax", [f32(2, 3, 4), i64(-1)], {"keepdims": 0}),
        ("ReduceMean", [f32(2, 3, 4), i64(0, 2)], {}),
        ("ReduceSum", [f32(2, 3)], {"keepdims": 0}),
        ("Reshape", [f32(2, 3, 4), i64(0, -1, 2)], {}),
        ("ScatterND", [f32(4, 2), np.zeros((3, 1), np.int64), f32(3, 2)], {"reduction": "add"}),
        ("Shape", [f32(2, 3, 4)], {"start": 1, "end": 3}),
        ("Slice", [f32(4, 6), i64(1), i64(3), i64(1)], {}),
        ("Softmax", [f32(2, 3)], {"axis": -1}),
        ("Split", [f32(2, 6), i64(2, 4)], {"axis": 1}),
        ("Split", [f32(2, 7)], {"axis": -1, "num_outputs": 2}),
        ("Squeeze", [f32(1, 3, 1), i64(-1)], {}),
        ("Squeeze", [f32(1, 3, 1)], {}),
        ("TopK", [f32(2, 6), i64(4)], {"axis": 1}),
        ("Transpose", [f32(2, 3, 4)], {"perm": [2, 0, 1]}),
        ("Transpose", [f32(2, 3, 4)], {}),
        ("Where", [f32(2, 1) > 0, f32(1, 3), f32(2, 1)], {}),
    ],
)
def test_shapes_are_those_of_onnxruntime(tmp_path: Path, operator: str, arrays: list[np.ndarray], attributes: dict[str, Any]) -> None:
    count = {"Split": 2, "TopK": 2, "DynamicQuantizeLinear": 3}.get(operator, 1)
    names, outputs = [f"c{n}" for n in range(len(arrays))], [f"y{n}" for n in range(count)]
    node = helper.make_node(operator, names, outputs, **attributes)
    path = saved(tmp_path, [node], {}, dict(zip(names, arrays, strict=True)), [])
    model = onnx.load(path)
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs)
    passed = onnxruntime_module().InferenceSession(onnx.shape_inference.infer_shapes(model).SerializeToString()).run(None, {})
    parsed = read_graph(path.read_bytes())
    values = [Value(array.shape, parsed.constants[name.encode()].integers) for name, array in zip(names, arrays, strict=True)]
    computed = output_values(parsed.nodes[0], values)
    assert [value.shape for value in computed] == [array.shape for array in passed]
    assert all(value.bytes >= array.nbytes for value, array in zip(computed, passed, strict=True))


def chain(operator: str, count: int, second: str | None = None, **attributes: Any) -> list[Any]:
    """y0 = x, and each next one is made of the one before."""
    return [helper.make_node(operator, [f"y{n}", second or f"y{n}"], [f"y{n + 1}"], **attributes) for n in range(count)]


def loop(*nodes: Any, outputs: Sequence[str]) -> Any:
    """A Loop that carries y0."""
    body = helper.make_graph(
        list(nodes),
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v0", TensorProto.FLOAT, None),
        ],
        [helper.make_empty_tensor_value_info(name) for name in ("go", *outputs)],
    )
    return helper.make_node("Loop", ["draft_length", "", "y0"], ["end"], body=body)


def branch(then: list[Any], otherwise: list[Any], *outputs: str) -> Any:
    """An If of these nodes; `outputs` are those of the branches."""
    graphs = [
        helper.make_graph(nodes, name, [], [helper.make_empty_tensor_value_info(output)])
        for nodes, name, output in zip((then, otherwise), "te", outputs, strict=True)
    ]
    return helper.make_node("If", ["yes"], ["z"], then_branch=graphs[0], else_branch=graphs[1])


BOMBS: dict[str, tuple[list[Any], dict[str, np.ndarray]]] = {
    "a column plus a row": ([helper.make_node("Add", ["column", "row"], ["y"])], {"column": large(300_000, 1), "row": large(300_000)}),
    "a column times a row": (
        [helper.make_node("MatMul", ["column", "row"], ["y"])],
        {"column": large(300_000, 1), "row": large(1, 300_000)},
    ),
    "a text twice, again and again": (chain("Concat", 40, axis=0), {"y0": large(100)}),
    "constants and an input": ([helper.make_node("Add", ["y0", "column"], ["a"]), *chain("Concat", 40, axis=0)], {"column": large(100, 1)}),
    "a row many times": (
        [helper.make_node("Gather", ["table", "many"], ["y"])],
        {"table": large(1, 1_000_000), "many": np.broadcast_to(np.int64(0), 200_000)},
    ),
    "a shape of its own": ([helper.make_node("Reshape", ["y0", "shape"], ["y"])], {"shape": i64(1 << 40, 1)}),
    "a product with more columns than weights": (
        [helper.make_node("MatMulNBits", ["y0", "k", "k"], ["y"], domain="com.microsoft", K=10, N=1 << 40, bits=4, block_size=16)],
        {"k": large(1)},
    ),
    "each half of a mask": (
        [*chain("Concat", 25, axis=0), helper.make_node("NonZero", ["y25"], ["p"]), helper.make_node("Gather", ["table", "p"], ["y"])],
        {"table": large(4, 1000)},
    ),
    "a branch": ([branch(chain("Concat", 40, axis=0), [helper.make_node("Identity", ["y0"], ["z"])], "y40", "z")], {"yes": np.array(True)}),
    "what a loop collects": ([loop(*[helper.make_node("Add", ["v0", "k"], ["v1"])], outputs=["v0", "v1"])], {"k": large(80_000, 10_000)}),
    "weights in floats": (
        [helper.make_node("Cast", ["k"], [f"y{n}"], to=1) for n in range(3000)],
        {"k": np.broadcast_to(np.int8(1), 1_000_000)},
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_graphs_that_ask_for_more_memory_than_there_is_are_refused(name: str, tmp_path: Path, memory: Memory) -> None:
    nodes, constants = BOMBS[name]
    path = saved(tmp_path, nodes, {} if "y0" in constants else {"y0": (1, "n")}, {}, [])
    model = onnx.load(path)
    for key, value in constants.items():  # the weights' file is sparse
        if value.dtype == np.int64 and value.size < 10:
            model.graph.initializer.append(numpy_helper.from_array(value, key))
            continue
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        tensor = TensorProto(name=key, data_type=kind, dims=value.shape, data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="w")
        model.graph.initializer.append(tensor)
    with (tmp_path / "w").open("wb") as file:
        file.truncate(8 * max((value.size for value in constants.values()), default=0))
    path.write_bytes(model.SerializeToString())
    memory(8 * GB)
    check_onnx(path)
    with pytest.raises(BackendError, match=r"needs .* GB or more for its values, 8.00 GB of memory are available"):
        check_graph_memory(path, {"y0": (1, 100)})


@pytest.mark.parametrize(
    ("nodes", "constants", "message"),
    [
        ([helper.make_node("Concat", ["y0", "y0"], ["a"], axis=0), helper.make_node("Reshape", ["y0", "s"], ["y"])], {}, "reads 's'"),
        ([loop(helper.make_node("Concat", ["v0", "v0"], ["v1"], axis=0), outputs=["v1"])], {}, "grows with each iteration"),
        ([helper.make_node("Transpose", ["y0"], ["y"], perm=[0, 0])], {}, "Transpose of 2 dimensions"),
        ([helper.make_node("Concat", ["y0", "k"], ["y"], axis=0)], {"k": f32(1)}, "different numbers of dimensions"),
        ([helper.make_node("Gather", ["y0", "k"], ["y"], axis=5)], {"k": i64(1)}, "axis 5"),
        ([helper.make_node("Expand", ["y0", "y0"], ["y"])], {}, "not known beforehand"),
        ([helper.make_node("MatMul", ["y0", "k"], ["y"])], {"k": f32(1)}, "MatMul of"),
        ([helper.make_node("Split", ["y0", "k"], ["y"], axis=1)], {"k": i64(-5)}, "that none can have"),
        ([branch([helper.make_node("Identity", ["y0"], ["s"])], [], "s", "none")], {"yes": np.array(True)}, "'none' is given by no node"),
    ],
)
def test_graphs_without_a_shape_are_refused(nodes: list[Any], constants: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    path = saved(tmp_path, nodes, {"y0": (1, "n")}, constants, [])
    with pytest.raises(BundleError, match=message):
        check_graph_memory(path, {"y0": (1, 100)})


def test_an_input_that_the_runtime_does_not_give_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, [helper.make_node("Add", ["x", "x"], ["y"])], {"x": ("n",)}, {}, ["y"])
    with pytest.raises(BundleError, match="'x' is none that the runtime gives"):
        check_graph_memory(path, {})


NEEDS: dict[str, tuple[list[Any], dict[str, tuple[Any, ...]], dict[str, np.ndarray], dict[str, tuple[int, ...]], int]] = {
    "values count from the node that makes them to the last reader": (
        [
            helper.make_node("Add", ["x", "x"], ["a"]),
            helper.make_node("MatMul", ["a", "one"], ["b"]),  # a 4000, b 400
            helper.make_node("Add", ["b", "b"], ["c"]),  # b 400, c 400
            helper.make_node("MatMul", ["c", "wide"], ["y"]),  # c 400, y 4000
        ],
        {"x": (100, None)},
        {"one": f32(10, 1), "wide": f32(1, 10)},
        {"x": (100, 10)},
        4400,
    ),
    "what constants alone make is kept": (
        [helper.make_node("Add", [left, right], [made]) for left, right, made in ("kka", "akb", "xxy")],
        {"x": (1, None)},
        {"k": f32(100)},
        {"x": (1, 1000)},
        400 + 400 + 4000,
    ),
    "inputs of the runtime cost nothing, and others their size": (
        [helper.make_node("Add", ["x", "own"], ["y"]), helper.make_node("Add", ["input_ids", "input_ids"], ["z"])],
        {"x": (None,), "own": (50,), "input_ids": (None,)},
        {},
        {"x": (50,), "input_ids": (10,)},
        200 + 200 + 80,  # own, y, and z in int64
    ),
    "inputs that are left out at the end are none": (
        [helper.make_node("Slice", ["x", "from", "to", "", ""], ["y"])],
        {"x": (None,)},
        {"from": i64(0), "to": i64(5)},
        {"x": (100,)},
        400,
    ),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_graph_needs_what_its_values_take(name: str, tmp_path: Path) -> None:
    nodes, inputs, constants, given, needed = NEEDS[name]
    assert check_graph_memory(saved(tmp_path, nodes, inputs, constants, ["y"]), given) == needed


@pytest.mark.parametrize("swapped", [False, True])
def test_the_larger_branch_counts_beside_what_is_held(tmp_path: Path, swapped: bool) -> None:
    small, big = [helper.make_node("Identity", ["x"], ["s"])], chain("Concat", 2, axis=0)
    big[0] = helper.make_node("Concat", ["x", "x"], ["y1"], axis=0)
    chosen = branch(big, small, "y2", "s") if swapped else branch(small, big, "s", "y2")
    nodes = [
        helper.make_node("Add", ["x", "x"], ["held"]),
        chosen,
        helper.make_node("Add", ["z", "z"], ["a"]),
        helper.make_node("Add", ["held", "x"], ["y"]),
    ]
    path = saved(tmp_path, nodes, {"x": (None,)}, {"yes": np.array(True)}, ["y"])
    # held, and in the branch y1 and y2: 400 + 800 + 1600; after it held, z and a: 400 + 1600 + 1600.
    assert check_graph_memory(path, {"x": (100,)}) == 3600
    assert check_graph_memory(path, {"x": (100,)}, {"x": (200,)}, {"x": (10,)}) == 7200


def test_what_a_branch_needs_meanwhile_counts_beside_what_is_held(tmp_path: Path) -> None:
    inside = [helper.make_node("Concat", ["x", "x"], ["y1"], axis=0), helper.make_node("Concat", ["y1", "y1"], ["y2"], axis=0)]
    nodes = [
        helper.make_node("Add", ["x", "x"], ["held"]),
        branch([*inside, helper.make_node("Identity", ["x"], ["s"])], [helper.make_node("Identity", ["x"], ["t"])], "s", "t"),
        helper.make_node("Add", ["held", "z"], ["y"]),
    ]
    path = saved(tmp_path, nodes, {"x": (None,)}, {"yes": np.array(True)}, ["y"])
    assert check_graph_memory(path, {"x": (100,)}) == 400 + 800 + 1600
    assert check_graph_memory(path, {"x": (0,)}) == 0, "a cache without rows"


def test_a_loop_holds_its_start_and_all_that_it_collects(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["x", "x"], ["y0"]),
        loop(helper.make_node("Add", ["v0", "v0"], ["v1"]), helper.make_node("Add", ["v1", "v1"], ["v2"]), outputs=["v1", "v2"]),
    ]
    nodes[1].output.append("all")
    path = saved(tmp_path, nodes, {"x": (None,)}, {}, ["end", "all"])
    # Inside, values may be int64: y0 in floats (twice: as it is and as the start), v1 and v2 wide. After it: y0, the end and 12 of v2.
    inside, after = 2 * 400 + 2 * 800, 400 + 800 + 12 * 800
    assert check_graph_memory(path, {"x": (100,)}) == max(inside, after) + 8  # draft_length


@pytest.mark.parametrize(("outputs", "message"), [(["v0", "v1"], "grows with each iteration"), (["v0"], None)])
def test_each_value_that_a_loop_carries_keeps_its_size(tmp_path: Path, outputs: list[str], message: str | None) -> None:
    repeated = loop(helper.make_node("Concat", ["v0", "v0"], ["v1"], axis=0), outputs=outputs)
    repeated.input.append("y0")  # a second carried value; the loop may give fewer than it is given
    nodes = [helper.make_node("Add", ["x", "x"], ["y0"]), repeated]
    path = saved(tmp_path, nodes, {"x": (None,)}, {}, [])
    if message is None:
        assert check_graph_memory(path, {"x": (100,)}) > 0
    else:
        with pytest.raises(BundleError, match=message):
            check_graph_memory(path, {"x": (100,)})


def test_a_graph_that_takes_all_there_is_fits(tmp_path: Path, memory: Memory) -> None:
    path = saved(tmp_path, [helper.make_node("Add", ["x", "x"], ["y"])], {"x": (None,)}, {}, ["y"])
    memory(400)
    assert check_graph_memory(path, {"x": (100,)}) == 400
    with pytest.raises(BackendError, match="404 B or more for its values, 400 B of memory"):
        check_graph_memory(path, {"x": (101,)})


@pytest.mark.parametrize(("size", "fits"), [(2 << 30, True), ((2 << 30) + 1, False)])
def test_where_the_system_does_not_say_there_are_8_gib(tmp_path: Path, memory: Memory, size: int, fits: bool) -> None:
    path = saved(tmp_path, [helper.make_node("Add", ["x", "x"], ["y"])], {"x": (None,)}, {}, ["y"])
    memory(None)
    if fits:
        assert check_graph_memory(path, {"x": (size,)}) == 4 * size
    else:
        with pytest.raises(BackendError, match=r"8\.59 GB of memory are available"):
            check_graph_memory(path, {"x": (size,)})


def called(folder: Path, name: str, *nodes: Any, calls: int = 1, inputs: Sequence[str] = ("x",), **attributes: Any) -> Path:
    """Writes a graph that calls a function of one or two inputs, a and b, and the output c."""
    made = [helper.make_node(name, inputs, [f"y{n}"], domain=KERNELS, **attributes) for n in range(calls)]
    path = saved(folder, made, {"x": (1, None, 10)}, {"w": f32(10)}, [f"y{n}" for n in range(calls)])
    model = onnx.load(path)
    model.functions.append(helper.make_function(KERNELS, name, ["a", "b"][: len(inputs)], ["c"], nodes, [helper.make_opsetid("", 23)]))
    path.write_bytes(model.SerializeToString())
    return path


def test_a_function_takes_what_its_nodes_take_and_each_call_has_its_constants(tmp_path: Path) -> None:
    twice = helper.make_node("Concat", ["a", "a"], ["twice"], axis=1), helper.make_node("Slice", ["twice", "s", "e", "e"], ["c"])
    ends = [helper.make_node("Constant", [], [name], value=numpy_helper.from_array(i64(number))) for name, number in (("s", 0), ("e", 1))]
    path = called(tmp_path, "Mine", *ends, *twice, calls=3)
    check_onnx(path)
    # Of 100 rows: inside of the last call twice as many, and one that it gives, beside those of the calls before.
    assert check_graph_memory(path, {"x": (1, 100, 10)}) == 2 * 40 + 8000 + 40 + 3 * 16


def test_a_function_that_asks_for_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    path = called(
        tmp_path, "Mine", *[helper.make_node("Concat", ["abcdefgh"[n]] * 2, ["abcdefgh"[n + 1]], axis=1) for n in range(7)], calls=1
    )
    model = onnx.load(path)
    model.functions[0].output[0] = "h"
    path.write_bytes(model.SerializeToString())
    check_onnx(path)
    with pytest.raises(BackendError, match="memory are available"):
        check_graph_memory(path, {"x": (1, 1 << 30, 10)})


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    [
        *((name, ["x"], {"K": 10, "N": 1 << 40, "bits": 8, "block_size": 16}) for name in ("MatMulRows", "MatMulCapRows", "MatMulStatic")),
        ("FeedForwardRows", ["x"], {"second_N": 1 << 40}),
        ("MatMulHalves", ["x", "x"], {}),
        ("NormRows", ["x"], {}),
        ("ResidualRows", ["x"], {}),
        ("AttendRows", ["x"], {}),
    ],
)
def test_a_kernel_that_gives_more_than_its_function_is_refused(
    operator: str, inputs: list[str], attributes: dict[str, int], tmp_path: Path
) -> None:
    """Where kernels run, what the function says does not count."""
    small = helper.make_node("ReduceMax", ["a"], ["c"])
    with pytest.raises(BundleError, match=f"the kernel of {operator} gives more than the function of that name"):
        check_graph_memory(called(tmp_path, operator, small, inputs=inputs, **attributes), {"x": (1, 100, 10)})
    same = called(tmp_path, "Other", small, inputs=inputs, **attributes)
    assert check_graph_memory(same, {"x": (1, 100, 10)}) < 100


def test_a_pair_is_refused_before_onnxruntime_has_it(onnx_pair: Bundles, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(onnx_pair("int4"))
    files = pair_of(bundle, drafter=True)
    needed = {context: check_pair_memory(files, context) for context in (64, 512, 1024)}
    assert 1_000_000 < needed[64] < needed[1024] < 100_000_000
    memory(needed[64])
    monkeypatch.setattr("edge_runtime.backends.onnx.devices._open", lambda *_: pytest.fail("onnxruntime was given a graph"))
    with pytest.raises(BackendError, match="ask for a shorter context"):
        open_onnx(bundle, OrtOptions(context=1024, threads=1), None)


def test_what_a_process_may_map_is_a_limit_too(onnx_pair: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(onnx_pair("int4"))
    monkeypatch.setattr(graph_memory, "address_space_left", lambda: 1 << 20)
    with pytest.raises(BackendError, match=r"for its values and the KV cache, 1.0 MB of memory are available"):
        open_onnx(bundle, OrtOptions(context=1024, threads=1), None)
