"""Mel frames against transformers' feature extractor, resampling against the formula of a tone, and the formats."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest

from edge_runtime.errors import RequestError
from edge_runtime.media import decoder
from edge_runtime.media.decoder import decode_sound
from edge_runtime.media.encoder_inputs import MAX_SAMPLES, RATE, Sound, resampled, to_sound

# Of log-mels from -6.9 to about 5; the reference pads with zeros and computes in the same precision.
TOLERANCE = 1e-5


def tone(rate: int, seconds: float, hertz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)


def wav(body: bytes, *, kind: int = 1, channels: int = 1, rate: int = 16000, bits: int = 16, claimed: int | None = None) -> bytes:
    frame = channels * bits // 8
    layout = struct.pack("<HHIIHH", kind, channels, rate, rate * frame, frame, bits)
    size = len(body) if claimed is None else claimed
    return b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0" + layout + b"data" + struct.pack("<I", size) + body


@pytest.mark.parametrize("samples", [161, 320, 321, 16_000, 16_001, 47_999, 480_000])
def test_mel_frames_equal_the_feature_extractor(samples):
    module = pytest.importorskip("transformers.models.gemma4.feature_extraction_gemma4")
    values = np.random.default_rng(samples).uniform(-0.8, 0.8, samples).astype(np.float32)
    expected = module.Gemma4AudioFeatureExtractor()([values], return_tensors="np")
    mask = expected["input_features_mask"][0]
    ours = Sound(values)
    assert ours.frames == mask.sum()
    np.testing.assert_allclose(ours.mel_frames(), expected["input_features"][0][mask], rtol=0, atol=TOLERANCE)
    for _ in range(2):
        mask = mask[::2]
    assert ours.rows == mask.sum()


def test_thirty_seconds_are_750_rows():
    assert to_sound(np.zeros((40 * RATE, 1), np.float32), RATE).rows == 750


@pytest.mark.parametrize("rate", [4000, 8000, 11025, 22050, 44100, 48000, 44101, 192000])
def test_resampling_keeps_a_tone(rate):
    value, expected = tone(rate, 0.5), tone(RATE, 0.5)
    ours = resampled(value, rate)
    assert abs(len(ours) - len(expected)) <= 1
    inner = slice(1000, 7000)
    np.testing.assert_allclose(ours[inner], expected[inner], rtol=0, atol=1e-3)


def test_resampling_removes_what_16_khz_cannot_hold():
    ours = resampled(tone(48000, 0.5, hertz=11_000), 48000)
    assert np.abs(ours[1000:7000]).max() < 1e-3


@pytest.mark.parametrize(("kind", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
def test_wav_codings_give_the_same_samples(kind, bits):
    values = tone(16000, 0.1)
    if kind == 3:
        body = values.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        body = (np.round(values * 128) + 128).astype(np.uint8).tobytes()
    else:
        whole = np.round(values * 2 ** (bits - 1)).astype("<i8").view(np.uint8).reshape(-1, 8)
        body = whole[:, : bits // 8].tobytes()
    ours = decode_sound(wav(body, kind=kind, bits=bits))
    np.testing.assert_allclose(ours.samples, values, atol=2.0 ** (1 - min(bits, 24)) / 1.5)


def test_channels_are_mixed_and_a_streams_header_is_read():
    left, right = tone(16000, 0.1), -tone(16000, 0.1)
    body = np.stack([left, right], 1).astype("<f4").tobytes()
    assert not decode_sound(wav(body, kind=3, channels=2, bits=32, claimed=0xFFFFFFFF)).samples.any()


@pytest.mark.parametrize("name", ["FLAC", "MP3"])
def test_compressed_formats(name):
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, tone(44100, 1.0), 44100, format=name)
    ours = decode_sound(file.getvalue())
    expected = tone(RATE, 1.0)
    assert abs(np.abs(np.fft.rfft(ours.samples)).argmax() * RATE / len(ours.samples) - 440) < 2
    assert abs(float(np.std(ours.samples)) - float(np.std(expected))) < 0.02


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (wav(b"\0" * 200), "too short"),
        (wav(b"\0" * 4000, rate=3000), "3000 samples a second"),
        (wav(b"\0" * 4000, channels=9), "9 channels"),
        (b"fLaC" + b"\0" * 100, "soundfile|damaged"),
        (b"GIF89a", "damaged .Error opening the file: Format not recognised"),
    ],
)
def test_what_cannot_be_decoded_is_refused(data, message):
    from edge_runtime.errors import EdgeRuntimeError

    with pytest.raises(EdgeRuntimeError, match=message):
        decode_sound(data)


def test_a_sound_that_needs_too_much_memory_is_not_called_damaged(monkeypatch):
    monkeypatch.setattr(decoder, "to_sound", lambda *_: np.empty(1 << 56))
    with pytest.raises(MemoryError):
        decode_sound(wav(b"\0" * 4000))


def test_not_a_number_becomes_silence():
    body = np.full(4000, np.nan, "<f4").tobytes()
    assert np.isfinite(decode_sound(wav(body, kind=3, bits=32)).samples).all()


def test_a_short_sound_is_refused():
    with pytest.raises(RequestError, match="too short"):
        Sound(np.zeros(160, np.float32))
    assert MAX_SAMPLES == 480_000
