"""What an encoder takes is counted before it is loaded, and given back when it is freed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge_runtime.bundle.manifest import (
    AUDIO_ENCODER,
    MEDIA_ENCODER,
    VISION_ENCODER,
    BundleFile,
    Manifest,
    MediaInputs,
    MediaTokens,
    VisionSize,
)
from edge_runtime.errors import RequestError
from edge_runtime.planning.memory import EncoderMemory, encoder_activation_bytes, encoder_weight_bytes
from scripted import MANIFEST
from tiny_media import noise, picture

TOKENS = MediaTokens(begin=1, placeholder=2, end=3)
E2B = VisionSize(hidden_size=768, layers=16, feed_forward_size=3072)


def file(role: str, size: int, quantization: str = "f16") -> BundleFile:
    return BundleFile(role=role, path=role, format="onnx", sha256="0" * 64, bytes=size, quantization=quantization)


def manifest(quantization: str = "f16", **inputs: Any) -> Manifest:
    files = [(MEDIA_ENCODER, 400_000_000), (VISION_ENCODER, 1000), (f"{VISION_ENCODER}_data", 300_000_000), (AUDIO_ENCODER, 2000)]
    media = MediaInputs(**{"image": TOKENS, "audio": TOKENS, "vision": E2B, **inputs})
    return replace(MANIFEST, files=tuple(file(role, size, quantization) for role, size in files), media=media)


def test_weights_are_those_that_are_loaded() -> None:
    assert encoder_weight_bytes(manifest()) == 400_000_000
    assert encoder_weight_bytes(manifest(), "image") == 600_002_000
    assert encoder_weight_bytes(manifest(), "sound") == 4000
    assert encoder_weight_bytes(manifest("int8"), "image") == 300_001_000
    assert encoder_weight_bytes(MANIFEST) == 0


def test_activations_are_near_those_measured() -> None:
    """E2B's tower on llama.cpp, as it was measured."""
    for rows, measured in ((64, 39e6), (256, 145e6), (529, 324e6)):
        assert 0.99 * measured < encoder_activation_bytes(manifest(), "image", rows) < 1.15 * measured
    assert encoder_activation_bytes(manifest(vision=VisionSize(hidden_size=3840)), "image", 280) == 0
    assert encoder_activation_bytes(manifest(samples_per_row=640), "sound", 750) == 0
    assert encoder_activation_bytes(manifest(), "sound", 750) > 100e6
    assert encoder_activation_bytes(MANIFEST, "image", 280) == 0


def test_only_what_is_not_yet_taken_is_needed() -> None:
    free = [500_000_000]
    room = EncoderMemory(manifest(), lambda: free[0], one_file=True)
    room.admit(picture(48, 48, 1))
    free[0] = 100_000_000
    room.admit(picture(48, 48, 2))
    with pytest.raises(RequestError, match=r"needs 155\.\d MB of memory for this image, but 100\.0 MB are available; ask for less detail"):
        room.admit(picture(768, 768, 1))
    free[0] = 160_000_000
    room.admit(picture(768, 768, 1))
    free[0] = 0
    room.admit(picture(480, 480, 1))
    with pytest.raises(RequestError, match=r"needs 400\.\d MB"):
        EncoderMemory(manifest(), lambda: 0, one_file=True).admit(picture(48, 48, 1))


def test_a_limit_is_for_all_together() -> None:
    room = EncoderMemory(manifest(), lambda: 0, one_file=True, limit=2_000_000_000, beside=1_500_000_000)
    room.admit(picture(48, 48, 1))
    with pytest.raises(RequestError, match=r"555\.\d MB .* this image, but the limit of 2\.00 GB leaves 500\.0 MB"):
        room.admit(picture(768, 768, 1))


def test_each_graph_of_onnx_is_counted_when_it_is_used() -> None:
    free = [700_000_000]
    room = EncoderMemory(manifest(), lambda: free[0], one_file=False)
    room.admit(picture(48, 48, 1))
    free[0] = 4_000_000
    with pytest.raises(RequestError, match="for this sound"):
        room.admit(noise(480_000))
    room.admit(noise(1_000))


def test_where_nothing_is_known_nothing_is_refused() -> None:
    EncoderMemory(manifest(), lambda: None, one_file=True).admit(picture(768, 768, 1))
