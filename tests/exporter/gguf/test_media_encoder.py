"""The media encoder against llama.cpp's own converter, and towers that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch", reason="tiny checkpoints are made with torch")
pytest.importorskip("transformers", reason="tiny checkpoints are made with transformers")

from converter import convert
from edge_export.checkpoint.checkpoint import open_checkpoint
from edge_export.checkpoint.media_architecture import media_architecture
from edge_export.errors import CheckpointError
from edge_export.gguf.media_encoder import ENCODER_TYPES, USE_GELU, EncoderType, plan_encoder
from published_formats import edit_json
from tiny_media import MEDIA_IDS, write_media_member

# torch's softplus is up to one unit off the nearest float32; ours is the nearest.
ROUNDED = ".per_dim_scale.weight"
LARGER = ["12b", "26b-a4b", "31b"]
# The encoders that are compared: of one all weight types, of each other shape one.
COMPARED = [*(("both", kind) for kind in ENCODER_TYPES), ("vision", "f32"), *((name, "f16") for name in LARGER)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("media")
    larger = {name: write_media_member(root / name, member=name) for name in LARGER}
    return larger | {"both": write_media_member(root / "both"), "vision": write_media_member(root / "vision", audio=False, dtype="float32")}


@pytest.fixture(scope="module")
def converted(folders, tmp_path_factory) -> Path:
    """The folder of the encoders that llama.cpp's converter makes."""
    out = tmp_path_factory.mktemp("converted")
    convert([(folders[name], out / f"{name}-{kind}.gguf", kind) for name, kind in COMPARED], "--mmproj")
    return out


def write(folder: Path, path: Path, kind: EncoderType, **options) -> Path:
    plan, written = plan_encoder(open_checkpoint(folder), kind, **options), []
    plan.write(path, written.append)
    assert plan.bytes == sum(written) == path.stat().st_size
    return path


@pytest.mark.peer
@pytest.mark.parametrize(("name", "kind"), COMPARED)
def test_every_byte_is_the_converters(name, kind, folders, converted, tmp_path):
    theirs = converted / f"{name}-{kind}.gguf"
    ours = write(folders[name], tmp_path / "ours.gguf", kind, use_gelu=False)
    expected, result = bytearray(theirs.read_bytes()), bytearray(ours.read_bytes())
    for tensor in gguf.GGUFReader(theirs).tensors:
        if tensor.name.endswith(ROUNDED):
            place = slice(tensor.data_offset, tensor.data_offset + tensor.n_bytes)
            mine, reference = (np.frombuffer(bytes(data[place]), np.int32) for data in (result, expected))
            assert np.abs(mine - reference).max() <= 1
            result[place] = expected[place]
    assert result == expected


def test_the_activation_is_named(folders, tmp_path):
    with_key = gguf.GGUFReader(write(folders["both"], tmp_path / "a.gguf", "f16"))
    without = gguf.GGUFReader(write(folders["both"], tmp_path / "b.gguf", "f16", use_gelu=False))
    assert set(with_key.fields) - set(without.fields) == {USE_GELU}
    assert with_key.fields[USE_GELU].contents() is True


def test_tokens_and_towers_are_read(folders):
    media = media_architecture(open_checkpoint(folders["both"]))
    assert media.image_tokens == (MEDIA_IDS["<|image>"], MEDIA_IDS["<|image|>"], MEDIA_IDS["<image|>"])
    assert media.audio_tokens == (MEDIA_IDS["<|audio>"], MEDIA_IDS["<|audio|>"], MEDIA_IDS["<audio|>"])
    assert media_architecture(open_checkpoint(folders["vision"])).audio is None


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("vision_config", "patch_size", 14, "patch_size 14, llama.cpp computes with 16"),
        ("vision_config", "num_hidden_layers", 3, "is missing"),
        ("vision_config", "num_hidden_layers", 1, "is no tensor of the parts"),
        ("vision_config", "hidden_size", "x", "vision_config.hidden_size is 'x', not an integer"),
        ("audio_config", "conv_kernel_size", 7, "conv_kernel_size 7"),
        ("audio_config", "subsampling_conv_channels", [1, 2, 3], "not an array of 2 values"),
        ("text_config", "use_bidirectional_attention", "all", "use_bidirectional_attention is 'all'"),
        (None, "image_token_id", 512, "not an integer from 0 to 511"),
        (None, "vision_config", None, "no vision tower"),
    ],
)
def test_another_tower_is_refused(part, key, value, message, folders, tmp_path):
    folder = Path(shutil.copytree(folders["both"], tmp_path / "copy"))
    edit_json(folder / "config.json", lambda config: (config if part is None else config[part]).update({key: value}))
    with pytest.raises(CheckpointError, match=message):
        plan_encoder(open_checkpoint(folder), "f16")


def test_another_normalization_is_refused(folders, tmp_path):
    folder = Path(shutil.copytree(folders["both"], tmp_path / "copy"))
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    with pytest.raises(CheckpointError, match=r"image_mean is \[0.5, 0.5, 0.5\]"):
        plan_encoder(open_checkpoint(folder), "f16")
