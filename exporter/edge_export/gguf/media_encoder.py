"""Plans the encoder of images and sound as a GGUF file (llama.cpp's mmproj).

Source of the facts: llama.cpp, conversion/gemma.py (Gemma4VisionAudioModel, Gemma4UnifiedVisionAudioModel), conversion/base.py.

The bytes are equal to those of llama.cpp's converter, with two exceptions. For a vision tower there is an additional key, `clip.use_gelu`,
because without it llama.cpp computes x * sigmoid(1.702 x) where Gemma 4 has GELU (tools/mtmd/clip.cpp). And `per_dim_scale` is rounded
correctly, while torch's softplus may be wrong by 1 unit in the last place.
"""

from __future__ import annotations

from math import isqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.media_architecture import (
    EMBEDDER,
    MELS,
    AudioTower,
    MediaArchitecture,
    RawSound,
    VisionTower,
    media_architecture,
)
from edge_export.checkpoint.safetensors import FloatType, StoredTensor, read_optional_json_object, read_values
from edge_export.checkpoint.weight_formats import BLOCK
from edge_export.errors import CheckpointError
from edge_export.gguf.keys import Entry, encoder_name
from edge_export.gguf.writer import GgufPlan, GgufTensor, array_tensor, float_tensor, header_of
from edge_runtime.bundle.gguf_header import QUANTIZATIONS

EncoderType = FloatType | Literal["q8_0"]
# The most by which soft rows may differ from the reference's, as a share of their norm: twice what tiny random members show, whose weights
# amplify rounding more than trained ones do. Products with bf16 and q8_0 weights round their activations to these types.
ENCODER_LIMITS: dict[EncoderType, float] = {"f32": 5e-3, "f16": 5e-3, "bf16": 0.04, "q8_0": 0.1}
ENCODER_TYPES = tuple(ENCODER_LIMITS)
USE_GELU = "clip.use_gelu"
_MAX_PROCESSOR_BYTES = 1 << 20
_EPSILON = 1e-6
# llama.cpp's converter writes this for every file, but it is not used (conversion/gemma.py).
_UNUSED_IMAGE_SIZE = 224
_ALWAYS_FLOAT32 = ("v.position_embd.weight", "a.input_projection.weight", "a.conv1d.")


def plan_encoder(checkpoint: Checkpoint, weight_type: EncoderType, *, use_gelu: bool = True) -> GgufPlan:
    """Plans the encoder's file without reading weights. Raises CheckpointError if the checkpoint has no encoders that llama.cpp can run."""
    media = media_architecture(checkpoint)
    tensors = tuple(_planned(tensor, weight_type) for name, tensor in checkpoint.others.items() if encoder_name(name))
    entries = _entries(checkpoint, media, weight_type)
    if use_gelu and isinstance(media.vision, VisionTower):
        entries.append((USE_GELU, "bool", True))
    return GgufPlan(header=header_of("clip", "mmproj", checkpoint, tensors, entries), tensors=tensors)


