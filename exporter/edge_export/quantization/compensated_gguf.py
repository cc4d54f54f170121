"""Error compensation in a GGUF file that llama.cpp quantized: its scales stay, the levels of its blocks are chosen anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.checkpoint import Checkpoint, read_gguf_header
from edge_export.checkpoint.safetensors import StoredTensor, read_rows
from edge_export.gguf.keys import gguf_name
from edge_export.quantization.importance import Factor, Floats, Importance, Rounded, compensated
from edge_runtime.bundle.gguf_header import TensorInfo

# Layouts: llama.cpp, ggml/src/ggml-common.h (block_q4_0, block_q4_1, block_q5_0, block_q4_K, block_q5_K, block_q6_K) and ggml-quants.c.

Bytes = NDArray[np.uint8]
_Q4_0, _Q4_1, _Q5_0, _Q4_K, _Q5_K, _Q6_K = 2, 3, 6, 12, 13, 14


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """A ggml type: weights and bytes of a block, weights that share a scale, the highest level, and where its levels' low bits begin."""

    weights: int
    bytes: int
    group: int
    top: int
    low: int


BLOCK_TYPES = {
    _Q4_0: BlockType(weights=32, bytes=18, group=32, top=15, low=2),
    _Q4_1: BlockType(weights=32, bytes=20, group=32, top=15, low=4),
    _Q5_0: BlockType(weights=32, bytes=22, group=32, top=31, low=6),
    _Q4_K: BlockType(weights=256, bytes=144, group=32, top=15, low=16),
    _Q5_K: BlockType(weights=256, bytes=176, group=32, top=31, low=48),
    _Q6_K: BlockType(weights=256, bytes=210, group=16, top=63, low=0),
}


def read_levels(kind: int, blocks: Bytes) -> Bytes:
    """Returns the levels [n, weights] of blocks [n, bytes] of a type in BLOCK_TYPES."""
    count, low = len(blocks), _low_bits(kind, blocks)
    if kind == _Q5_0:
        low = low | (np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little") << np.uint8(4))
    elif kind == _Q5_K:
        high: Bytes = (blocks[:, 16:48, None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)
        low = low | (high.transpose(0, 2, 1).reshape(count, -1) << np.uint8(4))
    elif kind == _Q6_K:
        high = (blocks[:, 128:192].reshape(count, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & np.uint8(3)
        low = low | (high.reshape(count, -1) << np.uint8(4))
    return low


def with_levels(kind: int, blocks: Bytes, levels: Bytes) -> Bytes:
    """Returns blocks [n, bytes] with the same scales and these levels [n, weights]."""
    made, type, count = blocks.copy(), BLOCK_TYPES[kind], len(blocks)
    halves = _half(kind)
    nibbles = (levels & 15).reshape(count, -1, 2, halves)
    packed = (nibbles[:, :, 0] | (nibbles[:, :, 1] << np.uint8(4))).reshape(count, -1)
    made[:, type.low : type.low + packed.shape[1]] = packed
    high = levels >> np.uint8(4)
    if kind == _Q5_0:
        made[:, 2:6] = np.packbits(high, axis=1, bitorder="little")
    elif kind == _Q5_K:
        made[:, 16:48] = (high.reshape(count, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)
    elif kind == _Q6_K:
        shifted = high.reshape(count, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        made[:, 128:192] = shifted.sum(axis=2, dtype=np.uint8).reshape(count, 64)
    return made


def read_scales(kind: int, blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns scales and offsets, float32 [n, groups]: a weight is scale * level + offset."""
    if kind == _Q6_K:
        scales = _half_floats(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
        return scales, scales * np.float32(-32)
    first = _half_floats(blocks, 0)
    if kind in (_Q4_0, _Q5_0):
        return first, first * np.float32(-8 if kind == _Q4_0 else -16)
    second = _half_floats(blocks, 2)
    if kind == _Q4_1:
        return first, second
    scales, mins = _six_bits(blocks[:, 4:16])
    return first * scales, -second * mins


def _half(kind: int) -> int:
    """A byte has the low bits of two levels that are so many weights apart."""
    return {_Q4_0: 16, _Q4_1: 16, _Q5_0: 16, _Q6_K: 64}.get(kind, 32)


def _low_bits(kind: int, blocks: Bytes) -> Bytes:
    type, half = BLOCK_TYPES[kind], _half(kind)
    packed = blocks[:, type.low : type.low + type.weights // 2].reshape(len(blocks), -1, 1, half)
    levels: Bytes = ((packed >> np.array([[0], [4]], np.uint8)) & np.uint8(15)).reshape(len(blocks), -1)
    return levels


def _half_floats(blocks: Bytes, at: int) -> NDArray[np.float32]:
    """The float16 at this byte of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _six_bits(packed: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The scales and minima [n, 8] of 12 bytes: 6 bits each, the upper 2 of the last four in the upper bits of the first."""
    scales, mins, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    all_scales = np.concatenate([scales & 63, both & 15 | (scales >> 2) & 48], axis=1)
    all_mins = np.concatenate([mins & 63, both >> 4 | (mins >> 2) & 48], axis=1)
    return all_scales.astype(np.float32), all_mins.astype(np.float32)


def compensate_gguf(path: Path, checkpoint: Checkpoint, importance: Importance, progress: Callable[[int], None] = lambda _: None) -> None:
    """Rewrites the levels of the file's matrices that have second moments; `progress` gets the bytes done since its last call.

    Sizes, types and scales stay. Raises CheckpointError if the file or the checkpoint cannot be read.
    """
    sources = {gguf_name(name): (name, tensor) for name, tensor in checkpoint.tensors.items()}
    for info in read_gguf_header(path).tensors:
        if info.type in BLOCK_TYPES and info.name in sources:
            name, tensor = sources[info.name]
            factor = importance.factor(name, tensor) if len(tensor.shape) == 2 else None
            if factor is not None:
                _rewrite(path, info, tensor, factor)
        progress(info.bytes)


def _rewrite(path: Path, info: TensorInfo, tensor: StoredTensor, factor: Factor) -> None:
    rows, columns = tensor.shape
    type = BLOCK_TYPES[info.type]
    blocks = np.memmap(path, np.uint8, "r+", info.offset, (rows, columns // type.weights, type.bytes))
    at = 0
    for weights in read_rows(tensor):
        here = blocks[at : at + len(weights)]
        here[:] = _levels_anew(info.type, np.array(here).reshape(-1, type.bytes), weights, factor).reshape(here.shape)
        at += len(weights)
    blocks.flush()


def _levels_anew(kind: int, blocks: Bytes, weights: Floats, factor: Factor) -> Bytes:
    """Blocks [rows * blocks, bytes] of weights [rows, columns], with other levels."""
    type, rows = BLOCK_TYPES[kind], len(weights)
    scales, offsets = (part.reshape(rows, -1) for part in read_scales(kind, blocks))
    plain = Rounded(levels=read_levels(kind, blocks).reshape(rows, -1), scales=scales, offsets=offsets, group=type.group, top=type.top)
    made = compensated(weights, plain, factor)
    return with_levels(kind, blocks, made.levels.reshape(len(blocks), -1))
