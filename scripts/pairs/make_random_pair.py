"""Writes a pair of random weights with the shapes of Gemma 4 E2B, to measure memory, size and time.

    python scripts/pairs/make_random_pair.py -o /tmp/e2b --vocabulary 65536
    python scripts/pairs/make_random_pair.py -o /tmp/e2b-drafter --target-layers 5

With the full vocabulary of 262144 and all layers the target has 10 GB; a draft step costs the same on a target with fewer layers. The
shapes are those of google/gemma-4-E2B-it and its assistant. The tokenizer is that of the reference pair, padded with unused tokens.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np
from ml_dtypes import bfloat16

from edge_export.checkpoint.architecture import TOKEN_ORDERING, Shapes, needed_shapes, parse_architecture
from edge_export.checkpoint.sources import reference_pair
from edge_export.checkpoint.weight_formats import published_config
from refpair import tokenizer

BLOCK = 8 << 20
SHARD_BYTES = 2 << 30
OWNING_LAYERS = 15
SLIDING, FULL = "sliding_attention", "full_attention"
# What transformers needs beside the sizes that the exporter knows of each member.
COMMON: dict[str, Any] = {
    "model_type": "gemma4_text",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}


def target_config(vocabulary: int, layers: int) -> dict[str, Any]:
    """Returns config.json of the E2B text model with its first `layers` layers; the first 15 have their own K/V."""
    text = _published(assistant=False)["text_config"] | COMMON
    return text | {
        "architectures": ["Gemma4ForCausalLM"],
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "vocab_size_per_layer_input": vocabulary,
        "num_hidden_layers": layers,
        "num_kv_shared_layers": max(0, layers - OWNING_LAYERS),
        "layer_types": text["layer_types"][:layers],
    }


def drafter_config(vocabulary: int) -> dict[str, Any]:
    """Returns config.json of the E2B assistant."""
    config = _published(assistant=True)
    text = config["text_config"] | COMMON | {"vocab_size": vocabulary, "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False}
    return config | {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "dtype": "bfloat16",
        "num_centroids": vocabulary // 128,
        "centroid_intermediate_top_k": 32,
        "tie_word_embeddings": True,
        "text_config": text | {"final_logit_softcapping": None},
    }


def _published(*, assistant: bool) -> dict[str, Any]:
    config = published_config("E2B", assistant=assistant)
    assert config is not None
    return config


def write_shards(shapes: Shapes, folder: Path, seed: int) -> None:
    """Writes the tensors as bf16 safetensors of at most SHARD_BYTES (or one tensor) each, from one block of random numbers.

    Each starts at a different offset in it, because a runtime may store equal tensors once.
    """
    noise = np.random.default_rng(seed).normal(0, 0.02, BLOCK // 2).astype(np.float32).astype(bfloat16).tobytes()
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        if filled + size > SHARD_BYTES and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        index |= dict.fromkeys(shard, name)
        with (folder / name).open("wb") as file:
            _write_shard(file, shard, noise)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write_shard(file: BinaryIO, shard: Shapes, noise: bytes) -> None:
    header, offset = {}, 0
    for name, shape in shard.items():
        dtype, width = ("I64", 8) if name == TOKEN_ORDERING else ("BF16", 2)
        size = width * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    file.write(struct.pack("<Q", len(text)) + text)
    for name, shape in shard.items():
        if name == TOKEN_ORDERING:
            file.write(np.random.default_rng(0).permutation(shape[0]).astype("<i8").tobytes())
            continue
        left, begin = 2 * int(np.prod(shape)), 2 * (zlib.crc32(name.encode()) % (len(noise) // 2))
        while left:
            left -= file.write(noise[begin : begin + left])
            begin = 0


def write_checkpoint(folder: Path, config: dict[str, Any], vocabulary: int, seed: int) -> None:
    """Writes one checkpoint folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_shards(needed_shapes(parse_architecture(config, folder / "config.json")), folder, seed)
    tokenizer.copy(reference_pair()[0], folder, size=vocabulary)


@click.command(context_settings={"show_default": True})
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="New folder for target/ and drafter/.")
@click.option("--vocabulary", default=262144, help="Vocabulary size, a multiple of 4096; the tables dominate the file.")
@click.option("--target-layers", default=35, help="Layers of the target, a multiple of 5.")
@click.option("--seed", default=0)
def main(output: Path, vocabulary: int, target_layers: int, seed: int) -> None:
    """Write a random pair of E2B shapes."""
    if vocabulary < 8192 or vocabulary % 4096:
        raise click.ClickException(f"--vocabulary {vocabulary} must be a multiple of 4096, at least 8192")
    if target_layers not in range(5, 36, 5):
        raise click.ClickException(f"--target-layers {target_layers} must be a multiple of 5 from 5 to 35")
    if output.exists():
        raise click.ClickException(f"{output} exists; choose a new folder")
    write_checkpoint(output / "target", target_config(vocabulary, target_layers), vocabulary, seed)
    write_checkpoint(output / "drafter", drafter_config(vocabulary), vocabulary, seed + 1)
    size = sum(f.stat().st_size for f in output.rglob("*.safetensors"))
    click.echo(f"{output}: {size / 1e9:.1f} GB of random weights")


if __name__ == "__main__":
    main()
