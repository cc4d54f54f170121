"""Reads an existing GGUF as a Checkpoint: its architecture comes from its keys, so that all pairs are checked and planned alike.

Key names: llama.cpp, gguf-py/gguf/constants.py; what they mean for Gemma 4: conversion/gemma.py and src/models/gemma4*.cpp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edge_export.checkpoint.architecture import FULL, MAX_LAYERS, SLIDING, AssistantArchitecture, TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.json_file import MAX_SIZE, CheckedValues, refuse_pointer
from edge_export.checkpoint.safetensors import StoredTensor
from edge_export.errors import CheckpointError
from edge_runtime.bundle import gguf_header
from edge_runtime.bundle.gguf_header import GgufHeader, LongArray, TensorInfo
from edge_runtime.bundle.gguf_types import TYPE_NUMBERS, quantization_name

TARGET_ARCHITECTURE, DRAFTER_ARCHITECTURE = "gemma4", "gemma4-assistant"
# Larger factors mark pairs that are not rotated (proportional RoPE).
_TURNS_BELOW = 1e20


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads keys and tensor infos. Raises CheckpointError if it is not a GGUF file of a known version, or is truncated or corrupt."""
    try:
        return gguf_header.read_gguf_header(path)
    except gguf_header.GgufError as error:
        refuse_pointer(path)
        raise CheckpointError(str(error)) from error


def open_gguf(path: Path) -> tuple[Checkpoint, GgufHeader]:
    """Reads a GGUF's header, no weights, into a Checkpoint whose folder is the file itself.

    Raises CheckpointError if the file is corrupt, split, or neither a gemma4 nor a gemma4-assistant model.
    """
    header = read_gguf_header(path)
    name = header.architecture
    _check_architecture(path, name)
    below = f"{name}."
    own = {key.removeprefix(below): value for key, value in header.keys.items() if key.startswith(below)}
    keys = CheckedValues(own, path, below, "convert the checkpoint again")
    parts = header.keys.get("split.count")
    if type(parts) is int and parts > 1:
        raise CheckpointError(f"{path} is one part of a split GGUF; join the parts first with llama-gguf-split --merge")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    pieces = header.keys.get("tokenizer.ggml.tokens")
    if not isinstance(pieces, LongArray):
        raise CheckpointError(f"{path} holds no vocabulary (tokenizer.ggml.tokens); convert the checkpoint again")
    fields = _fields(keys, tensors, pieces.length)
    made: TextArchitecture
    if name == TARGET_ARCHITECTURE:
        made = TextArchitecture(**fields)
    else:
        ordered = any(tensor.startswith("masked_embd") for tensor in tensors)
        made = AssistantArchitecture(
            **fields | {"kv_shared_layers": len(fields["layer_types"])},
            target_hidden_size=keys.integer("embedding_length_out"),
            ordered_embeddings=ordered,
            centroids=0,
            top_centroids=0,
        )
    stored = {
        tensor.name: StoredTensor(
            name=tensor.name, path=path, dtype=f"ggml type {tensor.type}", shape=tensor.shape, offset=tensor.offset, bytes=tensor.bytes
        )
        for tensor in header.tensors
        if tensor.name != "rope_freqs.weight"
    }
    kind = "gemma4" if name == TARGET_ARCHITECTURE else "gemma4_assistant"
    checkpoint = Checkpoint(folder=path, config={}, model_type=kind, architecture=made, tensors=stored, left_out=())
    return checkpoint, header


def quantization_of(header: GgufHeader) -> str:
    """Returns the name of the quantization in `general.file_type`; "mixed" if it is unknown."""
    return quantization_name(header.keys.get("general.file_type"))


