"""Checkpoints with packed weights: codes and scales -> one matrix.

`-qat-mobile-transformers` and `-ct` have 2, 4 or 8 bits with scales for each row, and round activations to int8. Layout: transformers,
integrations/gemma_quant.py (X.weight, X.weight_scale, X.input_activation_scale, X.output_activation_scale; tables as
X.embedding_quantized, X.embedding_scale), and compressed-tensors' pack-quantized (X.weight_packed, X.input_scale, X.output_scale).

`-qat-w4a16-ct` has words of 4 bits and a scale for each block of 32. Layout: compressed-tensors, pack-quantized: X.weight_packed I32
[out, in / 8], X.weight_scale [out, in / 32], X.weight_shape I64 [2].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import isfinite
from typing import Any

from edge_export.checkpoint.published.formats import rounds_activations
from edge_export.checkpoint.safetensors import PACKED4, PACKED_BLOCK, SOURCE_TYPE, StoredTensor, read_values
from edge_export.errors import CheckpointError

# A matrix X.weight by the name of its codes, and the name of its scales.
_CODES = {"embedding_quantized": "embedding_scale", "weight_packed": "weight_scale", "weight": "weight_scale"}
_ROUNDING = (("input_activation_scale", "input_scale"), ("output_activation_scale", "output_scale"))
_DROPPED = ("weight_shape", "k_cache_scale", "v_cache_scale", "k_scale", "v_scale")
_BITS = (2, 4, 8)
_PACKED, _SCALE, _SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
# Names and shapes of a model's matrices.
Shapes = Mapping[str, tuple[int, ...]]
# Scales of a linear layer's input and output; 0: not rounded.
Rounding = tuple[float, float]


def is_mobile(config: dict[str, Any]) -> bool:
    """Whether a parsed config.json names one of these formats."""
    return rounds_activations(config) is not None


def with_codes(tensors: Mapping[str, StoredTensor], shapes: Shapes) -> tuple[dict[str, StoredTensor], dict[str, Rounding]]:
    """Returns the tensors with one entry for each matrix, and the rounding of each layer's activations by the matrix's name.

    `tensors` are those of the text model under their text-only names. Raises CheckpointError for parts that do not fit.
    """
    merged: dict[str, StoredTensor] = {}
    rounding: dict[str, Rounding] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        base, _, ending = name.rpartition(".")
        scales = tensors.get(f"{base}.{_CODES[ending]}") if ending in _CODES else None
        if scales is None:
            continue
        whole = f"{base}.weight"
        merged[whole] = _matrix(whole, tensor, scales, shapes)
        used |= {name, f"{base}.{_CODES[ending]}", *(f"{base}.{other}" for other in _DROPPED)}
        sides = [[f"{base}.{key}" for key in keys] for keys in _ROUNDING]
        used |= {key for keys in sides for key in keys}
        first, second = ([tensors[key] for key in keys if key in tensors] for keys in sides)
        rounding[whole] = (_scale(first), _scale(second))
    rest = {name: tensor for name, tensor in tensors.items() if name not in used and not name.endswith(_DROPPED)}
    return rest | merged, rounding


def _matrix(name: str, codes: StoredTensor, scales: StoredTensor, shapes: Shapes) -> StoredTensor:
    rows, columns = shapes.get(name, (0, 0)) if len(shapes.get(name, ())) == 2 else (0, 0)
    bits, left = divmod(8 * codes.bytes, max(rows * columns, 1))
    sound = codes.dtype in ("U8", "I8", "I32") and bits in _BITS and not left and codes.shape[:1] == (rows,)
    parts = scales.shape[1] if len(scales.shape) == 2 and scales.shape[0] == rows else 0
    if not sound or scales.dtype not in SOURCE_TYPE or not parts or columns % parts or columns * bits % 8:
        raise CheckpointError(
            f"{codes.path}: {codes.name!r} {codes.dtype} {list(codes.shape)} with the scales {scales.dtype} {list(scales.shape)}"
            f" is no matrix {[rows, columns]} in 2, 4 or 8 bits; download the checkpoint again"
        )
    return dataclasses.replace(codes, name=name, dtype=f"CODES{bits}", shape=(rows, columns), scales=scales, bits=bits)


def _scale(stored: list[StoredTensor]) -> float:
    if not stored:
        return 0.0
    tensor = stored[0]
    value = float(read_values(tensor).reshape(-1)[0]) if tensor.bytes and tensor.dtype in SOURCE_TYPE and tensor.bytes <= 4 else -1.0
    if not isfinite(value) or value < 0:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name!r} {tensor.dtype} {list(tensor.shape)} is no scale; download the checkpoint again"
        )
    return value


def with_matrices(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors with one entry `X.weight` for each packed matrix. Raises CheckpointError for parts that do not fit."""
    merged = {}
    for name, tensor in stored.items():
        base, _, _ = name.rpartition(".")
        if name.endswith(_PACKED):
            merged[f"{base}.weight"] = _matrix_of_words(f"{base}.weight", tensor, stored.get(base + _SCALE))
        elif not (name.endswith((_SCALE, _SHAPE)) and base + _PACKED in stored):
            merged[name] = tensor
    return merged


def _matrix_of_words(name: str, packed: StoredTensor, scales: StoredTensor | None) -> StoredTensor:
    rows, words = packed.shape if len(packed.shape) == 2 else (0, 0)
    shape = (rows, 8 * words)
    fits = scales is not None and scales.dtype in SOURCE_TYPE and scales.shape == (rows, shape[1] // PACKED_BLOCK)
    if packed.dtype != "I32" or not words or shape[1] % PACKED_BLOCK or not fits:
        described = None if scales is None else [scales.dtype, list(scales.shape)]
        raise CheckpointError(
            f"{packed.path}: {packed.name!r} {packed.dtype} {list(packed.shape)} with the scales {described} is no matrix"
            f" in 4 bits and blocks of {PACKED_BLOCK}; download the checkpoint again"
        )
    return dataclasses.replace(packed, name=name, dtype=PACKED4, shape=shape, scales=scales)
