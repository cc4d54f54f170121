"""Weights packed for this CPU: kept once, mapped afterwards, and never used on another."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs edge-mtp[onnx]")
pytest.importorskip("onnx", reason="needs edge-mtp[export]")

from edge_export.onnx.block_quantization import WeightSpec
from edge_export.onnx.graph_builder import GraphBuilder
from edge_export.onnx.weights import WeightFile, WeightFormat
from edge_runtime.backends.onnx import loader as ort_library
from edge_runtime.backends.onnx import prepacked as ort_prepacked
from edge_runtime.backends.onnx.loader import scalar
from edge_runtime.session.open import open_session

Bundles = Callable[..., Path]
PROMPT = "def area(r):"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_MTP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


def tokens_of(folder: Path, output: list[str], keep_packed: bool = True) -> list[int]:
    with open_session(folder, threads=1, keep_packed=keep_packed, notify=output.append) as session:
        generation = session.generate(PROMPT, max_tokens=40, draft_length=3)
        generation.text()
        return generation.tokens


def test_packed_once_then_mapped_with_the_same_tokens(onnx_pair: Bundles, cache: Path) -> None:
    expected = tokens_of(onnx_pair("int4"), [], keep_packed=False)
    assert not cache.exists()
    first, second = [], []
    assert tokens_of(onnx_pair("int4"), first) == expected
    assert tokens_of(onnx_pair("int4"), second) == expected
    assert sum("for this CPU, once" in sentence for sentence in first) == 3
    assert second == []
    maps = Path("/proc/self/maps")
    with open_session(onnx_pair("int4"), threads=1, keep_packed=True):
        if maps.is_file():
            assert "target-int4-mixed.packed" in maps.read_text()


def test_packed_weights_that_would_be_misread_are_not_used(onnx_pair: Bundles, cache: Path) -> None:
    """onnxruntime 1.31 saves them anywhere, and its kernels read them wrong at most places; the target's logits became NaN."""
    folder, output, again = onnx_pair("int4", block=128), [], []
    expected = tokens_of(folder, [], keep_packed=False)
    assert tokens_of(folder, output) == tokens_of(folder, again) == expected
    misread = [sentence for sentence in output if "misread" in sentence]
    usable = {path.parent.name: json.loads(path.read_text())["usable"] for path in cache.rglob("record.json")}
    assert len(misread) == sum(not use for use in usable.values())
    assert all(
        (path / f"{path.name}.onnx").is_file() == usable[path.name] for path in (result.parent for result in cache.rglob("record.json"))
    )
    assert again == [], "what does not work is not tried again"


def test_only_places_on_whole_cache_lines_are_sound() -> None:
    assert ort_prepacked.well_placed(b"..MatMulNBits+11|4096;6270;0..MatMulNBits+12|128;62;0..")
    assert not ort_prepacked.well_placed(b"..MatMulNBits+11|4096;6270;0..MatMulNBits+12|59385598;62;0..")


