"""The formats in which Gemma 4 was published beside bfloat16, made of a member's checkpoint folder in place.

Each function returns the weights that its matrices stand for, float32 by their text-only names. The values spread as trained ones do, so
logits are no chaos.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.safetensors import SINGLE_NAME
from edge_export.checkpoint.weight_formats import BLOCK

Floats = NDArray[np.float32]
PREFIX = "model.language_model."
W4A16: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head"],
}
# As published for E2B, without the towers; other layers than 0 to 3 have 2 bits.
MOBILE: dict[str, Any] = {
    "quant_method": "gemma",
    "num_bits": 4,
    "quantize_embeddings": True,
    "module_quant_configs": {
        "^lm_head$": {"num_bits": 2},
        r"language_model\.embed_tokens$": {"num_bits": 2},
        "embed_tokens_per_layer$": {"num_bits": 4},
        r"layers\.[0-3]\.mlp\.": {"num_bits": 4},
        r"layers\.\d+\.mlp\.": {"num_bits": 2},
        "per_layer_input_gate$": {"num_bits": 8},
        "per_layer_projection$": {"num_bits": 8},
        r"self_attn\.": {"num_bits": 4},
    },
    "modules_to_not_convert": ["per_layer_model_projection", "vision_tower", "embed_vision", "audio_tower", "embed_audio"],
}
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
GROUP = {"weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}, "input_activations": ACTIVATIONS}
MOBILE_COMPRESSED = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {"group_0": GROUP}}


def bfloat16(values: Floats) -> Floats:
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def grid_blocks(blocks: int, *, seed: int = 1, half_scales: bool = True) -> Floats:
    """Blocks [blocks, 32] as quantization-aware training leaves them, with extrema of every level, both signs, and blocks of zeros."""
    rng = np.random.default_rng(seed)
    levels = rng.integers(-8, 8, (blocks, BLOCK)).astype(np.float32)
    for index, maximum in enumerate((7, 5, 3, 1, 0)):
        levels[index::9] = np.clip(levels[index::9], -maximum, maximum)
    scales = rng.uniform(1e-4, 0.05, blocks).astype(np.float16 if half_scales else np.float32).astype(np.float32)
    scales[::5] *= -1
    return bfloat16(levels * scales[:, None])


def to_q4_grid(folder: Path, *, off_grid: str | None = None) -> dict[str, Floats]:
    """-qat-q4_0-unquantized: bfloat16 matrices of which every 32 values lie on a grid, all but those whose name has `off_grid` in it."""
    import torch

    made, values = {}, {}
    for number, (name, tensor) in enumerate(take_tensors(folder).items()):
        made[name] = tensor.to(torch.bfloat16)
        text = "language_model" in name or ("vision" not in name and "audio" not in name)
        if tensor.dim() >= 2 and text and not tensor.shape[-1] % BLOCK and (off_grid is None or off_grid not in name):
            grid = grid_blocks(tensor.numel() // BLOCK, seed=number).reshape(tensor.shape)
            made[name] = torch.from_numpy(grid).to(torch.bfloat16)
            values[name.replace(PREFIX, "model.")] = grid
    put_tensors(folder, made)
    return values


def to_w4a16(folder: Path) -> dict[str, Floats]:
    """-qat-w4a16-ct: compressed-tensors, 4 bits in blocks of 32 along a row, a copy of the tied head."""
    import torch

    rng, made, values = np.random.default_rng(5), {}, {}
    for name, tensor in take_tensors(folder).items():
        if tensor.dim() != 2 or ".layers." not in name or "language_model" not in name or tensor.shape[1] % 32:
            made[name] = tensor.to(torch.bfloat16)
            continue
        rows, columns = tensor.shape
        levels = rng.integers(-8, 8, (rows, columns))
        scales = bfloat16(rng.uniform(0.001, 0.05, (rows, columns // 32)).astype(np.float32))
        shifted = (levels + 8).astype(np.uint32).reshape(rows, columns // 8, 8) << np.arange(0, 32, 4, dtype=np.uint32)
        base = name.removesuffix("weight")
        made[f"{base}weight_packed"] = torch.from_numpy(np.bitwise_or.reduce(shifted, axis=2).view(np.int32))
        made[f"{base}weight_scale"] = torch.from_numpy(scales).to(torch.bfloat16)
        made[f"{base}weight_shape"] = torch.tensor([rows, columns])
        values[name.replace(PREFIX, "model.")] = (levels * np.repeat(scales, 32, axis=1)).astype(np.float32)
    made["lm_head.weight"] = made[f"{PREFIX}embed_tokens.weight"].clone()
    put_tensors(folder, made)
    edit_json(folder / "config.json", lambda config: config.update(quantization_config=W4A16, dtype="bfloat16"))
    return values


def to_mobile(folder: Path, *, compressed: bool) -> dict[str, Floats]:
    """-qat-mobile-transformers, or -qat-mobile-ct if `compressed`: 2, 4 and 8 bits with a scale for each row, scales of activations."""
    import torch

    rng, made, values = np.random.default_rng(3), {}, {}
    stored = {name: tensor.float() for name, tensor in take_tensors(folder).items()}
    stored["lm_head.weight"] = stored[f"{PREFIX}embed_tokens.weight"]
    for name, tensor in stored.items():
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or not name.startswith((PREFIX, "lm_head")) or "model_projection" in name:
            made[name] = tensor
            continue
        bits, table = _mobile_bits(module), "embed_tokens" in name
        codes, scale, weights = _mobile_rows(tensor.numpy(), bits, parts=8 if name.endswith("per_layer.weight") else 1)
        values[name.replace(PREFIX, "model.")] = weights
        if bits == 8:
            made[f"{module}.weight"] = torch.from_numpy((codes - 128).astype(np.int8))
        elif compressed:
            made[f"{module}.weight_packed"] = torch.from_numpy(packed_codes(codes, bits).view(np.int32).copy())
        else:
            made[f"{module}.{'embedding_quantized' if table else 'weight'}"] = torch.from_numpy(packed_codes(codes, bits))
        made[f"{module}.{'embedding' if table and not compressed else 'weight'}_scale"] = torch.from_numpy(scale.copy())
        if not table:
            ends = ("input_scale", "output_scale") if compressed else ("input_activation_scale", "output_activation_scale")
            for end in ends:
                made[f"{module}.{end}"] = torch.tensor(float(rng.uniform(0.03, 0.06)))
        if "k_proj" in name:
            made[name.replace("k_proj.weight", "k_cache_scale")] = torch.tensor(0.1)
    put_tensors(folder, made)

    def untie(config: dict[str, Any]) -> None:
        config["text_config"]["tie_word_embeddings"] = False
        config.update(quantization_config=MOBILE_COMPRESSED if compressed else MOBILE, tie_word_embeddings=False)

    edit_json(folder / "config.json", untie)
    return values


def packed_codes(codes: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Codes [rows, columns] as bytes, the first in the lowest bits."""
    parts = codes.reshape(len(codes), -1, 8 // bits).astype(np.uint8) << np.arange(0, 8, bits, dtype=np.uint8)
    return np.bitwise_or.reduce(parts, axis=2)


def _mobile_bits(name: str) -> int:
    """Bits of a module, as MOBILE says."""
    if name.endswith(("lm_head", "language_model.embed_tokens")):
        return 2
    if ".mlp." in name:
        return 4 if int(name.split(".layers.")[1].split(".")[0]) < 4 else 2
    return 8 if "per_layer_input_gate" in name or name.endswith("per_layer_projection") else 4


def _mobile_rows(values: Floats, bits: int, *, parts: int) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Codes from 0 on, scales of `parts` parts of each row, and the weights that they stand for."""
    rows, columns = values.shape
    half = 1 << (bits - 1)
    split = values.reshape(rows, parts, -1)
    scale = (np.abs(split).max(axis=2, keepdims=True) / half + 1e-6).astype(np.float32)
    codes = np.clip(np.rint(split / scale), -half, half - 1).reshape(rows, columns).astype(np.int64) + half
    return codes, scale[:, :, 0], (codes - half).astype(np.float32) * np.repeat(scale[:, :, 0], columns // parts, axis=1)


def take_tensors(folder: Path) -> dict[str, Any]:
    """All tensors of a checkpoint, whose weight files and index are removed."""
    from safetensors.torch import load_file

    tensors = {name: tensor for path in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(path).items()}
    for path in folder.glob("model*"):
        path.unlink()
    return tensors


def put_tensors(folder: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
