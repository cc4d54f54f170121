"""Checkpoints with packed weights: codes and scales -> one matrix.

`-qat-mobile-transformers` and `-ct` have 2, 4 or 8 bits with scales for each row, and round activations to int8. Layout: transformers,
integrations/gemma_quant.py (X.weight, X.weight_scale, X.input_activation_scale, X.output_activation_scale; tables as
X.embedding_quantized, X.embedding_scale), and compressed-tensors' pack-quantized (X.weight_packed, X.input_scale, X.output_scale).

`-qat-w4a16-ct` has 4 bits and a scale for each block of 32, pack-quantized too, and rounds no activations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import isfinite

from edge_export.checkpoint.safetensors import SOURCE_TYPE, StoredTensor, read_values
from edge_export.errors import CheckpointError

# A matrix X.weight by the name of its codes, and the name of its scales.
_CODES = {"embedding_quantized": "embedding_scale", "weight_packed": "weight_scale", "weight": "weight_scale"}
_ROUNDING = (("input_activation_scale", "input_scale"), ("output_activation_scale", "output_scale"))
_DROPPED = ("weight_shape", "k_cache_scale", "v_cache_scale", "k_scale", "v_scale")
_BITS = (2, 4, 8)
# Values of a row with one scale in -qat-w4a16-ct.
GROUP = 32
# Names and shapes of a model's matrices.
Shapes = Mapping[str, tuple[int, ...]]
# Scales of a linear layer's input and output; 0: not rounded.
Rounding = tuple[float, float]


def with_codes(
    tensors: Mapping[str, StoredTensor], shapes: Shapes, group: int | None = None
) -> tuple[dict[str, StoredTensor], dict[str, Rounding]]:
    """Returns the tensors with one entry for each matrix, and the rounding of each layer's activations by the matrix's name.

    `tensors` are those of the text model under their text-only names. With a `group` so many values of a row share a scale, in 4 bits, and
    activations are not rounded. Raises CheckpointError for parts that do not fit.
    """
    merged: dict[str, StoredTensor] = {}  # by the names of the codes
    rounding: dict[str, Rounding] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        base, _, ending = name.rpartition(".")
        scales = tensors.get(f"{base}.{_CODES[ending]}") if ending in _CODES else None
        if scales is None:
            continue
        merged[name] = _matrix(f"{base}.weight", tensor, scales, shapes, group)
        sides = [[f"{base}.{key}" for key in keys] for keys in _ROUNDING]
        used |= {f"{base}.{_CODES[ending]}", *(key for keys in sides for key in keys)}
        if group is None:
            first, second = ([tensors[key] for key in keys if key in tensors] for keys in sides)
            rounding[merged[name].name] = (_scale(first), _scale(second))
    kept = {name: tensor for name, tensor in tensors.items() if name not in used and not name.endswith(_DROPPED)}
    return {merged[name].name if name in merged else name: merged.get(name, tensor) for name, tensor in kept.items()}, rounding


def _matrix(name: str, codes: StoredTensor, scales: StoredTensor, shapes: Shapes, group: int | None) -> StoredTensor:
    rows, columns = shapes.get(name, (0, 0)) if len(shapes.get(name, ())) == 2 else (0, 0)
    bits, left = divmod(8 * codes.bytes, max(rows * columns, 1))
    sound = codes.dtype in ("U8", "I8", "I32") and bits in _BITS and not left and codes.shape[:1] == (rows,)
    parts = scales.shape[1] if len(scales.shape) == 2 and scales.shape[0] == rows else 0
    grouped = group is None or (bits, group * parts) == (4, columns)
    if not sound or not grouped or scales.dtype not in SOURCE_TYPE or not parts or columns % parts or columns * bits % 8:
        form = "2, 4 or 8 bits" if group is None else f"4 bits and blocks of {group}"
        raise CheckpointError(
            f"{codes.path}: {codes.name!r} {codes.dtype} {list(codes.shape)} with the scales {scales.dtype} {list(scales.shape)}"
            f" is no matrix {[rows, columns]} in {form}; download the checkpoint again"
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
