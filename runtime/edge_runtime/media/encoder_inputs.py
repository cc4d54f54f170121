"""Images and sound in the form that Gemma 4's encoders take, and the formats and limits of their files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import RequestError

Kind = Literal["image", "sound"]
Format = Literal["JPEG", "PNG", "WEBP", "WAV", "FLAC", "MP3"]
IMAGE_FORMATS: tuple[Format, ...] = ("JPEG", "PNG", "WEBP")
MAX_FILE_BYTES = 64 << 20
# 8160 x 6120 is the largest picture that most phones take; as RGB this limit is 192 MB.
MAX_PIXELS = 64_000_000
# The most scans of a progressive JPEG; each is a pass over all pixels. Encoders write about 10 (libjpeg's script for colours has 10).
MAX_SCANS = 100
MAX_CHANNELS = 8
SAMPLE_RATES = (4_000, 192_000)
# Gemma 4's feature extractor cuts a sound at this length (max_length 480000 at 16 kHz).
MAX_SECONDS = 30
_PREFIXES: tuple[tuple[bytes, Format], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"fLaC", "FLAC"),
    (b"ID3", "MP3"),
)
_RIFF: dict[bytes, Format] = {b"WEBP": "WEBP", b"WAVE": "WAV"}


def format_of(data: bytes) -> Format:
    """Returns a file's format. Raises RequestError if it is not supported."""
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


# Source of the rules for images: transformers, models/gemma4/image_processing_pil_gemma4.py.

PATCH = 16
POOLING = 3
# One soft row stands for a square with this many pixels on a side.
SIDE = PATCH * POOLING
BUDGETS = (70, 140, 280, 560, 1120)
DEFAULT_BUDGET = 280


@dataclass(frozen=True, eq=False)
class Image:
    """A decoded image in its final size: `rgb` is uint8 [height, width, 3], and both sides are multiples of `SIDE`."""

    rgb: NDArray[np.uint8]

    @property
    def rows(self) -> int:
        return self.rgb.size // (3 * SIDE**2)

    def patches(self) -> NDArray[np.float32]:
        """Returns the patches [height / 16 * width / 16, 768] with values in [0, 1]. Each patch is ordered by row, column and colour."""
        height, width = self.rgb.shape[0] // PATCH, self.rgb.shape[1] // PATCH
        grid = self.rgb.reshape(height, PATCH, width, PATCH, 3).transpose(0, 2, 1, 3, 4)
        return grid.reshape(height * width, PATCH * PATCH * 3) * np.float32(1 / 255)

    def positions(self) -> NDArray[np.int64]:
        """Returns x and y of each patch as [patches, 2]."""
        height, width = self.rgb.shape[0] // PATCH, self.rgb.shape[1] // PATCH
        y, x = np.divmod(np.arange(height * width), width)
        return np.stack([x, y], axis=1)


def check_budget(budget: int) -> None:
    """Raises RequestError for a budget that Gemma 4's image processor does not have."""
    if budget not in BUDGETS:
        raise RequestError(f"an image cannot have {budget} tokens; choose one of {', '.join(map(str, BUDGETS))}")


