"""Files read through the decoding child: what arrives is what the decoder makes, and a child that dies is a sentence."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.errors import RequestError
from edge_runtime.media import reading
from edge_runtime.media.decoder import decode_image, decode_sound
from edge_runtime.media.formats import MAX_FILE_BYTES

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"
pytest.importorskip("PIL")


@pytest.mark.parametrize("name", ["photo.jpg", "alpha.png"])
def test_an_image_arrives_unchanged(name):
    path = CORPUS / "image" / name
    np.testing.assert_array_equal(reading.read_image(path, 70).rgb, decode_image(path.read_bytes(), 70).rgb)


def test_a_sound_arrives_unchanged():
    path = CORPUS / "sound" / "mono16.wav"
    np.testing.assert_array_equal(reading.read_sound(path.read_bytes()).samples, decode_sound(path.read_bytes()).samples)


def test_the_message_names_the_file(tmp_path):
    (tmp_path / "a.png").write_bytes((CORPUS / "image" / "alpha.png").read_bytes()[:200])
    with pytest.raises(RequestError, match=r"a\.png: the image is damaged"):
        reading.read_image(tmp_path / "a.png")
    with pytest.raises(RequestError, match=r"b\.png cannot be read"):
        reading.read_image(tmp_path / "b.png")
    with pytest.raises(RequestError, match="is a sound, not an image"):
        reading.read_image(CORPUS / "sound" / "mono16.wav")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "large.jpg").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(RequestError, match="cannot be read"):
        reading.read_media(tmp_path / "large.jpg")


@pytest.mark.skipif(sys.platform != "linux", reason="memory limits are enforced on Linux")
def test_a_bomb_ends_the_child_only():
    from PIL import Image, PngImagePlugin

    file = io.BytesIO()
    text = PngImagePlugin.PngInfo()
    text.add_text("a", "x" * 900_000, zip=True)
    Image.new("1", (8000, 7900)).save(file, "PNG", pnginfo=text)
    assert len(file.getvalue()) < 100_000
    assert reading.read_image(file.getvalue(), 70).rows == 64


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.kill(os.getpid(), 11)",
        "print('nothing')",
        "print('{\"shape\": [48, 48, 3]}')",
        "print('{\"shape\": [-48, -48, 3]}')",
        "print('{\"shape\": [4800000, 48, 3]}')",
        'print(\'{"shape": "all"}\')',
        "print('[]')",
    ],
)
def test_a_child_that_dies_or_lies_is_a_sentence(monkeypatch, code):
    monkeypatch.setattr(reading, "_command", lambda *_: (sys.executable, "-c", code))
    with pytest.raises(RequestError, match="the media data: it"):
        reading.read_image((CORPUS / "image" / "photo.jpg").read_bytes())