def _check_architecture(path: Path, name: str) -> None:
    if name == DRAFTER_ARCHITECTURE.replace("-", "_"):
        raise CheckpointError(
            f"{path} has the architecture {name!r}, an early spelling that llama.cpp refuses (it wants {DRAFTER_ARCHITECTURE!r});"
            " give the assistant's checkpoint folder instead, or convert it again"
        )
    if name not in (TARGET_ARCHITECTURE, DRAFTER_ARCHITECTURE):
        raise CheckpointError(
            f"{path} has the architecture {name!r}, not {TARGET_ARCHITECTURE!r} or {DRAFTER_ARCHITECTURE!r}; give a Gemma 4 pair"
        )


def _fields(keys: CheckedValues, tensors: dict[str, TensorInfo], vocabulary: int) -> dict[str, Any]:
    layers = keys.integer("block_count", high=MAX_LAYERS)
    sliding = keys.array("attention.sliding_window_pattern", layers)
    kinds = tuple(SLIDING if flag else FULL for flag in sliding)
    if kinds[-1] != FULL:
        raise keys.wrong("attention.sliding_window_pattern", "a pattern that ends in a full-attention layer")
    kv_heads = _per_layer(keys, "attention.head_count_kv", layers)
    feed_forward = _per_layer(keys, "feed_forward_length", layers)
    last_full, first_sliding = layers - 1, kinds.index(SLIDING) if SLIDING in kinds else layers - 1
    full_head_dim = keys.integer("attention.key_length")
    experts = keys.integer("expert_count", low=0, default=0)
    per_layer_size = keys.integer("embedding_length_per_layer_input", low=0, default=0)
    return {
        "hidden_size": keys.integer("embedding_length"),
        "layer_types": kinds,
        "heads": _per_layer(keys, "attention.head_count", layers)[0],
        "kv_heads": kv_heads[first_sliding],
        "full_kv_heads": kv_heads[last_full],
        "head_dim": keys.integer("attention.key_length_swa"),
        "full_head_dim": full_head_dim,
        "intermediate_size": feed_forward[0],
        "double_wide": len(set(feed_forward)) > 1,
        "kv_shared_layers": keys.integer("attention.shared_kv_layers", low=0, high=layers, default=0),
        "k_eq_v": any(f"blk.{i}.attn_k.weight" in tensors and f"blk.{i}.attn_v.weight" not in tensors for i in range(layers)),
        "window": keys.integer("attention.sliding_window"),
        "context": keys.integer("context_length"),
        "vocab_size": vocabulary,
        "per_layer_size": per_layer_size,
        "per_layer_vocab_size": vocabulary if per_layer_size else 0,
        "experts": experts,
        "experts_used": keys.integer("expert_used_count") if experts else 0,
        "expert_size": keys.integer("expert_feed_forward_length") if experts else 0,
        "norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "logit_softcap": keys.number("final_logit_softcapping") if keys.get("final_logit_softcapping") else None,
        "full_rope_base": keys.number("rope.freq_base"),
        "sliding_rope_base": keys.number("rope.freq_base_swa"),
        "full_rotary_share": _rotary_share(keys, tensors.get("rope_freqs.weight"), full_head_dim),
        "tied": "output.weight" not in tensors,
    }


def _rotary_share(keys: CheckedValues, factors: TensorInfo | None, head_dim: int) -> float:
    """The rotated fraction of a full layer's head: the share of frequency factors [head_dim / 2] that are not huge."""
    if factors is None or factors.type != TYPE_NUMBERS["f32"] or factors.shape != (head_dim // 2,):
        raise CheckpointError(f"{keys.path} has no float32 tensor rope_freqs.weight [{head_dim // 2}]; convert the checkpoint again")
    with keys.path.open("rb") as file:
        file.seek(factors.offset)
        values = np.frombuffer(file.read(factors.bytes), dtype="<f4")
    return float((values < _TURNS_BELOW).sum()) * 2 / head_dim


def _per_layer(keys: CheckedValues, key: str, layers: int) -> list[int]:
    if type(keys.get(key)) is int:
        return [keys.integer(key)] * layers
    values = keys.array(key, layers)
    if not all(type(value) is int and 1 <= value <= MAX_SIZE for value in values):
        raise keys.wrong(key, f"an integer from 1 to {MAX_SIZE} per layer")
    return values
