"""The formats in which Gemma 4's weights were published: sizes and configs, packed codes with scales, and 4-bit grids."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from reprlib import repr as brief
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from edge_export.checkpoint.architecture import Shapes
from edge_export.checkpoint.safetensors import SOURCE_TYPE, StoredTensor, read_rows, read_values
from edge_export.errors import CheckpointError

# What was published for Gemma 4: sizes with their configs, and quantized formats, some of which cannot be read here.
#
# Formats and their keys: transformers' quantizers, compressed-tensors' config, MLX's convert.py. Configs: config.json of
# google/gemma-4-SIZE-it and of its -assistant.

ADAPTER_NAME = "adapter_config.json"
# The only settings of compressed-tensors' pack-quantized weights that are read. Weights with zero points have symmetric false.
_PACKED = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_NAMED = 4
_METHODS = {
    "bitsandbytes": "bitsandbytes weights",
    "gptq": "GPTQ weights",
    "awq": "AWQ weights",
    "auto-round": "AutoRound weights",
    "auto_round": "AutoRound weights",
    "torchao": "torchao weights",
    "quanto": "Quanto weights",
    "hqq": "HQQ weights",
    "mxfp4": "MXFP4 weights",
    "fp8": "FP8 weights",
    "fbgemm_fp8": "FP8 weights",
}
SIZES = {(35, 1536): "E2B", (42, 2560): "E4B", (48, 3840): "12B", (30, 2816): "26B-A4B", (60, 5376): "31B"}
# The parts of config.json that are needed here, for each size's target and assistant.
_CONFIGS = Path(__file__).with_name("configs.json")


def refuse_adapter(folder: Path) -> None:
    """Raises CheckpointError for a folder that holds a PEFT adapter and no model."""
    if (folder / ADAPTER_NAME).is_file() and not any(folder.glob("model*.safetensors")):
        raise CheckpointError(
            f"{folder} holds a PEFT adapter, not a model; merge it into its base model first"
            " (merge_and_unload, then save_pretrained of model and tokenizer)"
        )


def refuse_quantized(config: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError if a parsed config.json names a quantized format; `path` is for messages."""
    section = _section(config)
    if section is not None and not _read_directly(section) and rounds_activations(config) is None:
        raise CheckpointError(f"{path}: the checkpoint holds {_described(section)}, which are not read; {_instead(config)}")


def names_quantization(config: dict[str, Any]) -> bool:
    """Whether a parsed config.json names any quantized format."""
    return _section(config) is not None


def rounds_activations(config: dict[str, Any]) -> str | None:
    """Returns the quantization method if the format rounds activations and can be read (-qat-mobile-transformers, -ct), else None."""
    section = _section(config) or {}
    method, groups = section.get("quant_method"), section.get("config_groups")
    if method == "gemma":
        return "gemma"
    if method != "compressed-tensors" or not isinstance(groups, dict) or not groups:
        return None
    return "compressed-tensors" if all(map(_mobile_group, groups.values())) else None


def _mobile_group(group: Any) -> bool:
    """Whether a group has integer weights with scales for rows or blocks, and inputs rounded to int8 with a fixed scale."""
    weights = group.get("weights") if isinstance(group, dict) else None
    inputs = group.get("input_activations") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or not isinstance(inputs, dict):
        return False
    sound = weights.get("num_bits") in (2, 4, 8) and weights.get("strategy") in ("channel", "group") and inputs.get("num_bits") == 8
    fixed = inputs.get("strategy") == "tensor" and not inputs.get("dynamic")
    return sound and fixed and all(part.get("type") == "int" and part.get("symmetric") is True for part in (weights, inputs))


