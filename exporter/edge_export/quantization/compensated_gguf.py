"""Error compensation in a GGUF file that llama.cpp quantized: its scales stay, its levels are chosen anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.gguf_source import read_gguf_header
from edge_export.checkpoint.safetensors import StoredTensor, read_rows
from edge_export.gguf.block_levels import BLOCK_TYPES, Bytes, read_levels, read_scales, with_levels
from edge_export.gguf.tensor_names import gguf_name
from edge_export.quantization.compensation import Factor, Floats, Rounded, compensated
from edge_export.quantization.importance import Importance
from edge_runtime.bundle.gguf_header import TensorInfo


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
