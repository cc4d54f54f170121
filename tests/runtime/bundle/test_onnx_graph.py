"""Graphs that would take any time or memory from a few bytes are refused before onnxruntime sees them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs edge-mtp[export-onnx]")

from onnx import TensorProto, helper, numpy_helper

from edge_runtime.bundle import onnx_file
from edge_runtime.bundle.onnx_file import MAX_GRAPH_BYTES
from edge_runtime.bundle.onnx_graph import KERNELS, LOOP_INPUT, check_onnx
from edge_runtime.errors import BundleError
from protobuf_messages import bytes_field

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def value(name: str, kind: int = FLOAT, shape: tuple[Any, ...] = ()) -> Any:
    return helper.make_tensor_value_info(name, kind, list(shape))


def whole(name: str, numbers: Any) -> Any:
    return numpy_helper.from_array(np.array(numbers, np.int64), name)


def graph_of(nodes: list[Any], constants: list[Any] | tuple[()] = (), inputs: list[Any] | None = None) -> Any:
    graph = helper.make_graph(nodes, "g", [value("x")] if inputs is None else inputs, [value("y")], list(constants))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def check(model: Any, folder: Path) -> None:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    check_onnx(path)


def loop(times: str) -> Any:
    inside = [value("i", INT64), value("go", BOOL), value("v")]
    nodes = [helper.make_node("Identity", ["go"], ["still"]), helper.make_node("Identity", ["v"], ["w"])]
    body = helper.make_graph(nodes, "body", inside, [value("still", BOOL), value("w")])
    return helper.make_node("Loop", [times, "", "x"], ["y"], body=body)


def counted(*nodes: Any, constants: tuple[Any, ...] = ()) -> Any:
    return graph_of(list(nodes), list(constants), [value("x"), value(LOOP_INPUT, INT64), value("other", INT64)])


def test_a_loop_goes_round_as_often_as_the_runtime_says(tmp_path: Path) -> None:
    check(counted(loop(LOOP_INPUT)), tmp_path)
    body = helper.make_graph([loop(LOOP_INPUT)], "inner", [], [value("y")])
    around = helper.make_node("If", ["c"], ["z"], then_branch=body, else_branch=body)
    for hostile in (
        graph_of([loop("n")], [whole("n", 1 << 62)]),
        counted(loop("")),
        counted(loop("other")),
        graph_of([loop(LOOP_INPUT)]),
        counted(loop(LOOP_INPUT), constants=(whole(LOOP_INPUT, 1 << 62),)),
        counted(loop(LOOP_INPUT), loop(LOOP_INPUT)),
        counted(around),
    ):
        with pytest.raises(BundleError, match=r"Loop"):
            check(hostile, tmp_path)


def test_what_is_repeated_is_repeated_for_a_few_heads(tmp_path: Path) -> None:
    repeated = helper.make_node("Expand", ["x", "shape"], ["y"])
    check(graph_of([repeated], [whole("shape", [1, 64, 1])]), tmp_path)
    branch = helper.make_graph([repeated], "inner", [], [value("y")])
    around = helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch)
    for nodes, constants in (
        ([repeated], [whole("shape", [1, 2 << 30])]),
        ([repeated], [whole("shape", [1000] * 9)]),
        ([repeated], [whole("shape", [-1])]),
        ([repeated], []),
        ([repeated], [whole("shape", [4]), whole("shape", [1 << 40])]),
        ([around], [whole("shape", [1, 64, 1])]),
    ):
        with pytest.raises(BundleError, match=r"Expand"):
            check(graph_of(nodes, constants), tmp_path)


@pytest.mark.parametrize("kind", ["ConstantOfShape", "Range", "Scan", "Tile", "Pad", "SequenceMap", "Resize", "OneHot", "RandomNormal"])
def test_operators_that_make_much_of_little_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=f"operator '{kind}'"):
        check(graph_of([helper.make_node(kind, ["x"], ["y"])]), tmp_path)


def test_operators_are_those_of_their_own_domain(tmp_path: Path) -> None:
    for domain, kind in (("com.microsoft", "Add"), ("", "GroupQueryAttention"), ("mine", "Add"), ("com.microsoft", "EPContext")):
        with pytest.raises(BundleError, match=f"operator '{kind}' of '{domain}'"):
            check(graph_of([helper.make_node(kind, ["x"], ["y"], domain=domain)]), tmp_path)


def function(*nodes: Any, name: str = "Mine", overload: str = "", domain: str = KERNELS) -> Any:
    made = helper.make_function(domain, name, ["a"], ["b"], nodes, [helper.make_opsetid("", 21)])
    made.overload = overload
    return made


def call(name: str = "Mine", overload: str = "", into: str = "y") -> Any:
    node = helper.make_node(name, ["x"], [into], domain=KERNELS)
    node.overload = overload
    return node


def constant(numbers: Any, **others: Any) -> Any:
    return helper.make_node("Constant", [], ["s"], value=whole("", numbers), **others)


SAME = helper.make_node("Identity", ["a"], ["b"])
REPEATED = helper.make_node("Expand", ["a", "s"], ["b"])
IN_A_FILE = TensorProto(data_type=INT64, dims=[1], data_location=TensorProto.EXTERNAL)
IN_A_FILE.external_data.add(key="location", value="model.onnx")
PASSED_ON = helper.make_node("Softmax", ["a"], ["b"])
PASSED_ON.attribute.add(name="axis", type=onnx.AttributeProto.INT, ref_attr_name="axis")


def with_functions(*functions: Any, calls: int = 1, node: Any = None) -> Any:
    model = graph_of([node] if node is not None else [call(into=f"y{number}") for number in range(calls)])
    model.functions.extend(functions)
    return model


def test_functions_of_trusted_operators_are_taken(tmp_path: Path) -> None:
    """Some of one name, told apart by their overloads; constants are their own."""
    both = function(SAME, overload="1"), function(constant([1, 64, 1]), REPEATED, overload="2")
    model = graph_of([call(overload="1"), call(overload="2", into="z")])
    model.functions.extend(both)
    check(model, tmp_path)
    branch = helper.make_graph([call()], "inner", [], [value("y")])
    check(with_functions(function(SAME), node=helper.make_node("If", ["x"], ["z"], then_branch=branch, else_branch=branch)), tmp_path)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (with_functions(function(SAME, domain="")), "a function of ''"),
        (with_functions(function(SAME, name="Add", domain="com.microsoft"), node=helper.make_node("Add", ["x"], ["y"])), "a function of"),
        (with_functions(function(helper.make_node("Mine", ["a"], ["b"], domain=KERNELS))), "operator 'Mine' of 'edge.mtp'"),
        (
            with_functions(function(SAME, name="Other"), function(helper.make_node("Other", ["a"], ["b"], domain=KERNELS))),
            "operator 'Other'",
        ),
        (with_functions(function(SAME), function(SAME)), "two functions of the name 'Mine'"),
        (with_functions(), "operator 'Mine' of 'edge.mtp'"),
        (with_functions(function(SAME, overload="1")), "operator 'Mine' of 'edge.mtp'"),
        (with_functions(function(SAME), node=helper.make_node("Mine", ["x"], ["y"])), "operator 'Mine' of ''"),
        (with_functions(function(helper.make_node("Range", ["a", "a", "a"], ["b"]))), "operator 'Range'"),
        (with_functions(function(REPEATED)), "operator 'Expand'"),
        (with_functions(function(constant([1 << 40]), REPEATED)), "operator 'Expand'"),
        (with_functions(function(constant([1]), helper.make_node("Expand", ["a"], ["b"]))), "operator 'Expand'"),
        (with_functions(function(loop("a"))), "holds a graph"),
        (with_functions(function(PASSED_ON)), "field 21 of a attribute"),
        (with_functions(function(helper.make_node("Constant", [], ["b"], value_int=3))), "a Constant of a function is none of one tensor"),
        (with_functions(function(helper.make_node("Constant", [], [], value=whole("", 3)))), "a Constant gives something else"),
        (with_functions(function(helper.make_node("Constant", [], ["b"], value=IN_A_FILE))), "lies in a file"),
        (graph_of([helper.make_node("Constant", [], ["y"], value=whole("", 3))]), "operator 'Constant'"),
        (graph_of([helper.make_node("Identity", ["x"], ["y"], value=whole("", 3))]), "a tensor as an attribute"),
        (with_functions(function(*[SAME] * 2000), calls=300), "make more than 524288 nodes"),
        (with_functions(function(constant([1] * (1 << 18)), SAME), calls=40), "67108864 bytes of constants"),
        (with_functions(*(function(SAME, overload=str(number)) for number in range(4097))), "more than 4096 functions"),
    ],
)
def test_functions_compute_nothing_that_a_graph_may_not(model: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=words):
        check(model, tmp_path)


def test_sparse_or_empty_tensors_are_refused(tmp_path: Path) -> None:
    few = helper.make_tensor("s", FLOAT, [1], [1.0])
    model = graph_of([helper.make_node("Identity", ["s"], ["y"])])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(few, whole("i", [0]), [3_000_000_000]))
    with pytest.raises(BundleError, match="field 15 of a graph"):
        check(model, tmp_path)
    with pytest.raises(BundleError, match="does not have the 12000000000 bytes"):
        check(graph_of([], [TensorProto(name="t", data_type=FLOAT, dims=[3_000_000_000])]), tmp_path)


@pytest.mark.parametrize("kind", ["opsets", "names", "inputs", "nodes", "names of a node", "a function's names"])
def test_fields_without_end_are_refused_and_take_little(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes are the least a field has; as many as are allowed take some 3 seconds."""
    monkeypatch.setattr(onnx_file, "MAX_FIELDS", 50_000)
    pieces = {"opsets": b"\x42\0", "names": b"\x12\0", "inputs": b"\x5a\0", "nodes": b"\x0a\x05\x22\x03Add", "names of a node": b"\x0a\0"}
    pieces["a function's names"] = b"\x22\0"
    data = pieces[kind] * ((512 << 10) // len(pieces[kind]))
    if kind == "names of a node":
        data = bytes_field(1, data)
    path = tmp_path / "model.onnx"
    path.write_bytes(
        data if kind == "opsets" else bytes_field(7, b"") + bytes_field(25, data) if "function" in kind else bytes_field(7, data)
    )
    size = path.stat().st_size
    tracemalloc.start()
    with pytest.raises(BundleError, match=r"more than \d+ fields"):
        check_onnx(path)
    maximum = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert maximum < size + (2 << 20)


@pytest.mark.parametrize(
    ("data", "output"),
    [
        (bytes_field(7, b"") * 2, "more than one graph"),
        (
            bytes_field(7, bytes_field(1, bytes_field(4, b"If") + bytes_field(5, bytes_field(6, b"") * 2))),
            "an attribute holds more than one value",
        ),
        (
            bytes_field(7, bytes_field(1, bytes_field(4, b"Add") + bytes_field(5, b"\x18\x01\x18\x02"))),
            "an attribute holds more than one value",
        ),
        (bytes_field(7, bytes_field(1, bytes_field(4, b"Add") + bytes_field(5, bytes_field(8, b"\1" * 5000)))), "more than 4096 integers"),
        (bytes_field(7, bytes_field(11, bytes_field(2, b"\x0a\x7f"))), "cut off"),
        (bytes_field(7, b"\x08\x01"), "a number stands where"),
    ],
)
def test_what_readers_could_take_in_two_ways_is_refused(data: bytes, output: str, tmp_path: Path) -> None:
    """Protobuf joins messages that stand twice; of numbers the last one counts."""
    (tmp_path / "model.onnx").write_bytes(data)
    with pytest.raises(BundleError, match=output):
        check_onnx(tmp_path / "model.onnx")


def test_a_file_longer_than_any_graph_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.onnx").open("wb") as file:
        file.truncate(MAX_GRAPH_BYTES + 1)
    with pytest.raises(BundleError, match=r"cannot be read as a graph .it has more than"):
        check_onnx(tmp_path / "model.onnx")
