"""Decodes sound files: WAV here, FLAC and MP3 by libsndfile. It runs in a child process, since files are hostile."""

from __future__ import annotations

import io
import struct

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import BackendError, RequestError
from edge_runtime.media.formats import MAX_CHANNELS, MAX_SECONDS, SAMPLE_RATES, format_of
from edge_runtime.media.sound import Sound, to_sound

INSTALL = "pip install 'edge-mtp[media]'"
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_SAMPLE_BITS = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}


def decode_sound(data: bytes) -> Sound:
    """Returns the first 30 seconds as 16 kHz mono.

    Raises RequestError for a file that is damaged, empty or beyond the limits, BackendError without soundfile.
    """
    samples, rate = _wav(data) if format_of(data) == "WAV" else _by_libsndfile(data)
    return to_sound(samples, rate)


def _check(rate: int, channels: int) -> None:
    lowest, highest = SAMPLE_RATES
    if not lowest <= rate <= highest:
        raise RequestError(f"the sound has {rate} samples a second, {lowest} to {highest} are supported; convert it")
    if not 1 <= channels <= MAX_CHANNELS:
        raise RequestError(f"the sound has {channels} channels, 1 to {MAX_CHANNELS} are supported; convert it")


def _by_libsndfile(data: bytes) -> tuple[NDArray[np.float32], int]:
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise BackendError(f"soundfile, which decodes FLAC and MP3, does not load ({error}); run: {INSTALL}, or convert to WAV") from error
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check(file.samplerate, file.channels)
            samples = file.read(file.samplerate * MAX_SECONDS, dtype="float32", always_2d=True)
            return samples, int(file.samplerate)
    except RequestError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise RequestError(f"the sound is damaged ({reason}); save it again") from error


def _wav(data: bytes) -> tuple[NDArray[np.float32], int]:
    """Reads PCM and float WAV, also with the extensible header. A last frame that is cut off is left out."""
    chunks = _chunks(data)
    layout, body = chunks.get(b"fmt ", b""), chunks.get(b"data", b"")
    if len(layout) < 16 or not body:
        raise RequestError("the WAV file has no samples; save it again")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", layout)
    if kind == _EXTENSIBLE and len(layout) >= 26:
        kind = int.from_bytes(layout[24:26], "little")
    _check(rate, channels)
    if bits not in _SAMPLE_BITS.get(kind, ()):
        raise RequestError(f"the WAV file has samples of {bits} bits in coding {kind}; save it as 16-bit PCM")
    frame = channels * bits // 8
    frames = min(len(body) // frame, rate * MAX_SECONDS)
    return _floats(body[: frames * frame], kind, bits).reshape(frames, channels), rate


def _chunks(data: bytes) -> dict[bytes, bytes]:
    """The first chunk of each name. A stream's header may claim more than there is: then the rest is the chunk."""
    found: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= len(data) and len(found) < 64:
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        found.setdefault(name, data[at + 8 : at + 8 + size])
        at += 8 + size + size % 2
    return found


def _floats(body: bytes, kind: int, bits: int) -> NDArray[np.float32]:
    if kind == _FLOAT:
        return np.frombuffer(body, f"<f{bits // 8}").astype(np.float32)
    if bits == 24:
        # Three bytes become the upper three of four.
        wide = np.zeros((len(body) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
        body, bits = wide.tobytes(), 32
    values = np.frombuffer(body, np.uint8 if bits == 8 else f"<i{bits // 8}").astype(np.float64)
    centred: NDArray[np.float64] = (values - 128 if bits == 8 else values) / 2 ** (bits - 1)
    return centred.astype(np.float32)
