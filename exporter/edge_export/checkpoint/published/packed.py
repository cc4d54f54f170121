"""compressed-tensors checkpoints in 4 bits (`-qat-w4a16-ct`): packed words, a scale for each block of 32, and the shape -> one matrix.

Layout: compressed-tensors, pack-quantized: X.weight_packed I32 [out, in / 8], X.weight_scale [out, in / 32], X.weight_shape I64 [2].
"""

from __future__ import annotations

import dataclasses

from edge_export.checkpoint.safetensors import PACKED4, PACKED_BLOCK, SOURCE_TYPE, StoredTensor
from edge_export.errors import CheckpointError

_PACKED, _SCALE, _SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"


def with_matrices(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors with one entry `X.weight` for each packed matrix. Raises CheckpointError for parts that do not fit."""
    found = {}
    for name, tensor in stored.items():
        base, _, _ = name.rpartition(".")
        if name.endswith(_PACKED):
            found[f"{base}.weight"] = _matrix(f"{base}.weight", tensor, stored.get(base + _SCALE))
        elif not (name.endswith((_SCALE, _SHAPE)) and base + _PACKED in stored):
            found[name] = tensor
    return found


def _matrix(name: str, packed: StoredTensor, scales: StoredTensor | None) -> StoredTensor:
    rows, words = packed.shape if len(packed.shape) == 2 else (0, 0)
    shape = (rows, 8 * words)
    fits = scales is not None and scales.dtype in SOURCE_TYPE and scales.shape == (rows, shape[1] // PACKED_BLOCK)
    if packed.dtype != "I32" or not words or shape[1] % PACKED_BLOCK or not fits:
        found = None if scales is None else [scales.dtype, list(scales.shape)]
        raise CheckpointError(
            f"{packed.path}: {packed.name!r} {packed.dtype} {list(packed.shape)} with the scales {found} is no matrix"
            f" in 4 bits and blocks of {PACKED_BLOCK}; download the checkpoint again"
        )
    return dataclasses.replace(packed, name=name, dtype=PACKED4, shape=shape, scales=scales)
