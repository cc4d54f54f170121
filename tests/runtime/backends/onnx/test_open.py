"""Opening bundles of ONNX graphs: which drafter, which provider, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")

from changed_bundle import with_graphs
from edge_runtime.backends.kernels.loader import usable_variants, variant
from edge_runtime.backends.onnx import devices as devices_module
from edge_runtime.bundle.manifest import with_hash
from edge_runtime.errors import BundleError, RequestError
from edge_runtime.session.open import open_session
from kept import shipped_bundle

Bundles = Callable[[str], Path]


def test_a_drafter_that_is_not_asked_for_is_not_opened(onnx_pair: Bundles) -> None:
    with open_session(onnx_pair("f32"), threads=1, drafter="none") as session:
        assert session.drafter is None
    with open_session(onnx_pair("f32"), threads=1, drafter="lookup") as session:
        assert session.generate(list(range(300, 308)) * 3, max_tokens=10).text()


@pytest.fixture
def copied(onnx_pair: Bundles, tmp_path: Path) -> Path:
    shutil.copytree(onnx_pair("f32"), tmp_path / "bundle")
    return tmp_path / "bundle"


def test_a_damaged_graph_or_data_file_is_a_sentence(copied: Path) -> None:
    (copied / "target-f32.onnx").write_bytes(b"\x08" * (copied / "target-f32.onnx").stat().st_size)
    with pytest.raises(BundleError, match=r"target-f32\.onnx is no sound ONNX graph"):
        open_session(copied, threads=1, check="none")


def changed_buffers(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["cache_layout"]["buffers"][0] |= changes
    (folder / "manifest.json").write_text(with_hash(manifest))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 140}, "too short for a window of 128"),
        ({"dtype": "f8"}, "not one this reader knows"),
        ({"head_dim": 1 << 40}, "wider than any, 8192 at most"),
        ({"kv_heads": 2, "drafter_read": "buffer"}, r"is \[1, 2, .*\], the graph's"),
        ({"key": "value.0"}, "one pair of ONNX buffers"),
        ({"layer": 7}, "one pair of ONNX buffers"),
        ({"read": "backwards"}, "not one this reader knows"),
        ({"read": "rows"}, "not one this reader knows"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(changes: dict[str, Any], words: str, copied: Path) -> None:
    changed_buffers(copied, **changes)
    with pytest.raises(BundleError, match=words):
        open_session(copied, threads=1)


def test_a_bundle_without_graphs_names_the_format_to_export(exported_pair: Path, onnx_pair: Bundles) -> None:
    with pytest.raises(BundleError, match=r"no onnx model for the onnx backend.*--format onnx"):
        open_session(exported_pair, backend="onnx")
    with pytest.raises(BundleError, match="no gguf model for the llama backend"):
        open_session(onnx_pair("f32"), backend="llama")


def of_an_earlier_version(model: Any) -> Any:
    """The graph with stock operators alone, as before graphs named the kernels' operators."""
    from onnx import inliner

    plain = inliner.inline_local_functions(model)
    with_initializers(plain.graph)
    return plain


def with_initializers(graph: Any) -> None:
    """Has a graph and those inside hold what their Constants give."""
    for node in list(graph.node):
        for attribute in node.attribute:
            if attribute.HasField("g"):
                with_initializers(attribute.g)
        if node.op_type == "Constant":
            graph.initializer.add().CopyFrom(node.attribute[0].t)
            graph.initializer[-1].name = node.output[0]
            graph.node.remove(node)


@pytest.mark.skipif(not usable_variants(), reason="the row kernels were not built: pip install -e . builds them")
@pytest.mark.parametrize(("target", "drafter"), [("int8", "int8"), ("f32", "int8"), ("f32", "f32")])
def test_a_bundle_of_before_the_kernels_operators_runs_and_says_that_it_is_slower(target: Any, drafter: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="needs edge-mtp[export]")
    from edge_export.onnx.request import OnnxRequest

    folder = shipped_bundle(gguf=False, onnx=OnnxRequest(target=target, drafter=drafter))
    older = with_graphs(folder, tmp_path / "older", of_an_earlier_version)
    texts, said = [], list[list[str]]()
    for bundle in (folder, older):
        sentences: list[str] = []
        with open_session(bundle, threads=1, notify=sentences.append) as session:
            texts.append(session.generate("class Stack:", max_tokens=12, draft_length=3).text())
            assert session.row_kernels == (variant() if (bundle, target) == (folder, "int8") else None)
        said.append([sentence for sentence in sentences if "earlier version" in sentence])
    assert texts[0][:8] == texts[1][:8]
    slower = ["The graphs of older are of an earlier version and run slower; export the bundle again."]
    assert said == [[], slower if drafter == "int8" else []], "float32 graphs name none"


@pytest.mark.parametrize(
    ("failure", "name", "words"),
    [
        (None, "openvino:NPU", r"no device 'openvino:NPU' .* there are cpu; onnxruntime-ep-openvino .* finds no device of its own"),
        ("", "gpu", "llama.cpp computes on GPUs: export the bundle with --format gguf or both"),
        ("", "npu", r"pip install 'edge-mtp\[openvino\]' or 'edge-mtp\[qnn\]'"),
        ("", "qnn", r"pip install 'edge-mtp\[qnn\]'$"),
        ("", "tpu", "edge-run doctor says which drivers are installed"),
    ],
)
def test_a_device_that_is_not_there_ends_with_what_to_do(
    failure: str | None, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of plug-ins that are there and find none, and of those that are not installed."""
    monkeypatch.setattr(devices_module, "plug_in_failure", lambda _: failure)
    monkeypatch.setattr(devices_module, "devices", lambda: (devices_module.PROCESSOR,))
    with pytest.raises(RequestError, match=words):
        devices_module.device_named(name)
