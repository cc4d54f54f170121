"""Graphs of fixed shapes behind the same seam: what the graphs of open shapes compute, with rows the host keeps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("onnx", reason="needs edge-mtp[export]")

import edge_export
from edge_export.onnx.request import OnnxRequest
from edge_runtime.backends.onnx.devices import device_named, devices
from edge_runtime.backends.onnx.drafter import StaticOrtDrafter
from edge_runtime.backends.onnx.open import OrtOptions, fallbacks, open_onnx
from edge_runtime.backends.onnx.static_target import StaticOrtTarget
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import with_hash
from edge_runtime.errors import BackendError, BundleError, RequestError
from edge_runtime.session.open import open_session
from kept import shipped_bundle

PAIR = Path(edge_export.__file__).parent / "reference_pair"
PROMPT = json.loads((PAIR / "prompts.code.json").read_text())[0]
# Sums of float32 in another order; logits of the pair reach about 10.
TOLERANCE = 1e-4
Bundles = Callable[[str], Path]


def random_tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(300, 4096, count).tolist()


@pytest.fixture(scope="module")
def static_pair() -> Bundles:
    """Returns a function from weights to the shipped pair as a bundle of static graphs, exported once."""
    return lambda weights: shipped_bundle(context=512, gguf=False, onnx=OnnxRequest(target=weights, drafter=weights, device="static"))


def opened(folder: Path, **changes: Any) -> tuple[Any, Any]:
    target, drafter, _ = open_onnx(open_bundle(folder), OrtOptions(**{"context": 512, "threads": 1, **changes}), None)
    return target, drafter


@pytest.fixture
def static(static_pair: Bundles) -> Iterator[tuple[StaticOrtTarget, StaticOrtDrafter]]:
    target, drafter = opened(static_pair("f32"))
    assert isinstance(target, StaticOrtTarget)
    assert isinstance(drafter, StaticOrtDrafter)
    with target:
        yield target, drafter


@pytest.fixture
def dynamic(onnx_pair: Bundles) -> Iterator[tuple[Any, Any]]:
    target, drafter = opened(onnx_pair("f32"))
    with target:
        yield target, drafter


def test_logits_and_drafts_are_those_of_open_shapes_beyond_the_window_and_after_roll_backs(
    static: tuple[Any, Any], dynamic: tuple[Any, Any]
) -> None:
    generator, tokens = np.random.default_rng(3), random_tokens(1, 512)
    pairs = (static, dynamic)
    for target, _ in pairs:
        target.prefill(tokens[:100])
    while pairs[0][0].length < 480:
        length, rows = static[0].length, int(generator.integers(1, 8))
        logits = [target.verify(tokens[length : length + rows]) for target, _ in pairs]
        assert np.abs(logits[0] - logits[1]).max() < TOLERANCE
        kept = length + int(generator.integers(1, rows + 1))
        for target, _ in pairs:
            target.rollback(kept)
        drafts = [drafter.draft(tokens[kept], 4) for _, drafter in pairs]
        assert drafts[0] == drafts[1]
        assert np.abs(static[0].hidden_row - dynamic[0].hidden_row).max() < TOLERANCE


@pytest.mark.parametrize("weights", ["f32", "f16", "int8", "int4"])
def test_drafts_leave_greedy_output_as_it_is(weights: str, static_pair: Bundles) -> None:
    with open_session(static_pair(weights), threads=1) as session:
        plain, drafted = (session.generate(PROMPT, max_tokens=60, draft_length=n) for n in (0, 3))
        assert plain.text() == drafted.text()
        assert plain.tokens == drafted.tokens
        assert drafted.stats.acceptance_rate is not None
        assert drafted.stats.acceptance_rate > 0.3


def test_every_node_runs_on_the_cpu_and_the_report_says_so(static: tuple[Any, Any]) -> None:
    target, drafter = static
    assert fallbacks("CPUExecutionProvider", target, drafter) == []
    sentences = fallbacks("OtherExecutionProvider", target, drafter)
    assert len(sentences) == 4
    assert all("fell back from OtherExecutionProvider to CPUExecutionProvider" in sentence for sentence in sentences)


def test_the_bundles_context_cannot_be_exceeded(static_pair: Bundles) -> None:
    with pytest.raises(RequestError, match="context 513 is beyond the 512 tokens"):
        opened(static_pair("f32"), context=513)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (("static", "verify_rows"), 3, "manifest's input 'embedded'"),
        (("static", "prefill_rows"), 1 << 40, "are not sound"),
        (("cache_layout", "buffers", 0, "rows"), 1 << 40, "too long|as long as|ask for a shorter context"),
        (("cache_layout", "buffers", 0, "head_dim"), 32, "manifest's input|export"),
        (("architecture", "vocab_size"), 1 << 20, "rows of"),
    ],
)
def test_a_manifest_that_does_not_fit_the_graphs_is_refused(
    key: tuple[Any, ...], value: int, words: str, static_pair: Bundles, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(static_pair("f32"), folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    place = manifest
    for part in key[:-1]:
        place = place[part]
    assert place[key[-1]] != value
    place[key[-1]] = value
    (folder / "manifest.json").write_text(with_hash(manifest))
    with pytest.raises((BundleError, BackendError), match=words):
        opened(folder)


@pytest.mark.parametrize(("weights", "maximum"), [("f32", 1e-3), ("int4", 0.5)])
def test_openvinos_cpu_device_runs_every_node(weights: str, maximum: float, static_pair: Bundles) -> None:
    pytest.importorskip("onnxruntime_ep_openvino", reason="needs edge-mtp[openvino]")
    tokens, sentences = random_tokens(1, 240), list[str]()
    rows, drafts, providers = [], [], set[str]()
    for name in ("cpu", "openvino:CPU"):
        options = OrtOptions(context=512, threads=1, device=device_named(name))
        target, drafter, _ = open_onnx(open_bundle(static_pair(weights)), options, None, sentences.append)
        assert drafter is not None
        with target:
            target.prefill(tokens[:200])
            rows.append(target.verify(tokens[200:206]).copy())
            drafts.append(drafter.draft(tokens[206], 4))
            providers = {provider for graph in target.assignments().values() for provider in graph}
    assert providers == {"OpenVINOExecutionProvider"}
    assert sentences == []
    assert np.abs(rows[0] - rows[1]).max() < maximum
    assert weights != "f32" or drafts[0] == drafts[1]


def test_a_device_that_is_not_there_is_never_replaced(static_pair: Bundles) -> None:
    pytest.importorskip("onnxruntime_ep_openvino", reason="needs edge-mtp[openvino]")
    there = [device.name for device in devices()]
    missing = next(name for name in ("openvino:NPU", "openvino:GPU.7") if name not in there)
    with pytest.raises(RequestError, match=f"no device '{missing.lower()}' .*; there are cpu, .*openvino:CPU"):
        open_session(static_pair("f32"), device=missing)
