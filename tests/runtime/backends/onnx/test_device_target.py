"""The target on WebGPU, on a software driver: rows that stay on the device, its rollbacks, and the loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("onnx", reason="needs edge-mtp[export]")

import software_gpu
from edge_runtime.backends.onnx.device_graph import DeviceGraph, device_graph, has_branches, head_with_choices
from edge_runtime.backends.onnx.loader import Call
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.onnx_file import read_graph, with_graph
from random_pairs import random_bundle

Bundles = Callable[..., Path]
needs_webgpu = pytest.mark.skipif(bool(software_gpu.lacking()), reason=software_gpu.lacking() or "it is there")


def changed_graph(model: bytes) -> DeviceGraph | None:
    return device_graph(model, read_graph(model))


_TARGET = """
import json, sys
import numpy as np
from edge_runtime.backends.onnx.devices import device_named
from edge_runtime.backends.onnx.open import OrtOptions, open_onnx
from edge_runtime.bundle.bundle import open_bundle
pairs = [open_onnx(open_bundle(sys.argv[1]), OrtOptions(context=120, threads=2, device=device_named(name)), None)[:2]
         for name in ("cpu", "webgpu")]
tokens, parts = np.random.default_rng(1).integers(300, 512, 120).tolist(), {}
def both(part, run):
    rows = [np.asarray(run(*pair)).copy() for pair in pairs]
    parts[part] = float(np.abs(rows[0] - rows[1]).max())
def appended(start, stop):
    def run(target, drafter):
        target.prefill(tokens[start:stop])
        return target.verify(tokens[stop:stop + 4])
    return run
def verified(count):
    return lambda target, drafter: target.verify(tokens[target.length:target.length + count])
both("first prefill", appended(0, 20))
both("one row", verified(1))
both("drafts", lambda target, drafter: drafter.draft(tokens[25], 4))
for target, _ in pairs:
    target.rollback(22)
both("after a rollback", verified(13))
both("all rows of a state", lambda target, drafter: target.state().full.view(np.float32))
both("beyond the sliding buffers", appended(35, 90))
assert pairs[0][0].cache.lost > 0
both("drafts there", lambda target, drafter: drafter.draft(tokens[94], 4))
both("sliding rows of a state", lambda target, drafter: target.state().sliding[-12:].view(np.float32))
states = [target.state() for target, _ in pairs]
for (target, _), state in zip(pairs, states):
    held = target.tokens.tolist()
    target.rollback(0)
    target.restore(held, state)
both("behind a restored state", verified(4))
target = pairs[1][0]
place = target.length - 4
following = tokens[place:place + 4]
def chosen(suppressed):
    target.rollback(place)
    return [int(token) for token in target.choose(following, np.array(suppressed, np.intp))]
target.rollback(place)
best = target.verify(following).argmax(axis=1).tolist()
plain, without = chosen([]), chosen(best)
drafter = pairs[1][1]
drafter.draft(following[-1], 4)
from edge_runtime.backends.onnx.loader import Call
moved, run = {}, Call.run
def counted(call):
    run(call)
    moved[call._name] = sum(value.numpy().nbytes for value in call.copied.values()) + sum(array.nbytes for array in call.results().values())
Call.run = counted
target.choose(following, np.array(best, np.intp))
drafter.draft(following[-1], 4)
Call.run = run
result = {"parts": parts, "nodes": target.assignments(), "chosen": [best, plain, without], "bytes": moved}
"""

# In the same process, which has compiled the shaders. Of a random pair no draft is accepted: here all but the last of each are.
_LOOP = """
import edge_runtime
from edge_runtime.session import device_check
device_check._ROWS = 40  # a driver in software takes seconds for a thousand
open("fixed.yaml", "w").write("speculative_decoding: {tuning: {policy: fixed}}")  # no costs are measured
options = dict(backend="onnx", device="webgpu", config="fixed.yaml", threads=2, context=100)
prompt, sentences, answers = tokens[:30], [], []
def draft(self, last, count, *rest):
    given = self._target.length - len(prompt) + 1
    drafts = answers[0][given:given + count]
    return drafts[:-1] + [token ^ 1 for token in drafts[-1:]]
