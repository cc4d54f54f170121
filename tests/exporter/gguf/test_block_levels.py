"""Levels and scales of llama.cpp's blocks: they give the weights that gguf's own code reads, and go back without loss."""

from __future__ import annotations

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")

from edge_export.quantization.compensated_gguf import BLOCK_TYPES, Bytes

# Where each type has its float16 scales.
HALVES = {2: (0,), 3: (0, 2), 6: (0,), 12: (0, 2), 13: (0, 2), 14: (208,)}


def made(kind: int) -> Bytes:
    """Blocks of any bytes but finite scales."""
    random = np.random.default_rng(kind)
    blocks = random.integers(0, 256, (64, BLOCK_TYPES[kind].bytes), dtype=np.uint8)
    for at in HALVES[kind]:
        blocks[:, at : at + 2] = random.normal(size=(64, 1)).astype("<f2").view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES))
def test_scales_and_levels_are_the_weights(kind: int) -> None:
    blocks, type = made(kind), BLOCK_TYPES[kind]
    levels, (scales, offsets) = type.read_levels(blocks), type.scales(blocks)
    assert levels.shape == (64, type.weights)
    assert set(np.unique(levels)) == set(range(type.top + 1))
    weights = levels * np.repeat(scales, type.group, axis=1) + np.repeat(offsets, type.group, axis=1)
    assert np.array_equal(weights, gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind)))


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES))
def test_other_levels_leave_the_scales(kind: int) -> None:
    blocks, type = made(kind), BLOCK_TYPES[kind]
    assert np.array_equal(type.with_levels(blocks, type.read_levels(blocks)), blocks)
    other = np.random.default_rng(0).integers(0, type.top + 1, (64, type.weights), dtype=np.uint8)
    changed = type.with_levels(blocks, other)
    assert np.array_equal(type.read_levels(changed), other)
    for before, after in zip(type.scales(blocks), type.scales(changed), strict=True):
        assert np.array_equal(before, after)
