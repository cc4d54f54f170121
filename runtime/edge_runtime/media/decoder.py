"""The child process that decodes one media file. Its argument is BUDGET; it reads the file and writes pixels or samples.

It decodes images with Pillow and sounds with libsndfile. No other module imports them, because files may be hostile.
It writes a line of JSON to standard output, then the bytes. After an error it writes only a line with `error` and `missing`; the latter
says that a library is not installed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from edge_devices.errors import EdgeError, errors_as
from edge_devices.machine.device_package import how_to_get
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.media.encoder_inputs import (
    IMAGE_FORMATS,
    MAX_CHANNELS,
    MAX_PIXELS,
    MAX_SCANS,
    MAX_SECONDS,
    SAMPLE_RATES,
    Image,
    Sound,
    final_size,
    format_of,
    kind_of,
    to_sound,
)

# A marker of a JPEG. Restart markers (D0 to D7), zeros and fill bytes are part of a scan and do not match.
_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")
_START_OF_SCAN, _END_OF_IMAGE, _FIRST_WITH_SEGMENT = b"\xda", b"\xd9", b"\xc0"
_ADDRESS = re.compile("<[^<>]* object at 0x[^<>]*>")


@contextlib.contextmanager
def _damaged(kind: str) -> Iterator[None]:
    """Turns any exception of a decoder into a RequestError with a sentence. Decoders raise almost anything for damaged files."""
    try:
        yield
    except (RequestError, MemoryError):
        raise
    except Exception as error:
        reason = _ADDRESS.sub("the file", " ".join(str(error).split()))[:120] or type(error).__name__
        raise RequestError(f"the {kind} is damaged ({reason}); save it again") from error


def decode_image(data: bytes, budget: int) -> Image:
    """Returns the image in its final size, rotated as EXIF says, on a white background. Of an animation, it returns the first frame.

    Raises RequestError for a file that is damaged or too large, and BackendError if Pillow is missing.
    """
    with errors_as(BackendError, "Pillow, which decodes images, is not installed", how_to_get("media"), ImportError):
        from PIL import Image as pillow
        from PIL import ImageOps
    with _damaged("image"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _check_scans(data)
        with pillow.open(io.BytesIO(data), formats=IMAGE_FORMATS) as opened:
            _check_size(*opened.size)
            opened.load()
            rgb = _on_white(pillow, ImageOps.exif_transpose(opened))
            height, width = final_size(rgb.height, rgb.width, budget)
            resized = rgb if (rgb.height, rgb.width) == (height, width) else rgb.resize((width, height), pillow.Resampling.BICUBIC)
            return Image(np.array(resized))


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise RequestError(f"the image has {width} x {height} pixels, at most {MAX_PIXELS / 1e6:.0f} million are allowed; reduce it")
    if width < 1 or height < 1:
        raise RequestError(f"the image has {width} x {height} pixels; save it again")


def _check_scans(data: bytes) -> None:
    """Counts scans as libjpeg reads them. The segment after a marker is skipped; unknown markers and those within a scan have none."""
    scans, at = 0, 2
    while format_of(data) == "JPEG" and scans <= MAX_SCANS and (marker := _MARKER.search(data, at)) and marker[1] != _END_OF_IMAGE:
        scans, at = scans + (marker[1] == _START_OF_SCAN), marker.end()
        if marker[1] >= _FIRST_WITH_SEGMENT:
            at += int.from_bytes(data[at : at + 2], "big")
    if scans > MAX_SCANS:
        raise RequestError(f"the image has more than {MAX_SCANS} scans; save it again")


def _on_white(pillow: Any, image: Any) -> Any:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return pillow.alpha_composite(pillow.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


def decode_sound(data: bytes) -> Sound:
    """Returns the first 30 seconds as 16 kHz mono.

    Raises RequestError for a file that is damaged, empty or beyond the limits, and BackendError if soundfile is missing.
    """
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise BackendError(f"soundfile, which decodes sounds, does not load ({error}); {how_to_get('media')}") from error
    with _damaged("sound"), soundfile.SoundFile(io.BytesIO(data)) as file:
        _check(file.samplerate, file.channels)
        return to_sound(file.read(file.samplerate * MAX_SECONDS, dtype="float32", always_2d=True), int(file.samplerate))


def _check(rate: int, channels: int) -> None:
    lowest, highest = SAMPLE_RATES
    if not lowest <= rate <= highest:
        raise RequestError(f"the sound has {rate} samples a second, {lowest} to {highest} are supported; convert it")
    if not 1 <= channels <= MAX_CHANNELS:
        raise RequestError(f"the sound has {channels} channels, 1 to {MAX_CHANNELS} are supported; convert it")


def main() -> None:
    """Decodes standard input, with a lower priority than the machine's other work."""
    if hasattr(os, "nice"):
        os.nice(10)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the answer
    data = sys.stdin.buffer.read()
    try:
        values = decode_image(data, int(sys.argv[1])).rgb if kind_of(data) == "image" else decode_sound(data).samples
    except (EdgeError, MemoryError) as error:
        text = "decoding it needs too much memory; reduce it" if isinstance(error, MemoryError) else str(error)
        output.write(json.dumps({"error": text, "missing": isinstance(error, BackendError)}).encode() + b"\n")
    else:
        output.write(json.dumps({"shape": values.shape}).encode() + b"\n")
        output.write(values.tobytes())
    output.flush()
    os._exit(0)  # skips the destructors of C libraries that have read hostile input


if __name__ == "__main__":
    main()
