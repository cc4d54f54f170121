"""The row kernels in onnxruntime's place: which nodes they take, and that verifies of any size give each row the same products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

onnx = pytest.importorskip("onnx", reason="needs edge-mtp[export]")
pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from onnx import TensorProto, helper

from edge_runtime.backends.kernels import library
from edge_runtime.backends.onnx import library as ort_library
from edge_runtime.backends.onnx.row_kernels import DOMAIN, OPERATOR, with_row_kernels
from edge_runtime.session.open import open_session

Bundles = Callable[[str], Path]
built = pytest.mark.skipif(not library.usable_variants(), reason="the row kernels were not built: pip install -e . builds them")


def product(*extra: str, k: int = 64, block: int = 32, bits: int = 4) -> onnx.NodeProto:
    return helper.make_node("MatMulNBits", ["x", "b", "s", *extra], ["y"], domain="com.microsoft", K=k, N=8, bits=bits, block_size=block)


def model(*nodes: onnx.NodeProto) -> bytes:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(helper.make_graph(list(nodes), "g", [value], []), opset_imports=opsets).SerializeToString())


def test_products_in_the_graph_and_in_its_loops_are_replaced() -> None:
    body = helper.make_graph([product()], "body", [], [])
    loop = helper.make_node("Loop", ["n", ""], ["z"], body=body)
    changed, count = with_row_kernels(model(product(), loop, helper.make_node("Add", ["x", "x"], ["w"])))
    assert count == 2
    found = onnx.load_from_string(changed)
    inner = found.graph.node[1].attribute[0].g.node[0]
    for node in (found.graph.node[0], inner):
        assert (node.op_type, node.domain, list(node.input)) == (OPERATOR, DOMAIN, ["x", "b", "s"])
        assert {one.name: one.i for one in node.attribute} == {"K": 64, "N": 8, "bits": 4, "block_size": 32}
    assert found.graph.node[2] == helper.make_node("Add", ["x", "x"], ["w"])
    assert {(one.domain, one.version) for one in found.opset_import} == {("", 21), ("com.microsoft", 1), (DOMAIN, 1)}


@pytest.mark.parametrize(
    "node",
    [product("zero_points"), product(k=48), product(bits=3), product(block=256), helper.make_node("MatMulNBits", ["x", "b", "s"], ["y"])],
    ids=["zero points", "a block that is not full", "3 bits", "blocks of 256", "another domain"],
)
def test_what_the_kernels_do_not_take_stays(node: onnx.NodeProto) -> None:
    before = model(node)
    assert with_row_kernels(before) == (before, 0)


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
    monkeypatch.setenv(library.VARIABLE, "none")
    with open_session(folder, threads=1) as session:
        stock = session.generate("class Stack:", max_tokens=24, draft_length=0).text()
    assert fast[:16] == stock[:16]