with edge_runtime.open_session(sys.argv[1], **options, notify=sentences.append) as session:
    type(drafter).draft = draft
    for length in (0, 3, 8):
        generation = session.generate(prompt, max_tokens=16, draft_length=length)
        generation.text()
        answers.append(list(generation.tokens))
    stats = generation.stats
    result |= {"answers": answers, "drafted": stats.drafted, "accepted": stats.accepted, "device": session.device, "sentences": sentences}
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a small random pair answers there: each product takes tens of milliseconds. Its buffers are as short as may be."""
    pytest.importorskip("torch", reason="random pairs are made with torch")
    from edge_export.onnx import export
    from edge_export.onnx.request import OnnxRequest

    folder, one_head = tmp_path_factory.mktemp("device"), {"num_attention_heads": 2, "num_key_value_heads": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "SPARE_ROWS", 32)
        graphs = OnnxRequest(target="f32", drafter="f32")
        _, bundle = random_bundle(140, folder, both=one_head, context=None, gguf=False, onnx=graphs)
    return software_gpu.run_on_it(_TARGET + _LOOP, str(bundle), folder=folder)


@pytest.mark.slow(15)
@needs_webgpu
def test_the_device_computes_what_the_cpu_does_and_its_rows_are_the_same(result: Any) -> None:
    assert max(result["parts"].values()) < 1e-3, result["parts"]
    best, plain, without = result["chosen"]
    assert plain == best
    assert not set(without) & set(best)
    hidden, rows = 64 * 4, 4 * 4 * 2 * (64 + 32)  # the last hidden row; four tokens' K and V of one sliding and one full layer
    moved = {name: count for name, count in result["bytes"].items() if name in result["nodes"]}  # those of the drafter stay on the CPU
    picked = moved.pop("picked-rows.onnx")
    assert hidden + rows <= picked < hidden + rows + 100
    assert sum(moved.values()) < 200, moved
    layers = next(nodes for name, nodes in result["nodes"].items() if "head" not in name)
    assert set(result["nodes"]["picked-rows.onnx"]) == {"WebGpuExecutionProvider"}
    assert layers["WebGpuExecutionProvider"]["GroupQueryAttention"] >= 6
    assert set(layers["CPUExecutionProvider"]) == {"Slice"}


@pytest.mark.slow(1)
@needs_webgpu
def test_a_checked_device_drafts_and_its_text_is_that_without_drafts(result: Any) -> None:
    assert result["device"] == "webgpu"
    plain, *drafted = result["answers"]
    assert len(plain) == 16
    assert drafted == [plain, plain]
    assert 0 < result["accepted"] < result["drafted"]
    assert any("webgpu computes what the CPU does" in sentence for sentence in result["sentences"])


def test_a_forward_reads_back_what_it_allocated_only() -> None:
    class OnDevice:
        def numpy(self) -> Any:
            raise AssertionError("a whole buffer was copied from the device")

    class Fresh:
        def numpy(self) -> Any:
            return np.ones(3)

    call = Call.__new__(Call)
    call._allocated = {"new_rows": 1}
    call._binding = SimpleNamespace(get_outputs=lambda: [OnDevice(), Fresh()])
    assert call.results()["new_rows"].tolist() == [1, 1, 1]


def router_graph(folder: Path) -> bytes:
    """A dense product, behind it a layer's experts, of which each row chooses two of four; both in float32."""
    from edge_export.onnx.graph_builder import GraphBuilder
    from edge_export.onnx.graphs.experts import ExpertWeights, add_experts
    from edge_export.onnx.weights import Matrix, Stored, WeightFormat

    hidden, experts = 8, 4
    values = np.random.default_rng(1).standard_normal(hidden * hidden).astype(np.float32)
    (folder / "weights").write_bytes(values.tobytes())

    def stored(*shape: int) -> Stored:
        return Stored(type="f32", shape=shape, location="weights", offset=0, length=4 * int(np.prod(shape)))

    def matrix(rows: int) -> Matrix:
        return Matrix(rows=rows, columns=hidden, format=WeightFormat(kind="f32"), values=stored(rows, hidden))

    graph, square = GraphBuilder("experts"), matrix(hidden)
    weights = ExpertWeights(
        norms={"pre_feedforward_layernorm_2": stored(hidden)},
        scale=stored(hidden),
        router=matrix(experts),
        expert_scale=stored(experts),
        experts=[(square, square)] * experts,
    )
    model: Any = SimpleNamespace(hidden_size=hidden, experts=experts, experts_used=2)
    value = graph.linear(graph.input("rows", "f32", (1, "n", hidden)), square)
    fed = add_experts(
        graph,
        model,
        weights,
        value,
        norm=lambda value, weight: graph.op("RMSNormalization", value, weight, axis=-1, epsilon=1e-6),
        gated=lambda inner, value, up, down: inner.linear(inner.linear(value, up), down),
    )
    graph.output(fed, "f32", (1, "n", hidden))
    graph.save(folder / "experts.onnx")
    return (folder / "experts.onnx").read_bytes()


def test_a_router_of_experts_is_not_rewritten(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = router_graph(tmp_path)
    changed = changed_graph(model)
    assert changed is not None
    operators = [node.operator for node in read_graph(changed.model).nodes]
    assert (operators.count("Gemm"), operators.count("FusedMatMul")) == (1, 1)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(tmp_path))
    rows = {"rows": np.random.default_rng(2).standard_normal((1, 5, 8)).astype(np.float32)}
    before, after = (onnxruntime.InferenceSession(graph, options).run(None, rows)[0] for graph in (model, changed.model))
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


