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
from edge_runtime.media.encoder_inputs import MAX_FILE_BYTES

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
    with pytest.raises(RequestError, match=r"damaged \(cannot identify image file the file\)"):  # no address of Python's object
        decode_image((CORPUS / "image" / "alpha.png").read_bytes()[:8] + bytes(12), 70)
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


def progressive(times: int) -> bytes:
    """A progressive JPEG whose last scan is there that many times more."""
    from PIL import Image as pillow

    file = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (96, 96, 3), np.uint8)
    pillow.fromarray(pixels).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    begin, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[begin:end] * times + data[end:]


def test_a_jpeg_with_very_many_scans_is_refused_before_it_is_decoded(monkeypatch):
    from PIL import JpegImagePlugin

    assert decode_image(progressive(0), 70).rows
    assert decode_image(progressive(50), 70).rows
    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", lambda _: pytest.fail("it was decoded"))
    for times in (100, 900):
        with pytest.raises(RequestError, match="more than 100 scans; save it again"):
            decode_image(progressive(times), 70)


def test_markers_in_the_other_segments_of_a_jpeg_are_no_scans():
    """A phone's picture holds smaller ones, and a film after its end; a segment cannot hide the end from the scans behind it."""
    data = progressive(0)
    segment = b"\xff\xe1" + (2 + 4000).to_bytes(2, "big") + b"\xff\xda" * 2000
    film = b"\xff\xda" * 2000
    assert decode_image(data[:2] + segment + data[2:] + film, 70).rows
    hiding = b"\xff\xe1" + (2 + 4).to_bytes(2, "big") + b"\xff\xd9\xff\xd9"
    bomb = progressive(900)
    first = bomb.index(b"\xff\xda")
    with pytest.raises(RequestError, match="more than 100 scans"):
        decode_image(bomb[:first] + hiding + bomb[first:], 70)