def test_what_another_cpu_packed_is_replaced(onnx_pair: Bundles, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_of(onnx_pair("int4"), [])
    monkeypatch.setattr(ort_prepacked, "cpu_identity", lambda: ["model name: another"])
    output: list[str] = []
    assert tokens_of(onnx_pair("int4"), output) == expected
    assert sum("not for this machine or bundle (cpu)" in sentence for sentence in output) == 3
    records = list(cache.glob("*/*/record.json"))
    assert len(records) == 3
    assert {json.loads(record.read_text())["cpu"][0] for record in records} == {"model name: another"}
    assert not list(cache.glob("*/.packing-*")), "nothing half-written stays"


@pytest.mark.parametrize("text", ["", "[]", "{" * 10000, '{"cpu": 1}'])
def test_a_damaged_record_is_as_good_as_none(text: str, onnx_pair: Bundles, cache: Path) -> None:
    expected = tokens_of(onnx_pair("int4"), [])
    next(cache.glob("*/target-int4-mixed/record.json")).write_text(text)
    output: list[str] = []
    assert tokens_of(onnx_pair("int4"), output) == expected
    assert any("packed anew" in sentence for sentence in output)


@pytest.mark.parametrize("change", [lambda data: bytes(256) + data[256:], lambda data: data[:-1], None])
def test_packed_weights_that_have_changed_are_packed_anew(change: Callable[[bytes], bytes] | None, onnx_pair: Bundles, cache: Path) -> None:
    expected = tokens_of(onnx_pair("int4"), [])
    packed = next(cache.glob("*/*/target-int4-mixed.packed"))
    if change is None:
        packed.unlink()
    else:
        packed.write_bytes(change(packed.read_bytes()))
    output: list[str] = []
    assert tokens_of(onnx_pair("int4"), output) == expected
    assert sum("are damaged; they are packed anew" in sentence for sentence in output) == 1
    again: list[str] = []
    assert tokens_of(onnx_pair("int4"), again) == expected
    assert again == []


@pytest.mark.skipif(os.name != "posix", reason="needs the permissions of POSIX")
@pytest.mark.parametrize("place", ["", "target-int4-mixed", "target-int4-mixed/record.json", "target-int4-mixed/target-int4-mixed.packed"])
def test_packed_weights_that_others_may_write_are_packed_anew(place: str, onnx_pair: Bundles, cache: Path) -> None:
    """Who may write them could put others in their place between the check and the mapping, or cut them while they are mapped."""
    expected = tokens_of(onnx_pair("int4"), [])
    (bundle,) = cache.iterdir()
    assert [path for path in (bundle, *bundle.rglob("*")) if path.stat().st_mode & 0o077] == []
    (bundle / place).chmod((bundle / place).stat().st_mode | 0o020)
    output: list[str] = []
    assert tokens_of(onnx_pair("int4"), output) == expected
    assert sum("packed anew" in sentence for sentence in output) == 1
    assert sum("for this CPU, once" in sentence for sentence in output) == (1 if place else 3)
    assert [path for path in (bundle, *bundle.rglob("*")) if path.stat().st_mode & 0o077] == []
    again: list[str] = []
    assert tokens_of(onnx_pair("int4"), again) == expected
    assert again == []


@pytest.mark.skipif(os.name != "posix", reason="needs links")
def test_packed_weights_behind_a_link_are_packed_anew(onnx_pair: Bundles, cache: Path, tmp_path: Path) -> None:
    expected = tokens_of(onnx_pair("int4"), [])
    packed = next(cache.glob("*/*/target-int4-mixed.packed"))
    packed.rename(tmp_path / "elsewhere")
    packed.symlink_to(tmp_path / "elsewhere")
    output: list[str] = []
    assert tokens_of(onnx_pair("int4"), output) == expected
    assert sum("packed anew" in sentence for sentence in output) == 1
    assert not packed.is_symlink()
    assert (tmp_path / "elsewhere").is_file()


def test_weights_that_nobody_checked_are_not_kept(onnx_pair: Bundles, cache: Path) -> None:
    """Another bundle may claim its hashes: what it brought would run in its place, which was checked."""
    output: list[str] = []
    with open_session(onnx_pair("int4"), threads=1, keep_packed=True, check="none", notify=output.append):
        assert sum("not kept packed, as they were not checked" in sentence for sentence in output) == 3
    assert not cache.exists()
    expected = tokens_of(onnx_pair("int4"), [])
    with open_session(onnx_pair("int4"), threads=1, keep_packed=True, check="none") as session:
        generation = session.generate(PROMPT, max_tokens=40, draft_length=3)
        generation.text()
        assert generation.tokens == expected


def test_without_room_it_goes_on_unpacked_and_says_so(onnx_pair: Bundles, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    output: list[str] = []
    assert tokens_of(onnx_pair("int4"), output) == tokens_of(onnx_pair("int4"), [], keep_packed=False)
    assert any("could not be kept" in sentence and "10 are free" in sentence for sentence in output)
    assert not list(cache.rglob("record.json"))


def test_bundles_do_not_share_packed_weights(onnx_pair: Bundles, cache: Path) -> None:
    for weights in ("int4", "int8"):
        with open_session(onnx_pair(weights), threads=1, keep_packed=True) as session:
            session.target.prefill([2, 300])
            assert np.isfinite(session.target.verify([301])).all()
    assert len(list(cache.iterdir())) == 2


def test_sizes_that_a_graph_must_hold_itself_do_not_keep_it_from_being_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles of before have a Split with a size for each of 35 layers, which onnxruntime does not read from another file."""
    monkeypatch.setenv("EDGE_MTP_KERNELS", "none")  # packing is for stock operators
    weight = np.random.default_rng(0).standard_normal((35 * 32, 64)).astype(np.float32)
    graph = GraphBuilder("one")
    with WeightFile(tmp_path / "one.onnx_data") as weights:
        format = WeightFormat(kind="blocks", spec=WeightSpec(bits=4, block=32))
        matrix = weights.matrix_of([weight], "one", len(weight), weight.shape[1], format)
    product = graph.linear(graph.input("value", "f32", (1, 1, 64)), matrix)
    parts = graph.ops("Split", [product, graph.integers([32] * 35)], 35, axis=-1)
    graph.output(graph.op("Sum", *parts, name="sum"), "f32", (1, 1, 32))
    graph.save(tmp_path / "one.onnx")
    output: list[str] = []
    place = ort_prepacked.PackingPlace(folder=tmp_path / "packed", weights="these", check="full", notify=output.append)
    value, _ = scalar(np.float32, 1, 1, 64)
    value[...] = 1
    sums = []
    for packing in (None, place, place):
        call = ort_library.Graph(tmp_path / "one.onnx", ort_library.SessionOptions(threads=1, packing=packing)).bind(
            {"value": ort_library.value_over(value)}, {"sum": None}
        )
        call.run()
        sums.append(np.array(call.outputs()[0]))
    assert output == ["Packing the weights of one.onnx for this CPU, once."]
    assert np.array_equal(sums[0], sums[1])
    assert np.array_equal(sums[0], sums[2])
