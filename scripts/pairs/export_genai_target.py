"""Exports a target of a pair's matrices with onnxruntime-genai's model builder, in int4, to measure it (bench_peers.py). Its environment
has onnxruntime-genai 0.18, onnx-ir, torch and transformers 5.22 (scripts/setup/build_peers.sh).

    PEERS/bin/python scripts/pairs/export_genai_target.py PAIR/target OUT

Its builder (0.18) knows Gemma 4 12B and 26B alone: no layers that share K/V, no wider feed-forwards in them, and no per-layer inputs, which
E2B and E4B have. So every layer gets K/V of its own and the same feed-forward, with as many weights in all, and the per-layer inputs go.
New matrices are random: its text means nothing.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.heterogeneity.configuration_utils import HeterogeneousConfigMixin
from transformers.models.gemma4_unified import Gemma4UnifiedConfig, Gemma4UnifiedTextConfig

# Of each layer, what reads the per-layer inputs; of the model, what makes them.
PER_LAYER = ("per_layer_", "embed_tokens_per_layer")
SPREAD = 0.02
CLASS_KEYS = ("architectures", "transformers_version", "dtype")


def dense_config(config: dict[str, Any], width: int) -> dict[str, Any]:
    """Returns the configuration of the text model without shared K/V and per-layer inputs, as that of a 12B model."""
    dense = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False, "intermediate_size": width}
    text = config | {"model_type": "gemma4_unified_text"} | dense
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    classes = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified", "dtype": "bfloat16"}
    return {**classes, "text_config": {key: value for key, value in text.items() if key not in CLASS_KEYS}, **tokens}


def dense_tensors(tensors: dict[str, torch.Tensor], config: dict[str, Any], width: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of that model, whose feed-forwards have `width` rows."""
    kept = {name: tensor for name, tensor in tensors.items() if not any(part in name for part in PER_LAYER)}
    types, random = config["layer_types"], torch.Generator().manual_seed(0)
    hidden = config["hidden_size"]
    shapes = {"mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden), "mlp.down_proj": (hidden, width)}
    for layer, kind in enumerate(types):
        source = f"model.layers.{types.index(kind)}.self_attn."
        for name in ("k_proj", "v_proj", "k_norm"):
            shapes[f"self_attn.{name}"] = tuple(kept[f"{source}{name}.weight"].shape)
        for name, shape in shapes.items():
            key = f"model.layers.{layer}.{name}.weight"
            if key not in kept or kept[key].shape != shape:
                new = torch.ones(shape) if len(shape) == 1 else SPREAD * torch.randn(shape, generator=random)
                kept[key] = new.to(torch.bfloat16)
    return {name.replace("model.", "model.language_model.", 1): tensor.clone() for name, tensor in kept.items()}


def mean_width(tensors: dict[str, torch.Tensor]) -> int:
    """Returns the mean width of the feed-forwards."""
    widths = [len(tensor) for name, tensor in tensors.items() if name.endswith("mlp.up_proj.weight")]
    return sum(widths) // len(widths)


def write_checkpoint(target: Path, config: dict[str, Any], folder: Path) -> None:
    """Writes the checkpoint of that model."""
    folder.mkdir(parents=True)
    tensors = load_file(target / "model.safetensors")
    width = mean_width(tensors)
    save_file(dense_tensors(tensors, config, width), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dense_config(config, width)), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (target / name).is_file():
            shutil.copy(target / name, folder / name)


def main() -> None:
    """Exports a target."""
    parser = argparse.ArgumentParser(usage="export_genai_target.py TARGET OUT")
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    checkpoint = options.out / "checkpoint"
    config = json.loads((options.target / "config.json").read_text(encoding="utf-8"))
    write_checkpoint(options.target, config, checkpoint)
    # Its builder reads sizes of all layers at once, under names that transformers 5.22 has left for sizes of each layer.
    HeterogeneousConfigMixin.allow_global_per_layer_attribute_access = property(lambda _: True, lambda _, __: None)
    for kind in (Gemma4UnifiedConfig, Gemma4UnifiedTextConfig):
        kind.global_head_dim = max(sizes["head_dim"] for sizes in config["per_layer_config"].values())
        kind.num_global_key_value_heads = config["num_key_value_heads"]
    sys.argv[1:] = ["-i", str(checkpoint), "-o", str(options.out), "-p", "int4", "-e", "cpu", "-c", str(options.out / "cache")]
    sys.argv += ["--extra_options", "int4_accuracy_level=4"]
    runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
    shutil.rmtree(checkpoint)


if __name__ == "__main__":
    main()
