"""An exported bundle with the media encoder: its file, the manifest's tokens, and requests that cannot have one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("gguf")
pytest.importorskip("torch", reason="tiny checkpoints are made with torch")
pytest.importorskip("transformers", reason="tiny checkpoints are made with transformers")

from edge_export.errors import ExportError
from edge_export.onnx.request import OnnxRequest
from edge_export.pipeline.export import export_pair
from edge_export.pipeline.request import ExportRequest
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import AUDIO_ENCODER, MEDIA_ENCODER, VISION_ENCODER, MediaTokens
from edge_runtime.bundle.onnx_graph import check_onnx
from silent import Silent
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
    export_pair(request(pair, tmp_path / "bundle"), Silent())
    bundle = open_bundle(tmp_path / "bundle", check="full")
    assert bundle.file(MEDIA_ENCODER).path == "media-encoder-f16.gguf"
    media = bundle.manifest.media
    assert media is not None
    assert media.image == MediaTokens(begin=MEDIA_IDS["<|image>"], placeholder=MEDIA_IDS["<|image|>"], end=MEDIA_IDS["<image|>"])
    assert media.audio is not None
    assert not media.bidirectional
    assert not [name for name in bundle.manifest.left_out if "tower" in name]


def test_text_only_stays_as_it_was(pair, tmp_path):
    export_pair(request(pair, tmp_path / "bundle", media=None), Silent())
    bundle = open_bundle(tmp_path / "bundle")
    assert not bundle.has(MEDIA_ENCODER)
    assert '"media"' not in (tmp_path / "bundle" / "manifest.json").read_text()
    assert any("vision_tower" in name for name in bundle.manifest.left_out)


def test_a_gguf_has_no_towers(pair, tmp_path):
    export_pair(request(pair, tmp_path / "bundle", media=None), Silent())
    gguf = next((tmp_path / "bundle").glob("target-*.gguf"))
    with pytest.raises(ExportError, match="which has no towers"):
        export_pair(request(pair, tmp_path / "second", target=str(gguf), target_quantization=None), Silent())
    assert not (tmp_path / "second").exists()


def test_onnx_has_a_graph_for_each_encoder(pair, tmp_path):
    pytest.importorskip("onnx")
    export_pair(request(pair, tmp_path / "bundle", gguf=False, onnx=OnnxRequest(), **GGUF_ONLY), Silent())
    bundle = open_bundle(tmp_path / "bundle", check="full")
    assert bundle.file(VISION_ENCODER).path == "vision-encoder-f16.onnx"
    assert bundle.file(AUDIO_ENCODER).path == "audio-encoder-f16.onnx"
    for file in bundle.manifest.files:
        if file.format == "onnx":
            check_onnx(bundle.folder / file.path)
