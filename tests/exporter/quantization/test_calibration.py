"""Calibration: what is summed is what the matrices are multiplied with, for every member, and both options reach the files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="calibration runs transformers")
pytest.importorskip("transformers", reason="calibration runs transformers")
gguf = pytest.importorskip("gguf", reason="needs edge-mtp[export]")
pytest.importorskip("llama_cpp", reason="llama.cpp quantizes")

from edge_export.checkpoint.checkpoint import open_checkpoint
from edge_export.checkpoint.sources import resolve_pair
from edge_export.cli.display import parity_sentence
from edge_export.errors import ExportError
from edge_export.gguf.writer import write_gguf
from edge_export.onnx.request import OnnxRequest
from edge_export.parity import comparison
from edge_export.parity.reference import Reference
from edge_export.pipeline import export as pipeline
from edge_export.quantization import calibration
from edge_export.quantization import importance as quantization_importance
from edge_export.quantization.calibration import LAYERS_FILE, SAVED, CalibrationRequest, ImportanceSources, calibrate, chunks_of, read_text
from edge_export.quantization.gguf_quantization import quantize_gguf
from edge_export.quantization.importance import Importance, SecondMoments, fitted
from edge_runtime.bundle.bundle import Bundle
from edge_runtime.bundle.manifest import ImportanceSource
from progress_log import ProgressLog
from published_formats import put_tensors, take_tensors

Folders = Callable[[str], Path]
TEXT = "a reader opens the file, looks at its first letters and decides. " * 60
TOKENS = 1024


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MAX_CHUNKS", 2)
    monkeypatch.setattr(calibration, "DRAFT_EVERY", 128)


@pytest.fixture
def request_for(member_folder: Folders, text: Path) -> Callable[[str], CalibrationRequest]:
    def made(member: str) -> CalibrationRequest:
        target, drafter = resolve_pair(str(member_folder(member)), str(member_folder(f"{member}-assistant")))
        return CalibrationRequest(
            reference=Reference(target=target, drafter=drafter, threads=1, context=target.checkpoint.architecture.context), text=text
        )

    return made


@pytest.mark.parametrize("member", ["e2b", "12b", "26b-a4b"])
def test_every_matrix_of_both_is_measured(member: str, request_for: Callable[[str], CalibrationRequest]) -> None:
    request, progress = request_for(member), []
    made = calibrate(request, progress.append)
    assert sum(progress) == made.source.bytes == len(TEXT)
    assert made.source.tokens == TOKENS
    target = fitted(made.target, request.reference.target.checkpoint, made.source)
    drafter = fitted(made.drafter, request.reference.drafter.checkpoint, made.source)
    assert {"token_embd.weight", "nextn.pre_projection.weight", "nextn.post_projection.weight"} <= set(drafter.values)
    assert "token_embd.weight" in target.values
    assert not [name for name in target.values if "ffn_gate_inp" in name], "the router is not quantized"
    drafts = 2 * 3 * calibration.DRAFT_LENGTH
    assert made.drafter["blk.0.attn_q.weight"].counts.tolist() == [drafts]
    assert made.target["blk.0.attn_q.weight"].counts.tolist() == [TOKENS]


def test_the_sums_are_those_of_the_inputs(request_for: Callable[[str], CalibrationRequest]) -> None:
    """A row counts by what becomes of its errors: norms make a short row as long as others, and attention reads a row of V many times."""
    request = replace(request_for("26b-a4b"), with_drafter=False)
    made = calibrate(request)
    assert made.drafter == {}
    model, seen = request.reference.load_target(), dict[str, tuple[Any, Any]]()
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.2"))
    for name, module in layer.named_modules():
        module.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: (inputs, output)}))
    with torch.inference_mode():
        model(input_ids=torch.tensor(chunks_of(request, TEXT)))
        read_by = seen["self_attn"][1][1].double().square().sum((1, 2))  # attention [texts, heads, T, T]
        head_dim = layer.self_attn.head_dim
        for name, short, normed, width, share in (
            ("self_attn.q_proj", "attn_q", "self_attn.q_proj", head_dim, 1.0),
            ("self_attn.v_proj", "attn_v", "self_attn.v_proj", head_dim, read_by),
            ("self_attn.o_proj", "attn_output", "self_attn.o_proj", None, 1.0),
            ("mlp.up_proj", "ffn_up", "mlp.down_proj", None, 1.0),
            ("mlp.down_proj", "ffn_down", "mlp.down_proj", None, 1.0),
        ):
            rows, lengths = seen[name][0][0].double(), seen[normed][1].double()
            parts = lengths.unflatten(-1, (-1, width or lengths.shape[-1])).square().mean(-1) + 1e-6
            counts = share * parts.reciprocal().mean(-1)
            expected = (rows**2 * (counts / counts.mean())[..., None]).sum((0, 1))
            assert np.allclose(made.target[f"blk.2.{short}.weight"].sums, expected.numpy(), rtol=1e-3), short
        rows, chosen = seen["experts"][0][:2]
        gate_up = torch.einsum("th,eoh->teo", rows, layer.experts.gate_up_proj)
        gate, up = gate_up.chunk(2, dim=-1)
        inner = layer.experts.act_fn(gate) * up
        used = torch.nn.functional.one_hot(chosen, len(layer.experts.gate_up_proj)).sum(1).double()
    first, second = made.target["blk.2.ffn_gate_up_exps.weight"], made.target["blk.2.ffn_down_exps.weight"]
    assert np.array_equal(first.counts, used.sum(0).numpy())
    assert first.counts.sum() == 2 * TOKENS
    assert np.allclose(first.sums, torch.einsum("te,th->eh", used, rows.double() ** 2).reshape(-1).numpy(), rtol=1e-4)
    assert np.allclose(second.sums, torch.einsum("te,tei->ei", used, inner.double() ** 2).reshape(-1).numpy(), rtol=1e-4)


def test_moments_are_those_of_the_inputs(
    request_for: Callable[[str], CalibrationRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization_importance, "MAX_CHANNELS", 128)
    moments = {role: SecondMoments(tmp_path / role) for role in ("target", "drafter")}
    request, progress = replace(request_for("26b-a4b"), moments=moments), []
    made = calibrate(request, progress.append)
    assert sum(progress) == len(TEXT)
    for role, entries in (("target", made.target), ("drafter", made.drafter)):
        kept = {path.name.removesuffix(".npy"): np.load(path) for path in (tmp_path / role).iterdir()}
        assert {"blk.0.attn_q.weight", "blk.1.attn_output.weight", "token_embd.weight"} <= set(kept)
        assert not [name for name in kept if "exps" in name or "ffn_up" in name or "ffn_gate_inp" in name]
        for name, products in kept.items():
            assert len(products) <= 128
            means = entries[name].sums / entries[name].counts
            assert np.allclose(np.diag(products), means, rtol=1e-3, atol=1e-6 * means.max())
            assert np.allclose(products, products.T, atol=1e-5 * means.max())
            assert np.linalg.eigvalsh(products.astype(np.float64)).min() > -1e-4 * means.max()
    assert moments["target"].factor("blk.0.ffn_up.weight") is moments["target"].factor("blk.0.ffn_gate.weight")
    # Each counts its rows by what they become.
    assert moments["target"].factor("blk.0.attn_k.weight") is not moments["target"].factor("blk.0.attn_q.weight")
    assert not moments["target"].has("blk.0.ffn_gate_up_exps.weight")


def test_matrices_of_many_bits_have_no_moments(request_for: Callable[[str], CalibrationRequest], tmp_path: Path) -> None:
    """The last matrix of a feed-forward is the widest: without its moments a calibration takes less work."""
    without = OnnxRequest().importance_roles["target"]
    assert without == {"attn_k", "attn_v", "ffn_down", "proj", "token_embd"}
    assert OnnxRequest(block=32).importance_roles == {"target": frozenset(), "drafter": None}
    assert OnnxRequest(embedding="int4").importance_roles["target"] == without - {"token_embd"}
    assert OnnxRequest(drafter="int4", embedding="int4").importance_roles["drafter"] == without
    moments = SecondMoments(tmp_path / "target", without)
    request = replace(request_for("e2b"), with_drafter=False, moments={"target": moments})
    made = calibrate(request)
    kept = {path.name.split(".")[-3] for path in (tmp_path / "target").iterdir()}
    assert kept == {"attn_q", "attn_output", "ffn_gate", "inp_gate", "per_layer_model_proj"}
    assert {"blk.0.ffn_down.weight", "blk.0.attn_v.weight", "token_embd.weight"} <= set(made.target), "they are weighed"
    assert not moments.has("blk.0.ffn_down.weight")
    checkpoint = request.reference.target.checkpoint
    assert calibration.expected_products(checkpoint, without) < calibration.expected_products(checkpoint, frozenset())


def test_two_formats_compensate_what_either_gains_by(export: Callable[..., Bundle], text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stop(_sources: Any, _reference: Any, roles: Any, **_: Any) -> Any:
        asked.append(roles["target"])
        raise ExportError("stop")

    monkeypatch.setattr(pipeline, "importance_of_pair", stop)
    q4_k_m, q4_0 = {"target_quantization": "q4_k_m"}, {"target_quantization": "q4_0"}
    mixed, eight = {"onnx": OnnxRequest()}, {"onnx": OnnxRequest(target="int8")}
    for formats in (q4_k_m, q4_k_m | mixed, q4_k_m | eight, q4_0 | mixed, mixed | {"gguf": False}, eight | {"gguf": False}):
        with pytest.raises(ExportError, match="stop"):
            export(importance=ImportanceSources(calibrate=text), **formats)
    raised, in_8_bits = frozenset({"ffn_down", "attn_v"}), OnnxRequest().importance_roles["target"]
    assert asked == [raised, raised, raised, frozenset(), in_8_bits, None]


@pytest.fixture
def scaled(copy: Folders, request_for: Callable[[str], CalibrationRequest]) -> Callable[[float], CalibrationRequest]:
    """Returns a function to a calibration of a target one of whose matrices, in the second layer, is scaled to this largest weight."""

    def made(largest: float) -> CalibrationRequest:
        request, folder = request_for("12b"), copy("12b")
        tensors = take_tensors(folder)
        (name,) = (name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
        put_tensors(folder, tensors | {name: tensors[name] * (largest / tensors[name].abs().max())})
        target, _ = resolve_pair(str(folder), request.reference.drafter.origin)
        return replace(request, reference=replace(request.reference, target=target), with_drafter=False)

    return made


def test_values_that_are_not_finite_are_named_at_their_layer(scaled: Callable[[float], CalibrationRequest], tmp_path: Path) -> None:
    state = tmp_path / "layers.npz"
    with pytest.raises(
        ExportError, match=r"computes values at blk.1.ffn_down.weight that are not finite, on text.txt; check the checkpoint"
    ):
        calibrate(replace(scaled(3e38), state=state))
    with np.load(state) as kept:
        assert kept["layers"] == 1, "it ended there"


def test_activations_that_are_all_zero_change_nothing(scaled: Callable[[float], CalibrationRequest], tmp_path: Path) -> None:
    request = replace(scaled(0.0), moments={"target": SecondMoments(tmp_path / "target")})
    made, checkpoint = calibrate(request), request.reference.target.checkpoint
    importance = replace(fitted(made.target, checkpoint, made.source), moments=request.moments["target"])
    assert (importance.values["blk.1.ffn_down.weight"] == 1).all()
    name = "model.layers.1.mlp.down_proj.weight"
    assert importance.factor(name, checkpoint.tensors[name]) is None


def test_moments_without_room_are_refused(request_for: Callable[[str], CalibrationRequest], disk_with: Any, tmp_path: Path) -> None:
    moments = {"target": SecondMoments(tmp_path / "target")}
    with (
        disk_with(10),
        pytest.raises(ExportError, match=r"calibration keeps [\d.]+ [kM]?B of second moments .*, 10 B are free; free some space"),
    ):
        calibrate(replace(request_for("e2b"), moments=moments))


def test_texts_that_cannot_be_used(request_for: Callable[[str], CalibrationRequest], text: Path, memory_of: Any) -> None:
    text.write_text(" \n ")
    with pytest.raises(ExportError, match=r"the calibration text .*text.txt is empty; give text of the kind"):
        read_text(text)
    text.write_bytes(b"abc\xff")
    with pytest.raises(ExportError, match=r"text.txt is not UTF-8 text \(byte 3\)"):
        read_text(text)
    with pytest.raises(ExportError, match=r"nowhere.txt cannot be read \(No such file"):
        read_text(text.with_name("nowhere.txt"))
    text.write_text("a reader opens the file")
    with pytest.raises(ExportError, match=r"text.txt has \d+ tokens, at least 511 are needed; give a longer one"):
        calibrate(request_for("e2b"))
    with text.open("wb") as large:
        large.truncate(calibration.MAX_TEXT_BYTES + 1)
    with pytest.raises(ExportError, match=r"has more than \d+ bytes"):
        read_text(text)
    text.write_text(TEXT)
    needed = r"but calibration needs [\d.]+ [kM]?B of memory, 1 B are available; make an importance matrix"
    with memory_of(1), pytest.raises(ExportError, match=needed):
        calibrate(request_for("e2b"))


def test_llama_cpp_keeps_what_is_important(member_folder: Folders, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(member_folder("e2b-text"))
    write_gguf(checkpoint, tmp_path / "plain.gguf", "f32", lambda _: None)
    counts = np.ones((1, 64), np.float32)
    counts[:, ::16] = 1000
    source = ImportanceSource(kind="imatrix", name="made", bytes=1, sha256="0")
    importance = Importance(source=source, values={"blk.0.attn_q.weight": counts})
    files = {"blind.gguf": None, "seeing.gguf": importance}
    for name, value in files.items():
        quantize_gguf(tmp_path / "plain.gguf", tmp_path / name, "q4_0", 1, importance=value)
    required, blind, seeing = (matrix(tmp_path / name, "blk.0.attn_q.weight") for name in ("plain.gguf", *files))
    assert np.mean((seeing - required)[:, ::16] ** 2) < 0.5 * np.mean((blind - required)[:, ::16] ** 2)
    assert np.array_equal(matrix(tmp_path / "blind.gguf", "blk.0.ffn_up.weight"), matrix(tmp_path / "seeing.gguf", "blk.0.ffn_up.weight"))


def blocks(path: Path, name: str) -> Any:
    """The bytes [blocks, 18] of a matrix in q4_0."""
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    return np.array(tensor.data).reshape(-1, 18)


def matrix(path: Path, name: str) -> Any:
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def test_what_a_text_gave_can_be_saved_and_given_back(export: Callable[..., Bundle], text: Path, tmp_path: Path) -> None:
    four_bits = {"target_quantization": "q4_0", "drafter_quantization": "q4_0"}
    plain = export(output=tmp_path / "plain", **four_bits)
    calibrated = export(output=tmp_path / "text", importance=ImportanceSources(calibrate=text, save=tmp_path), **four_bits)
    files = ImportanceSources(imatrix=tmp_path / SAVED["target"], drafter_imatrix=tmp_path / SAVED["drafter"])
    from_files = export(output=tmp_path / "file", importance=files, **four_bits)
    for role in ("target", "drafter"):
        assert plain.file(role).sha256 != calibrated.file(role).sha256
        assert calibrated.manifest.importance[role].kind == "calibration"
        assert calibrated.manifest.importance[role].tokens == TOKENS
        assert from_files.manifest.importance[role].name == SAVED[role]
    assert plain.manifest.importance == {}
    # Both have the scales that importance chose; only a text gives the moments by which errors are compensated.
    item, other = (blocks(bundle.path("target"), "blk.0.attn_q.weight") for bundle in (calibrated, from_files))
    assert np.array_equal(item[:, :2], other[:, :2])
    assert not np.array_equal(item[:, 2:], other[:, 2:])


def test_a_language_model_is_calibrated_by_default(export: Callable[..., Bundle], memory_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"target_quantization": "q4_k_m", "drafter_quantization": "q4_0", "force": True}
    assert export(**both).manifest.importance == {}, "as small as a test's"
    monkeypatch.setattr(calibration, "CALIBRATED_FROM", 1)
    lines: list[str] = []
    made = export(lines.append, **both).manifest.importance
    assert set(made) == {"target"}
    assert (made["target"].name, made["target"].tokens) == ("calibration.txt", TOKENS)
    assert any("Calibrating the model takes about 0 minutes here; --no-calibrate leaves it out." in line for line in lines)
    assert export(importance=ImportanceSources(by_default=False), **both).manifest.importance == {}
    assert export(force=True, target_quantization="q8_0").manifest.importance == {}, "nothing to gain"
    lines.clear()
    with memory_of(1):
        assert export(lines.append, **both).manifest.importance == {}
    assert any("The model is not calibrated, so its answers get worse than they need to be: calibration needs" in line for line in lines)


class Layers(ProgressLog):
    """Notes how many layers are kept whenever the calibration is a layer further, and is stopped once there are so many."""

    def __init__(self, state: Path, stop: int = 0) -> None:
        super().__init__()
        self.kept, self._state, self._stop = list[int](), state, stop

    def advance(self, done_bytes: int) -> None:
        super().advance(done_bytes)
        if self.steps[-1][0].startswith("Calibrate") and (path := self._state / LAYERS_FILE).is_file():
            with np.load(path) as kept:
                self.kept.append(int(kept["layers"]))
            if self.kept[-1] == self._stop:
                raise KeyboardInterrupt


def test_a_calibration_that_was_stopped_goes_on_where_it_was(export: Callable[..., Bundle], text: Path, tmp_path: Path) -> None:
    required = {"importance": ImportanceSources(calibrate=text), "target_quantization": "q4_0"}
    whole, state = export(output=tmp_path / "whole", **required), tmp_path / "out.calibration"
    stopped, going_on = Layers(state, stop=2), Layers(state)
    with pytest.raises(KeyboardInterrupt):
        export(stopped, **required)
    assert f"The calibration is kept in {state}; the next" in stopped.messages[-1]
    assert not (tmp_path / "out").exists()
    made = export(going_on, **required)
    assert (stopped.kept, going_on.kept[:3]) == ([1, 2], [2, 2, 3]), "no layer was run twice"
    assert made.file("target").sha256 == whole.file("target").sha256
    assert not state.exists()


@pytest.mark.usefixtures("few_drafts")
def test_what_a_calibration_brings_is_measured(export: Callable[..., Bundle], text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    # Random weights lose more by rounding than any limit allows.
    monkeypatch.setattr(comparison.Judgement, "_demand_quality", lambda *_: None)
    required = {"verify": True, "force": True, "target_quantization": "q4_0", "onnx": OnnxRequest()}
    plain, made = (export(**required, importance=ImportanceSources(calibrate=value)).manifest.parity for value in (None, text))
    for before, after in ((plain, made), (plain["onnx"], made["onnx"])):
        assert "mean_kl_uncalibrated" not in before["quality"]
        assert after["quality"]["mean_kl_uncalibrated"] == pytest.approx(before["quality"]["mean_kl"], rel=1e-3)
        assert after["quality"]["mean_kl"] != before["quality"]["mean_kl"]
    assert "The calibration brought mean KL from" in parity_sentence(made)
    assert "The calibration brought" not in parity_sentence(plain)


def test_a_text_of_one_long_line_is_a_text(request_for: Callable[[str], CalibrationRequest], text: Path) -> None:
    text.write_text("a" * (1 << 20))
    assert calibrate(request_for("e2b")).source.tokens == TOKENS


def test_a_text_that_falls_into_bytes_is_named(request_for: Callable[[str], CalibrationRequest], text: Path) -> None:
    lines: list[str] = []
    request = replace(request_for("e2b"), notify=lines.append)
    chunks_of(request, text.read_text())
    assert lines == []
    chunks_of(request, "\u1230\u120b\u121d" * 400)
    assert lines == [
        "text.txt falls into 3600 tokens for 1200 characters: the tokenizer has no words of its language, so calibrating on it may bring"
        " little. Text in a language that the model knows brings more."
    ]


def test_importance_that_nothing_would_use_is_refused(export: Callable[..., Bundle], text: Path, tmp_path: Path) -> None:
    path = tmp_path / "some.dat"

    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(ExportError, match=match):
            export(**{"target_quantization": "q4_0", "drafter_quantization": "q4_0"} | changes)
        assert not (tmp_path / "out").exists()

    plain = {"target_quantization": "f16", "drafter_quantization": "q8_0"}
    refused("neither model is quantized here in a way that importance changes", importance=ImportanceSources(calibrate=text), **plain)
    refused(
        "the drafter is not quantized .*leave .*some.dat out",
        importance=ImportanceSources(drafter_imatrix=path),
        drafter_quantization="q8_0",
    )
    refused("some.dat cannot be read", importance=ImportanceSources(imatrix=path))
    made = export(output=tmp_path / "made", **plain)
    value = {"target": str(made.path("target")), "target_quantization": None, "importance": ImportanceSources(calibrate=text)}
    refused("calibration runs the target in transformers, and .*gguf is a GGUF; give its checkpoint", **value)
