"""The formats of media files, found by their first bytes, and the limits of what is decoded."""

from __future__ import annotations

from typing import Literal

from edge_runtime.errors import RequestError

Kind = Literal["image", "sound"]
Format = Literal["JPEG", "PNG", "WEBP", "WAV", "FLAC", "MP3"]
IMAGE_FORMATS: tuple[Format, ...] = ("JPEG", "PNG", "WEBP")
MAX_FILE_BYTES = 64 << 20
# 8160 x 6120 is the largest picture that most phones take; as RGB this limit is 192 MB.
MAX_PIXELS = 64_000_000
# Of a progressive JPEG: each is a pass over all pixels. Encoders write about 10 (libjpeg's script for colours has 10).
MAX_SCANS = 100
MAX_CHANNELS = 8
SAMPLE_RATES = (4_000, 192_000)
# The feature extractor of Gemma 4 cuts there (max_length 480000 at 16 kHz).
MAX_SECONDS = 30
_PREFIXES: tuple[tuple[bytes, Format], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"fLaC", "FLAC"),
    (b"ID3", "MP3"),
)
_RIFF: dict[bytes, Format] = {b"WEBP": "WEBP", b"WAVE": "WAV"}


def format_of(data: bytes) -> Format:
    """Returns the format. Raises RequestError for one that is not supported."""
    for prefix, name in _PREFIXES:
        if data.startswith(prefix):
            return name
    if data[:4] == b"RIFF" and data[8:12] in _RIFF:
        return _RIFF[data[8:12]]
    # An MPEG frame: eleven bits of sync, a version that exists, layer III.
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2 and data[1] & 0x18 != 0x08:
        return "MP3"
    raise RequestError("its format is not supported; convert it to jpeg, png, webp, wav, flac or mp3")


def kind_of(data: bytes) -> Kind:
    """Returns whether the file is an image or a sound. Raises RequestError for an unsupported format."""
    return "image" if format_of(data) in IMAGE_FORMATS else "sound"