def final_size(height: int, width: int, budget: int = DEFAULT_BUDGET) -> tuple[int, int]:
    """Returns height and width after resizing, up or down, to at most `budget` soft rows with nearly the same proportions.

    Raises RequestError for an image that is so long and narrow that it does not fit.
    """
    check_budget(budget)
    pixels = budget * SIDE**2
    factor = math.sqrt(pixels / (height * width))
    tall, wide = math.floor(factor * height / SIDE) * SIDE, math.floor(factor * width / SIDE) * SIDE
    if tall == 0 and wide > 0:
        tall, wide = SIDE, min(width // height, budget) * SIDE
    elif wide == 0 and tall > 0:
        tall, wide = min(height // width, budget) * SIDE, SIDE
    if not 0 < tall * wide <= pixels:
        raise RequestError(f"an image of {width} x {height} pixels does not fit {budget} tokens; crop it")
    return tall, wide


# Source of the rules for sound: transformers, models/gemma4/feature_extraction_gemma4.py and processing_gemma4.py.

RATE = 16_000
MELS = 128
MAX_SAMPLES = RATE * MAX_SECONDS
_FRAME, _HOP, _FFT = 320, 160, 512
_PAD = _FRAME // 2
_FLOOR = 1e-3
_HIGHEST_HZ = 8_000.0
# Zero crossings of the resampler's sinc on each side, and the shape parameter of its Kaiser window: about 80 dB of attenuation.
_CROSSINGS, _KAISER = 32, 8.0
# How many filters are computed at a time. This bounds the memory for unusual rates, which need many filters.
_PHASES = 1024


@dataclass(frozen=True, eq=False)
class Sound:
    """Mono samples at 16 kHz, float32 [n] in [-1, 1], at most 30 seconds."""

    samples: NDArray[np.float32]

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise RequestError(f"a sound of {len(self.samples)} samples is too short; give at least {_HOP + 1} at 16 kHz")

    @property
    def frames(self) -> int:
        return (len(self.samples) + _PAD - _FRAME - 1) // _HOP + 1

    @property
    def rows(self) -> int:
        """The number of soft rows: frames halved twice, rounded up."""
        return -(-self.frames // 4)

    def mel_frames(self) -> NDArray[np.float32]:
        """Returns log-mel magnitudes [frames, 128]. Half a frame of silence comes first, so that each frame is centred on its time."""
        padded = np.concatenate([np.zeros(_PAD), self.samples])
        windows = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[::_HOP][: self.frames]
        hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FRAME) / _FRAME)).astype(np.float32)
        magnitudes = np.abs(np.fft.rfft(windows * hann, n=_FFT, axis=-1))
        return np.log(magnitudes @ _mel_filters() + _FLOOR).astype(np.float32)


@cache
def _mel_filters() -> NDArray[np.float64]:
    """Returns triangular filters [257, 128] of height 1, evenly spaced on HTK's mel scale from 0 to 8 kHz."""
    mels = np.linspace(0.0, 2595.0 * math.log10(1 + _HIGHEST_HZ / 700.0), MELS + 2)
    edges = 700.0 * (10 ** (mels / 2595.0) - 1)
    bins = np.linspace(0.0, RATE / 2, _FFT // 2 + 1)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    triangles: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return triangles


def to_sound(samples: NDArray[np.float32], rate: int) -> Sound:
    """Mixes samples [n, channels] to mono, resamples them to 16 kHz and cuts at 30 seconds. Raises RequestError if they are too few."""
    mono = np.nan_to_num(samples[: rate * MAX_SECONDS].mean(axis=1, dtype=np.float64), nan=0.0, posinf=1.0, neginf=-1.0)
    at_rate = mono if rate == RATE else resampled(np.clip(mono, -1.0, 1.0), rate)
    return Sound(np.clip(at_rate[:MAX_SAMPLES], -1.0, 1.0).astype(np.float32))


def resampled(samples: NDArray[np.float64], rate: int) -> NDArray[np.float64]:
    """Returns the samples at 16 kHz. Interpolates band-limited with a windowed sinc; each phase of the output has its own filter."""
    common = math.gcd(rate, RATE)
    up, down = RATE // common, rate // common
    cutoff = min(1.0, RATE / rate) * 0.97
    half = math.ceil(_CROSSINGS / cutoff)
    count = len(samples) * up // down
    padded = np.concatenate([np.zeros(half), samples, np.zeros(half + 1)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    result = np.empty(count)
    offsets = np.arange(-half, half + 1)
    for block in range(0, min(up, count), _PHASES):
        phases = np.arange(block, min(block + _PHASES, up, count))
        distance = offsets - (phases * down % up / up)[:, None]
        window = np.i0(_KAISER * np.sqrt(np.maximum(0.0, 1 - (distance / (half + 1)) ** 2))) / np.i0(_KAISER)
        taps = cutoff * np.sinc(cutoff * distance) * window
        for phase, filter_taps in zip(phases.tolist(), taps, strict=True):
            outputs = len(range(phase, count, up))
            result[phase::up] = windows[phase * down // up :: down][:outputs] @ filter_taps
    return result
