"""Sound as Gemma 4's audio encoder takes it: 16 kHz mono, log-mel frames, soft rows.

Source of the rules: transformers, models/gemma4/feature_extraction_gemma4.py and processing_gemma4.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import RequestError
from edge_runtime.media.formats import MAX_SECONDS

RATE = 16_000
MELS = 128
MAX_SAMPLES = RATE * MAX_SECONDS
_FRAME, _HOP, _FFT = 320, 160, 512
_PAD = _FRAME // 2
_FLOOR = 1e-3
_HIGHEST_HZ = 8_000.0
# Zero crossings of the resampler's sinc on each side, and the Kaiser window's shape: about 80 dB.
_CROSSINGS, _KAISER = 32, 8.0
# Filters computed at a time, which bounds the memory of odd rates.
_PHASES = 1024


@dataclass(frozen=True, eq=False)
class Sound:
    """Samples float32 [n] in [-1, 1], mono at 16 kHz, at most 30 seconds."""

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
        """Returns log-mel frames [frames, 128] of magnitudes; each is centred on its time, half a frame of silence comes first."""
        padded = np.concatenate([np.zeros(_PAD), self.samples])
        windows = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[::_HOP][: self.frames]
        hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FRAME) / _FRAME)).astype(np.float32)
        magnitudes = np.abs(np.fft.rfft(windows * hann, n=_FFT, axis=-1))
        return np.log(magnitudes @ _mel_filters() + _FLOOR).astype(np.float32)


@cache
def _mel_filters() -> NDArray[np.float64]:
    """Triangles [257, 128], evenly spaced on HTK's mel scale from 0 to 8 kHz, of height 1."""
    mels = np.linspace(0.0, 2595.0 * math.log10(1 + _HIGHEST_HZ / 700.0), MELS + 2)
    edges = 700.0 * (10 ** (mels / 2595.0) - 1)
    bins = np.linspace(0.0, RATE / 2, _FFT // 2 + 1)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    triangles: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling))
    return triangles


def to_sound(samples: NDArray[np.float32], rate: int) -> Sound:
    """Mixes channels [n, channels] to one, resamples to 16 kHz and cuts at 30 seconds. Raises RequestError if it is too short."""
    mono = np.nan_to_num(samples[: rate * MAX_SECONDS].mean(axis=1, dtype=np.float64), nan=0.0, posinf=1.0, neginf=-1.0)
    at_rate = mono if rate == RATE else resampled(np.clip(mono, -1.0, 1.0), rate)
    return Sound(np.clip(at_rate[:MAX_SAMPLES], -1.0, 1.0).astype(np.float32))


def resampled(samples: NDArray[np.float64], rate: int) -> NDArray[np.float64]:
    """Returns the samples at 16 kHz: band-limited interpolation by a windowed sinc, one filter for each phase of the output."""
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