def _section(config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the object that describes the quantization, wherever in config.json it is; None if there is none."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "quantization", "compression_config"):
            section = place.get(key)
            if section is not None:
                return section if isinstance(section, dict) else {"quant_method": str(section)}
    return None


def _read_directly(section: dict[str, Any]) -> bool:
    """Whether this is the format of -qat-w4a16-ct: symmetric 4-bit weights in groups of 32, activations not rounded."""
    return section.get("quant_method") == "compressed-tensors" and section.get("format") == "pack-quantized" and not _unread(section)


def _unread(section: dict[str, Any]) -> str:
    """Returns the settings of packed weights that cannot be read; empty if all can be."""
    groups = section.get("config_groups")
    reasons = [] if isinstance(groups, dict) and groups else ["no config_groups"]
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            reasons.append("a group without weights")
            continue
        reasons += [f"{key} {brief(weights.get(key))} (read: {value})" for key, value in _PACKED.items() if weights.get(key) != value]
        reasons += [f"actorder {brief(weights['actorder'])}"] if weights.get("actorder") else []
        reasons += [f"rounded {key}" for key in ("input_activations", "output_activations", "activations") if group.get(key)]
    return ", ".join(dict.fromkeys(reasons[:_NAMED]))


def _described(section: dict[str, Any]) -> str:
    method, kind = str(section.get("quant_method", "")).lower(), str(section.get("format", "")).lower()
    algorithm = str(section.get("quant_algo", section.get("mode", ""))).lower()
    for name, wording in (("nvfp4", "NVFP4"), ("mxfp4", "MXFP4"), ("mxfp8", "MXFP8"), ("fp8", "FP8"), ("float-quantized", "FP8")):
        if name in kind or name in algorithm:
            return f"{wording} weights"
    if method == "compressed-tensors" and kind == "pack-quantized":
        return f"compressed-tensors weights of the format 'pack-quantized' with {_unread(section)}"
    if method == "compressed-tensors":
        return f"compressed-tensors weights of the format {kind or 'unknown'!r:.40}"
    if not method and "group_size" in section:
        return "MLX weights"
    return _METHODS.get(method, f"weights quantized by {method or 'an unnamed method'!r:.40}")


def _instead(config: dict[str, Any]) -> str:
    size = size_of(config)
    if size is None:
        return "give the unquantized checkpoint (bf16) that it was made from"
    return f"give the bf16 checkpoint that it was made from, such as google/gemma-4-{size}-it or -it-qat-q4_0-unquantized"


def size_of(config: dict[str, Any]) -> str | None:
    """Returns the published size of a target's config.json; None for other models and for assistants."""
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else config
    layers, hidden = inner.get("num_hidden_layers"), inner.get("hidden_size")
    return SIZES.get((layers, hidden)) if type(layers) is int and type(hidden) is int else None


def published_config(size: str, *, assistant: bool) -> dict[str, Any] | None:
    """Returns the needed part of the config.json of this size's target or assistant; None for an unknown size."""
    name = next((name for name in SIZES.values() if name.lower() == size.lower()), None)
    if name is None:
        return None
    config: dict[str, Any] = json.loads(_CONFIGS.read_text(encoding="utf-8"))[name]["assistant" if assistant else "target"]
    return config


# Checkpoints with packed weights. Here the codes and the scales of a matrix become one StoredTensor.
#
# `-qat-mobile-transformers` and `-ct` have 2, 4 or 8 bits with scales for each row, and round activations to int8. Layout: transformers,
# integrations/gemma_quant.py (X.weight, X.weight_scale, X.input_activation_scale, X.output_activation_scale; tables as
# X.embedding_quantized, X.embedding_scale), and compressed-tensors' pack-quantized (X.weight_packed, X.input_scale, X.output_scale).
#
# `-qat-w4a16-ct` is pack-quantized too. It has 4 bits and a scale for each block of 32, and does not round activations.

# For a matrix X.weight: the possible names of its codes, and the name of its scales.
_CODES = {"embedding_quantized": "embedding_scale", "weight_packed": "weight_scale", "weight": "weight_scale"}
_ROUNDING = (("input_activation_scale", "input_scale"), ("output_activation_scale", "output_scale"))
_DROPPED = ("weight_shape", "k_cache_scale", "v_cache_scale", "k_scale", "v_scale")
_BITS = (2, 4, 8)
# How many values of a row share a scale in -qat-w4a16-ct.
GROUP = 32
# The scales by which a linear layer's input and output are rounded; 0 means not rounded.
Rounding = tuple[float, float]


def with_codes(
    tensors: Mapping[str, StoredTensor], shapes: Shapes, group: int | None = None
) -> tuple[dict[str, StoredTensor], dict[str, Rounding]]:
    """Returns the tensors with one entry for each matrix, and the rounding of each layer's activations by the matrix's name.

    `tensors` are those of the text model under their text-only names. If `group` is given, weights have 4 bits, `group` values of a row
    share a scale, and activations are not rounded. Raises CheckpointError if the parts of a matrix do not fit together.
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


# Weights of quantization-aware training lie on a grid: each 32 values along a row are q * s with integers q from -8 to 7. q4_0 and int4 can
# store these exactly.
#
# The weights are stored as bfloat16, from which the grid has to be found again. llama.cpp's rule s = extremum / -8 rarely finds it, because
# the largest level of a block need not be -8.

BLOCK = 32
_LEVELS = 8
# A stored value differs from its grid by at most half a unit in the last place of bfloat16; a step is at least 16 times as large.
_TOLERANCE = 2.0**-7
_EXACT_TOLERANCE = 2.0**-20
# How many blocks of a tensor are tested; if all of them lie on a grid, the whole tensor counts as such.
_SAMPLE_BLOCKS = 4096
# How many blocks are processed at once. They and the intermediate values fit into a core's cache.
_PIECE_BLOCKS = 1 << 13


@dataclass(frozen=True)
class Grid:
    """Quantized blocks: levels int8 [n, 32] and scales float32 [n].

    `on_grid`, bool [n]: the block lies on a grid. `exact`, bool [n]: its values are reproduced bit for bit.
    """

    levels: NDArray[np.int8]
    scales: NDArray[np.float32]
    on_grid: NDArray[np.bool_]
    exact: NDArray[np.bool_]


def find_grid(weights: NDArray[np.float32], *, half_scales: bool) -> Grid:
    """Finds the grid of blocks [n, 32]; `half_scales` rounds scales to float16, as q4_0 stores them.

    Blocks that lie on no grid get the scale of llama.cpp's rule for q4_0.
    """
    parts = [_find(weights[first : first + _PIECE_BLOCKS], half_scales) for first in range(0, len(weights), _PIECE_BLOCKS)]
    if not parts:
        return Grid(np.empty((0, BLOCK), np.int8), np.empty(0, np.float32), np.empty(0, bool), np.empty(0, bool))
    return Grid(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("levels", "scales", "on_grid", "exact")))


def lies_on_grid(tensor: StoredTensor) -> bool:
    """Whether a matrix lies on a grid, judged by a sample of its blocks. Raises CheckpointError if it cannot be read."""
    if len(tensor.shape) < 2 or tensor.shape[-1] % BLOCK:
        return False
    for piece in read_rows(tensor):
        blocks = piece.reshape(-1, BLOCK)[:_SAMPLE_BLOCKS]
        return bool(blocks.any()) and bool(find_grid(blocks, half_scales=False).on_grid.all())
    return False


def _find(weights: NDArray[np.float32], half_scales: bool) -> Grid:
    rounded = not (weights.view(np.uint32) & np.uint32(0xFFFF)).any()
    largest = np.abs(weights).max(axis=1)
    extremum = np.take_along_axis(weights, np.abs(weights).argmax(axis=1)[:, None], axis=1)[:, 0]
    scales = extremum / np.float32(-_LEVELS)
    on_grid: NDArray[np.bool_] = largest == np.float32(0)
    for level in range(1, _LEVELS + 1):
        left = np.flatnonzero(~on_grid)
        if not len(left):
            break
        step = largest[left] / np.float32(level) if level < _LEVELS else extremum[left] / np.float32(-_LEVELS)
        part = weights[left]
        # A subnormal block may have a step of 0 in float32, so these operations may divide by 0.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            off = np.abs(part - np.rint(part / step[:, None]) * step[:, None]).max(axis=1)
        fits = off <= largest[left] * np.float32(_TOLERANCE if rounded else _EXACT_TOLERANCE)
        scales[left[fits]] = step[fits]
        on_grid[left[fits]] = True
    safe = np.where(scales == 0, np.float32(1), scales)[:, None]
    levels = np.clip(np.rint(weights / safe), -_LEVELS, _LEVELS - 1).astype(np.int8)
    scales = _refined(weights, levels, scales, on_grid) if rounded else scales
    if half_scales:
        scales = _nearest_half(weights, levels, scales, rounded)
    exact: NDArray[np.bool_] = np.all(_equal(weights, levels, scales, rounded), axis=1)
    return Grid(levels, scales, on_grid, exact)


def _refined(
    weights: NDArray[np.float32], levels: NDArray[np.int8], scales: NDArray[np.float32], on_grid: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Returns, for each block, the middle of the range of scales with which all its levels round to the stored bfloat16 values.

    Where that range is empty, it returns the old scale.
    """
    size = np.abs(weights).astype(np.float64)
    count = np.abs(levels).astype(np.float64)
    # bfloat16 has 8 significant bits, so half a unit in the last place of a value from 2^e to 2^(e+1) is 2^(e-8).
    mantissa, exponent = np.frexp(size)
    half = np.ldexp(1.0, exponent - 9)
    # Just below a power of two, bfloat16 values are twice as dense.
    below = np.where(mantissa == 0.5, half / 2, half)
    with np.errstate(divide="ignore", invalid="ignore"):
        low = np.where(count > 0, (size - below) / count, 0.0).max(axis=1)
        high = np.where(count > 0, (size + half) / count, np.inf).min(axis=1)
    fits = on_grid & (low <= high) & np.isfinite(high)
    middle = np.where(fits, (low + np.where(np.isfinite(high), high, 0.0)) / 2, 0.0) * np.where(scales < 0, -1.0, 1.0)
    return np.where(fits, middle, scales).astype(np.float32)


def _nearest_half(
    weights: NDArray[np.float32], levels: NDArray[np.int8], scales: NDArray[np.float32], rounded: bool
) -> NDArray[np.float32]:
    """Returns, of the three float16 numbers nearest to each scale, the one that reproduces most values exactly."""
    with np.errstate(over="ignore"):
        nearest = scales.astype(np.float16)
    best, matches = nearest, _equal(weights, levels, nearest.astype(np.float32), rounded).sum(axis=1)
    for direction in (-np.inf, np.inf):
        other = np.nextafter(nearest, np.float16(direction))
        count = _equal(weights, levels, other.astype(np.float32), rounded).sum(axis=1)
        best, matches = np.where(count > matches, other, best), np.maximum(count, matches)
    return best.astype(np.float32)


def _equal(weights: NDArray[np.float32], levels: NDArray[np.int8], scales: NDArray[np.float32], rounded: bool) -> NDArray[np.bool_]:
    """Returns which values [n, 32] are reproduced exactly; if `rounded`, they are compared after rounding to bfloat16."""
    with np.errstate(invalid="ignore"):
        back = levels.astype(np.float32) * scales[:, None]
    if rounded:
        back = back.astype(bfloat16).astype(np.float32)
    equal: NDArray[np.bool_] = back == weights
    return equal
