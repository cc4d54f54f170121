"""An exported bundle with the media encoder: its file, the manifest's tokens, and requests that cannot have one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("torch", reason="tiny checkpoints are made with torch")
pytest.importorskip("transformers", reason="tiny checkpoints are made with transformers")

from edge_export.cli.display import media_sentence
from edge_export.errors import ExportError, ParityError
from edge_export.onnx.request import ONNX_MEDIA, OnnxRequest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import AUDIO_ENCODER, MEDIA_ENCODER, VISION_ENCODER, MediaTokens
from edge_runtime.bundle.onnx_graph import check_onnx
from tiny_media import MEDIA_IDS, write_media_assistant, write_media_member

# No GGUF quantizations.
GGUF_ONLY = {"target_quantization": None, "drafter_quantization": None}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    return write_media_member(root / "target"), write_media_assistant(root / "drafter")


def request(pair: tuple[Path, Path], output: Path, **changes) -> ExportRequest:
    values = {"target": str(pair[0]), "drafter": str(pair[1]), "target_quantization": "f16", "drafter_quantization": "f16", "media": "f16"}
    return ExportRequest(output=output, verify=False, **values | changes)


def test_the_bundle_has_the_encoder_and_its_tokens(pair, tmp_path):
    export_pair(request(pair, tmp_path / "bundle"))
    bundle = open_bundle(tmp_path / "bundle", check="full")
    assert bundle.file(MEDIA_ENCODER).path == "mmproj-target-F16.gguf"
    media = bundle.manifest.media
    assert media is not None
    assert media.image == MediaTokens(begin=MEDIA_IDS["<|image>"], placeholder=MEDIA_IDS["<|image|>"], end=MEDIA_IDS["<image|>"])
    assert media.audio is not None
    assert not media.bidirectional
    assert not [name for name in bundle.manifest.left_out if "tower" in name]


def test_a_gguf_has_no_towers(pair, tmp_path):
    export_pair(request(pair, tmp_path / "bundle", media=None))
    gguf = next((tmp_path / "bundle").glob("target-*.gguf"))
    with pytest.raises(ExportError, match="which has no towers"):
        export_pair(request(pair, tmp_path / "second", target=str(gguf), target_quantization=None))
    assert not (tmp_path / "second").exists()


def test_onnx_has_a_graph_for_each_encoder(pair, tmp_path):
    pytest.importorskip("onnx")
    export_pair(request(pair, tmp_path / "bundle", gguf=False, onnx=OnnxRequest(), **GGUF_ONLY))
    bundle = open_bundle(tmp_path / "bundle", check="full")
    assert bundle.file(VISION_ENCODER).path == "vision-encoder-f16.onnx"
    assert bundle.file(AUDIO_ENCODER).path == "audio-encoder-f16.onnx"
    for file in bundle.manifest.files:
        if file.format == "onnx":
            check_onnx(bundle.folder / file.path)


@pytest.mark.parametrize(
    ("member", "kind"),
    [("e2b", "f32"), ("e2b", "f16"), ("e2b", "bf16"), ("e2b", "q8_0"), ("12b", "f32"), ("26b-a4b", "f16"), ("31b", "bf16")],
)
def test_rows_are_compared_with_transformers(member, kind, pair, text_is_not_compared, tmp_path, probe_memory):
    small = member == "e2b"
    folders = pair if small else (write_media_member(tmp_path / "t", member=member), write_media_assistant(tmp_path / "d", member))
    onnx = OnnxRequest(target="f32", drafter="f32") if small else None
    parity = export_pair(replace(request(folders, tmp_path / "bundle", media=kind, onnx=onnx), verify=True)).manifest.parity
    media = parity["media"]
    assert (media["quantization"], "sound_rows" in media) == (kind, small or member == "12b")
    assert max(distances(media)) < media["limit"]
    if small:
        media = parity["onnx"]["media"]
        assert media["quantization"] == ONNX_MEDIA[kind]
        assert max(distances(media)) < (0.1 if kind == "q8_0" else 1e-4)


def test_a_wrong_activation_fails_the_comparison(pair, text_is_not_compared, tmp_path, probe_memory, monkeypatch):
    from edge_export.pipeline import gguf_step
    from edge_runtime.backends.llama import media_encoder
    from edge_runtime.bundle.gguf_gemma4 import EncoderFacts

    monkeypatch.setattr(gguf_step, "plan_encoder", partial(gguf_step.plan_encoder, use_gelu=False))
    monkeypatch.setattr(media_encoder, "check_encoder", lambda *_: EncoderFacts(has_audio=True, mel_frames=True, longest=2048))
    with pytest.raises(ParityError, match=r"distance of image rows of the f16 encoder is .*--no-verify"):
        export_pair(replace(request(pair, tmp_path / "bundle"), verify=True))
    assert not (tmp_path / "bundle").exists()


def test_a_wrong_order_of_patches_fails_the_comparison(pair, text_is_not_compared, tmp_path, monkeypatch):
    from edge_runtime.backends.onnx import media_encoder

    monkeypatch.setattr(media_encoder, "grouped", lambda image: np.arange(image.rows * 9))
    expected = request(pair, tmp_path / "bundle", gguf=False, onnx=OnnxRequest(target="f32", drafter="f32"), **GGUF_ONLY)
    with pytest.raises(ParityError, match="distance of image rows of the f16 encoder"):
        export_pair(replace(expected, verify=True))


def test_a_comparison_is_said():
    message = media_sentence({"quantization": "f16", "image_rows": 0.00123, "sound_rows": 0.002, "limit": 0.005})
    assert message == " Encoders (f16) differ from the reference by 0.0012 of images and 0.002 of sounds, as a share of the norm."
    assert media_sentence(None) == ""


@pytest.fixture
def text_is_not_compared(monkeypatch):
    """Random text models have near-ties; their comparison has tests of its own."""
    for library in ("llama_cpp", "onnx", "onnxruntime"):
        pytest.importorskip(library)
    from edge_export.onnx import export
    from edge_export.pipeline import gguf_step

    monkeypatch.setattr(gguf_step, "measure_parity", lambda *_: {})
    monkeypatch.setattr(export, "measure_onnx_parity", lambda *_, **__: {})


def distances(media) -> list[float]:
    return [media[name] for name in ("image_rows", "sound_rows") if name in media]
