"""The decoders of images and sound, as they run in the child process that decodes one file."""

from __future__ import annotations

import importlib
from pathlib import Path

from edge_runtime.media.decoder import decode_image, decode_sound
from edge_runtime.media.encoder_inputs import kind_of
from fuzzing.readers import Read, Reader

# Pixels and samples take more bytes than compressed files; the limits of encoder_inputs.py bound them.
_DECODED = 2.0e6
_BUDGET = 70


def _image(_: Path, __: Path | None) -> Read:
    def read(data: bytes) -> None:
        image = decode_image(data, _BUDGET)
        assert 0 < image.rows <= _BUDGET

    _import("PIL.Image", "PIL.JpegImagePlugin", "PIL.PngImagePlugin", "PIL.WebPImagePlugin")
    return read


def _sound(_: Path, __: Path | None) -> Read:
    def read(data: bytes) -> None:
        if kind_of(data) == "sound":
            decode_sound(data).mel_frames()

    _import("soundfile")
    return read


def _import(*names: str) -> None:
    """Libraries are imported before the campaign forbids it."""
    for name in names:
        importlib.import_module(name)


READERS = [
    Reader(name="image", make=_image, memory_factor=_DECODED),
    Reader(name="sound", make=_sound, memory_factor=_DECODED),
]