def _planned(stored: StoredTensor, weight_type: EncoderType) -> GgufTensor:
    name, shape = encoder_name(stored.name) or "", stored.shape or (1,)
    if name == "v.patch_embd.weight":
        side = isqrt(shape[1] // 3)
        reshaped = shape if stored.name.startswith(EMBEDDER) else (shape[0], 3, side, side)
        return array_tensor(name, reshaped, "f16" if weight_type == "f16" else "f32", lambda: _colours_first(read_values(stored)))
    if name.startswith("v.patch_norm.1."):
        return array_tensor(name, shape, "f32", lambda: _colours_first(read_values(stored).reshape(1, -1)))
    if stored.name == f"{EMBEDDER}pos_embedding":
        return array_tensor(name, (shape[1], shape[0], shape[2]), "f32", lambda: read_values(stored).transpose(1, 0, 2))
    if name.endswith(".per_dim_scale.weight"):
        return array_tensor(name, shape, "f32", lambda: _softplus(read_values(stored)))
    if name.endswith(".conv_dw.weight"):
        return float_tensor(name, stored, "f32", (shape[0], shape[2]))
    if len(shape) == 1 or name.endswith("_norm.weight") or name.startswith(_ALWAYS_FLOAT32):
        return float_tensor(name, stored, "f32", shape)
    if weight_type != "q8_0":
        return float_tensor(name, stored, weight_type)
    # Matrices whose rows are not whole blocks are f16 (conversion/base.py).
    return float_tensor(name, stored, "f16") if shape[-1] % BLOCK else array_tensor(name, shape, "q8_0", lambda: read_values(stored))


def _colours_first(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Reorders the values [n, height * width * 3] of square patches to [n, 3, height, width]."""
    side = isqrt(rows.shape[1] // 3)
    return rows.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)


def _softplus(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Computes ln(1 + e^x). Above 20 it returns x itself, as torch does."""
    wide = values.astype(np.float64)
    return np.where(wide > 20.0, wide, np.log1p(np.exp(np.minimum(wide, 20.0)))).astype(np.float32)


def _entries(checkpoint: Checkpoint, media: MediaArchitecture, weight_type: EncoderType) -> list[Entry]:
    """Returns the keys in the converter's order. Without a tower, keys that describe layers are 0."""
    mean, deviation = _normalization(checkpoint)
    tower = media.vision if isinstance(media.vision, VisionTower) else None
    entries: list[Entry] = [
        ("general.file_type", "uint32", QUANTIZATIONS[weight_type].file_type),
        ("clip.has_vision_encoder", "bool", True),
        ("clip.vision.projection_dim", "uint32", media.text_size),
        ("clip.vision.image_size", "uint32", _UNUSED_IMAGE_SIZE),
        ("clip.vision.patch_size", "uint32", 16),
        ("clip.vision.embedding_length", "uint32", media.vision.hidden_size),
        ("clip.vision.feed_forward_length", "uint32", tower.feed_forward if tower else 0),
        ("clip.vision.block_count", "uint32", tower.layers if tower else 0),
        ("clip.vision.attention.head_count", "uint32", tower.heads if tower else 0),
        ("clip.vision.image_mean", "array", mean),
        ("clip.vision.image_std", "array", deviation),
    ]
    if media.audio is not None:
        entries += _audio_entries(media.audio, media.text_size)
    entries += [
        ("clip.vision.projector_type", "string", "gemma4v" if tower else "gemma4uv"),
        ("clip.vision.attention.layer_norm_epsilon", "float32", _EPSILON),
    ]
    if media.audio is not None:
        entries += [
            ("clip.audio.projector_type", "string", "gemma4a" if isinstance(media.audio, AudioTower) else "gemma4ua"),
            ("clip.audio.num_mel_bins", "uint32", MELS),
            ("clip.audio.attention.layer_norm_epsilon", "float32", _EPSILON),
        ]
    return entries


def _audio_entries(audio: AudioTower | RawSound, text_size: int) -> list[Entry]:
    tower = audio if isinstance(audio, AudioTower) else None
    size = audio.hidden_size if isinstance(audio, AudioTower) else audio.samples
    return [
        ("clip.has_audio_encoder", "bool", True),
        ("clip.audio.projection_dim", "uint32", text_size),
        ("clip.audio.embedding_length", "uint32", size),
        ("clip.audio.feed_forward_length", "uint32", 4 * size if tower else 0),
        ("clip.audio.block_count", "uint32", tower.layers if tower else 0),
        ("clip.audio.attention.head_count", "uint32", tower.heads if tower else 0),
    ]


def _normalization(checkpoint: Checkpoint) -> tuple[list[float], list[float]]:
    """Returns the mean 0 and deviation 1 of Gemma 4's processor. Raises CheckpointError if the checkpoint's files have other values."""
    identity = ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    for name in ("preprocessor_config.json", "processor_config.json"):
        config = read_optional_json_object(checkpoint.folder / name, _MAX_PROCESSOR_BYTES)
        inner = config.get("image_processor")
        config = config | (inner if isinstance(inner, dict) else {})
        for key, usual in zip(("image_mean", "image_std"), identity, strict=True):
            if config.get(key, usual) != usual:
                raise CheckpointError(f"{checkpoint.folder / name}: {key} is {str(config[key])[:60]}, not {usual}; use an unmodified file")
    return identity
