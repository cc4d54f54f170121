"""What was published for Gemma 4: sizes with their configs, and quantized formats, of which some are not read.

Formats and their keys: transformers' quantizers, compressed-tensors' config, MLX's convert.py. Configs: config.json of
google/gemma-4-SIZE-it and of its -assistant.
"""

from __future__ import annotations

import json
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from edge_export.errors import CheckpointError

ADAPTER_NAME = "adapter_config.json"
# What is read of compressed-tensors' pack-quantized weights; zero points come with symmetric false.
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
# What matters here of config.json of each size's target and assistant.
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
    """Returns the method of a format that rounds activations and is read (-qat-mobile-transformers, -ct); None for others."""
    section = _section(config) or {}
    method, groups = section.get("quant_method"), section.get("config_groups")
    if method == "gemma":
        return "gemma"
    if method != "compressed-tensors" or not isinstance(groups, dict) or not groups:
        return None
    return "compressed-tensors" if all(map(_mobile_group, groups.values())) else None


def _mobile_group(group: Any) -> bool:
    """Weights as integers with scales for rows or blocks, inputs rounded to int8 with a fixed scale."""
    weights = group.get("weights") if isinstance(group, dict) else None
    inputs = group.get("input_activations") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or not isinstance(inputs, dict):
        return False
    sound = weights.get("num_bits") in (2, 4, 8) and weights.get("strategy") in ("channel", "group") and inputs.get("num_bits") == 8
    fixed = inputs.get("strategy") == "tensor" and not inputs.get("dynamic")
    return sound and fixed and all(part.get("type") == "int" and part.get("symmetric") is True for part in (weights, inputs))


def _section(config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the object that describes the quantization, from any of the places where it is written; None if there is none."""
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
    """Returns what of packed weights cannot be read, and why; empty if all can be."""
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