def test_experts_are_branches(onnx_pair: Bundles, tmp_path: Path) -> None:
    """What a device refuses, with a sentence of its own."""
    assert has_branches(read_graph(router_graph(tmp_path)))
    assert not has_branches(read_graph(open_bundle(onnx_pair("f32")).path("target", "onnx").read_bytes()))


@pytest.mark.parametrize("parts", [7, 8, 35, 60])
def test_a_split_has_no_more_parts_than_a_shader_has_buffers(parts: int, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from edge_export.onnx.graph_builder import GraphBuilder

    graph = GraphBuilder("parts")
    pieces = graph.equal_parts(graph.input("rows", "f32", (1, "n", 2 * parts)), parts, 2)
    graph.output(graph.op("Concat", *reversed(pieces), axis=-1), "f32", (1, "n", 2 * parts))
    graph.save(tmp_path / "parts.onnx")
    changed = changed_graph((tmp_path / "parts.onnx").read_bytes())
    assert changed is not None
    assert all(len(node.outputs) <= 7 for node in read_graph(changed.model).nodes if node.operator == "Split")
    rows = np.arange(3 * 2 * parts, dtype=np.float32).reshape(1, 3, 2 * parts)
    (result,) = onnxruntime.InferenceSession(changed.model).run(None, {"rows": rows})
    assert result.tolist() == rows.reshape(1, 3, parts, 2)[:, :, ::-1].reshape(rows.shape).tolist()


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (2, 2)])
def test_a_strangers_head_is_refused(onnx_pair: Bundles, inputs: int, outputs: int) -> None:
    model = open_bundle(onnx_pair("f32")).path("target_head", "onnx").read_bytes()
    graph = read_graph(model)
    for node in graph.nodes:
        if node.operator == "FusedMatMul":
            node.inputs[inputs:], node.outputs[1:] = [], [b"other"] * (outputs - 1)
    assert head_with_choices(with_graph(model, graph, None)) is None


def test_a_head_chooses_as_its_logits_say(onnx_pair: Bundles) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = open_bundle(onnx_pair("f32")).path("target_head", "onnx")
    model = head_with_choices(path.read_bytes())
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    hidden = np.random.default_rng(0).standard_normal((1, 5, 256)).astype(np.float32)
    hidden[0, 4, 7] = np.nan
    mask = np.zeros((1, 1, 4096), np.float32)
    logits, choice = session.run(["logits", "choice"], {"hidden": hidden, "suppressed": mask})
    tokens, largest, smallest, total = choice[0].T
    assert tokens[:4].tolist() == logits[0, :4].argmax(axis=1).tolist()
    assert (largest[:4].tolist(), smallest[:4].tolist()) == (logits[0, :4].max(axis=1).tolist(), logits[0, :4].min(axis=1).tolist())
    assert np.isfinite(total).tolist() == [True] * 4 + [False]
    mask[..., int(tokens[0])] = -np.inf
    (other,) = session.run(["choice"], {"hidden": hidden, "suppressed": mask})
    assert other[0, 0, 0] == np.argsort(logits[0, 0])[-2]


def test_all_attention_becomes_an_operator_on_whole_buffers(onnx_pair: Bundles) -> None:
    bundle = open_bundle(onnx_pair("int4"))
    changed = changed_graph(bundle.path("target", "onnx").read_bytes())
    assert changed is not None
    nodes = read_graph(changed.model).nodes
    attention = [node for node in nodes if node.operator == "GroupQueryAttention"]
    assert all(len(node.outputs) == 3 for node in attention)
    assert not any(node.operator in ("FusedMatMul", "Softmax") for node in nodes)
    written = {name for buffer in bundle.manifest.cache_layout.buffers for name in (buffer.key, buffer.value)}
    assert set(changed.written.values()) == written


@pytest.mark.parametrize("place", [0, 3, 9])
@pytest.mark.parametrize("name", [b"", b"key.x", None])
def test_a_strangers_attention_is_left_to_the_cpu(onnx_pair: Bundles, place: int, name: bytes | None) -> None:
    """Such graphs pass the checks of files; this one ended the program in a traceback."""
    model = open_bundle(onnx_pair("int4")).path("target", "onnx").read_bytes()
    graph = read_graph(model)
    for node in graph.nodes:
        if node.operator in ("GroupQueryAttention", "FusedMatMul"):
            node.inputs[:] = node.inputs[:place] + ([] if name is None else [name])
    assert changed_graph(with_graph(model, graph, None)) is None


def test_rows_of_other_types_are_left_to_the_cpu(onnx_pair: Bundles) -> None:
    for kv in ("f16", "int8"):
        bundle = open_bundle(onnx_pair("int4", kv=kv))
        assert changed_graph(bundle.path("target", "onnx").read_bytes()) is None
