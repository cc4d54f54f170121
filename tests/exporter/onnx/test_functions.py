"""Which operators of the kernels each member's graphs name, and that each function computes what its kernel does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

onnx = pytest.importorskip("onnx", reason="needs edge-mtp[export]")
ort = pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from onnx import TensorProto, helper

from changed_bundle import nodes_of
from edge_export.onnx.request import OnnxRequest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_runtime.backends.kernels import loader
from edge_runtime.bundle.onnx_graph import KERNELS
from published_formats import to_mobile
from tiny_media import write_media_assistant, write_media_member
from tiny_members import write_member

Bundles = Callable[..., Path]
built = pytest.mark.skipif(not loader.usable_variants(), reason="the row kernels were not built: pip install -e . builds them")
NORMS = {"NormRows", "ResidualRows"}
LAYERS = NORMS | {"MatMulRows"}
BUFFERS = {"AttendBuffers", "ReadBuffers"}
PAST, TOKENS, ROWS = 20, 5, 64


def named(folder: Path) -> dict[str, set[str]]:
    """The operators of the kernels in each graph of a bundle, by the first word of its file's name but for the target's head."""
    found = {}
    for path in folder.glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        nodes = list(nodes_of(model.graph))
        own = {node.op_type for node in nodes if node.domain == KERNELS}
        assert own == {function.name for function in model.functions}
        assert bool(own) == any(opset.domain == KERNELS for opset in model.opset_import)
        # Float matrices beside those in blocks stay: routers, and rows of a sparse head.
        assert not own or "MatMulNBits" not in {node.op_type for node in nodes}
        found["head" if "head" in path.name else path.name.split("-")[0]] = own
    return found


@pytest.mark.parametrize(
    ("member", "target", "drafter"),
    [
        ("e2b", LAYERS | BUFFERS | {"AttendRows", "FeedForwardRows"}, LAYERS),
        ("e4b", LAYERS | BUFFERS, LAYERS | {"ReadBuffers"}),
        ("12b", LAYERS | {"AttendBuffers", "AttendRows"}, LAYERS | {"ReadBuffers"}),
        ("31b", LAYERS | {"AttendBuffers", "AttendRows"}, LAYERS | {"ReadBuffers"}),
        ("26b-a4b", LAYERS | BUFFERS, LAYERS | {"ReadBuffers"}),
    ],
)
def test_each_member_names_the_operators_it_has(member: str, target: set[str], drafter: set[str], exported: Callable[..., Any]) -> None:
    """On toys: their gates have 96 outputs and fit no kernel, but for the wide ones of E2B, which have 192."""
    bundle = exported(member, verify=False, onnx=OnnxRequest(target="int4", drafter="int8", block=32))
    assert named(bundle.folder) == {"target": target, "head": {"MatMulCapRows"}, "drafter": drafter}


@pytest.mark.parametrize(
    ("weights", "changes", "target", "head", "drafter"),
    [
        ("f32", {}, set(), set(), set()),
        ("f16", {}, set(), set(), set()),
        ("f32", {"embedding": "int8"}, set(), {"MatMulCapRows"}, set()),
        ("int8", {"kv": "f16"}, LAYERS | {"AttendRows", "FeedForwardRows"}, {"MatMulCapRows"}, LAYERS | {"FeedForwardRows"}),
        ("int8", {"kv": "int8"}, LAYERS | {"AttendRows", "FeedForwardRows"}, {"MatMulCapRows"}, LAYERS | {"FeedForwardRows"}),
        ("int4", {}, LAYERS | BUFFERS | {"AttendRows", "FeedForwardRows"}, {"MatMulCapRows"}, LAYERS | {"FeedForwardRows"}),
    ],
)
def test_kernels_are_named_where_weights_are_in_blocks(
    weights: str, changes: dict[str, Any], target: set[str], head: set[str], drafter: set[str], onnx_pair: Bundles
) -> None:
    """The shipped pair. Kernels attend to float32 rows in buffers."""
    assert named(onnx_pair(weights, **changes)) == {"target": target, "head": head, "drafter": drafter}


def test_graphs_of_fixed_shapes_name_none(exported: Callable[..., Any]) -> None:
    assert set(map(len, named(exported("e2b", "int4", "static", verify=False).folder).values())) == {0}


@pytest.fixture(params=["shipped", "e4b", "26b-a4b", "trained", "towers"])
def graphs(request: pytest.FixtureRequest, exported: Callable[..., Any], onnx_pair: Bundles, tmp_path: Path) -> list[Path]:
    """Graphs that name all operators between them."""
    pair = OnnxRequest(target="int4", drafter="int8", block=32)
    if request.param == "shipped":
        return sorted(onnx_pair("int4").glob("*.onnx"))
    if request.param in ("e4b", "26b-a4b"):
        return sorted(exported(request.param, "int4", verify=False, onnx=pair).folder.glob("*.onnx"))
    target, drafter, changes = tmp_path / "target", tmp_path / "drafter", dict[str, Any]()
    if request.param == "trained":
        write_member("e2b", target)
        to_mobile(target, compressed=False)
        write_member("e2b-assistant", drafter)
        pair = OnnxRequest()
    else:
        write_media_member(target)
        write_media_assistant(drafter)
        changes = {"media": "q8_0"}
    places = {"target": str(target), "drafter": str(drafter), "output": tmp_path / "out"}
    export_pair(ExportRequest(**places, gguf=False, onnx=pair, verify=False, **changes))
    return sorted((tmp_path / "out").glob("*-encoder-*.onnx" if changes else "*.onnx"))


def flat(model: Any) -> Any:
    """The graph with the body of its Loop in the Loop's place; its inputs are all that nobody gives."""
    graph = model.graph
    loops = [node for node in graph.node if node.op_type == "Loop"]
    if loops:
        (body,) = (attribute.g for attribute in loops[0].attribute)
        nodes = [*(node for node in graph.node if node is not loops[0]), *body.node]
        inputs = [*graph.input, *body.input]
        graph = helper.make_graph(nodes, "g", inputs, [], [*graph.initializer, *body.initializer])
    del graph.output[:]
    return graph


def drawn(value: Any) -> NDArray[Any]:
    """An input of a graph, of TOKENS rows behind PAST ones."""
    random, name, kind = np.random.default_rng(len(value.name)), value.name, value.type.tensor_type
    sizes = {"tokens": TOKENS, "context": 2 * ROWS, "soft": 1, "patches": 36, "frames": 48, "filler": 12, "blocks": 1}
    shape = [size.dim_value or sizes.get(size.dim_param, PAST if size.dim_param.startswith("rows_of") else ROWS) for size in kind.shape.dim]
    if name.startswith("position"):
        return PAST + (np.arange(TOKENS) if shape[1] == TOKENS else np.array([TOKENS]))[None]  # a drafter's is behind all rows
    if name.startswith(("last_row", "rows_")):
        return np.full(shape, PAST + TOKENS - name.startswith("last_row"), np.int32)
    if name == "skipped_rows":
        return np.array([2])
    if name.startswith(("cosine", "sine")):
        angles = random.uniform(0, 6, shape)
        return (np.cos(angles) if name.startswith("cosine") else np.sin(angles)).astype(np.float32)
    if kind.elem_type == TensorProto.BOOL:
        return np.ones(shape, bool)
    if kind.elem_type == TensorProto.INT64:
        return random.integers(0, 4, shape)
    return np.zeros(shape, np.float32) if name == "mask" else random.standard_normal(shape).astype(np.float32)


def run(graph: Any, functions: Any, feeds: dict[str, Any], folder: Path, *, kernels: bool) -> dict[str, NDArray[Any]]:
    opsets = [helper.make_opsetid(*each) for each in (("", 23), ("com.microsoft", 1), (KERNELS, 1))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11, functions=functions)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    if kernels:
        options.register_custom_ops_library(str(loader.kernels_path()))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, {name: array for name, array in feeds.items() if name in wanted}), strict=True))


def captured(model: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The graph, and all values that its operators of the kernels read and give, computed by their functions."""
    graph = flat(model)
    feeds = {value.name: drawn(value) for value in graph.input}
    values = {name for node in graph.node if node.domain == KERNELS for name in (*node.input, *node.output)}
    given = {name for node in graph.node for name in node.output}
    graph.output.extend(helper.make_empty_tensor_value_info(name) for name in sorted(values & given))
    return graph, feeds | run(graph, model.functions, feeds, folder, kernels=False)


def alone(node: Any, graph: Any, feeds: dict[str, Any]) -> Any:
    """A graph of one node."""
    weights = [tensor for tensor in graph.initializer if tensor.name in node.input]
    constants = {tensor.name for tensor in weights}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(feeds[name].dtype), feeds[name].shape)
        for name in dict.fromkeys(node.input)
        if name and name not in constants
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
    return helper.make_graph([node], "g", inputs, outputs, weights)


@built
def test_each_function_computes_what_its_kernel_does(graphs: list[Path]) -> None:
    """A kernel wins whatever its function says: so the function's numbers are compared, on the values that it gets in its graph."""
    compared = set[tuple[str, str]]()
    for path in graphs:
        model = onnx.load(path, load_external_data=False)
        graph, values = captured(model, path.parent)
        for node in graph.node:
            if node.domain != KERNELS or (path.name + node.op_type, node.overload) in compared:
                continue
            compared.add((path.name + node.op_type, node.overload))
            one = alone(node, graph, values)
            stock, ours = (run(one, model.functions, values, path.parent, kernels=kernels) for kernels in (False, True))
            facts = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
            for place, name in enumerate(node.output):
                written = PAST + TOKENS if place and node.op_type == "AttendBuffers" else None  # rows of buffers behind those were not
                expected, actual = (found[name][:, :, :written] if written else found[name] for found in (stock, ours))
                assert expected.shape == actual.shape
                difference, largest = np.abs(expected - actual), float(np.abs(expected).max(initial=0))
                # Where activations are rounded, a value on the edge of two levels may get either.
                rounded = "MatMul" in node.op_type or node.op_type == "FeedForwardRows"
                allowed = max(0.03 * largest, 1.01 * facts.get("output_scale", 0)) if rounded else 1e-4 * max(1.0, largest)
                assert difference.max(initial=0) <= allowed, (path.name, node.op_type, node.overload)
                assert difference.mean() <= max(0.005 * largest, 1e-5), (path.name, node.op_type, node.overload)
    assert compared
