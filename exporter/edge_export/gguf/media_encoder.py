"""The encoder of images and sound as a GGUF file (llama.cpp's mmproj): what llama.cpp's converter writes, and one key more.

Source of the facts: llama.cpp, conversion/gemma.py (Gemma4VisionAudioModel), conversion/base.py, gguf-py/gguf/tensor_mapping.py.
The key is `clip.use_gelu`. Without it llama.cpp computes x * sigmoid(1.702 x) where Gemma 4 has GELU (tools/mtmd/clip.cpp).
Every byte but that key is equal, except that `per_dim_scale` is rounded correctly, which torch's softplus is not: 1 unit in the last place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.json_file import read_optional_json_object
from edge_export.checkpoint.media_architecture import AUDIO, EMBED_AUDIO, EMBED_VISION, MELS, VISION, MediaArchitecture, parse_media
from edge_export.checkpoint.safetensors import FLOAT_BYTES, SOURCE_TYPE, FloatType, StoredTensor, read_float_chunks
from edge_export.errors import CheckpointError
from edge_export.gguf.metadata import Entry
from edge_export.gguf.writer import FILE_TYPES, GGML_TYPES, GgufPlan, PlannedTensor, RawTensor, header_of
from edge_runtime.bundle.manifest import MediaInputs, MediaTokens

# Groups of `Checkpoint.left_out`.
TOWERS = ("vision_tower:", "audio_tower:", "embed_vision:", "embed_audio:")
USE_GELU = "clip.use_gelu"
_MAX_PROCESSOR_BYTES = 1 << 20
_EPSILON = 1e-6
# Written for every file and used by none (conversion/gemma.py).
_UNUSED_IMAGE_SIZE = 224
_NAMES = {
    EMBED_VISION: "mm.input_projection.weight",
    EMBED_AUDIO: "mm.a.input_projection.weight",
    f"{VISION}patch_embedder.input_proj.weight": "v.patch_embd.weight",
    f"{VISION}patch_embedder.position_embedding_table": "v.position_embd.weight",
    f"{AUDIO}output_proj.weight": "a.pre_encode.out.weight",
    f"{AUDIO}output_proj.bias": "a.pre_encode.out.bias",
    f"{AUDIO}subsample_conv_projection.input_proj_linear.weight": "a.input_projection.weight",
    f"{AUDIO}subsample_conv_projection.layer0.conv.weight": "a.conv1d.0.weight",
    f"{AUDIO}subsample_conv_projection.layer0.norm.weight": "a.conv1d.0.norm.weight",
    f"{AUDIO}subsample_conv_projection.layer1.conv.weight": "a.conv1d.1.weight",
    f"{AUDIO}subsample_conv_projection.layer1.norm.weight": "a.conv1d.1.norm.weight",
}
_VISION_LAYER = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_AUDIO_LAYER = {
    "feed_forward1.pre_layer_norm": "ffn_norm",
    "feed_forward1.ffw_layer_1": "ffn_up",
    "feed_forward1.ffw_layer_2": "ffn_down",
    "feed_forward1.post_layer_norm": "ffn_post_norm",
    "feed_forward2.pre_layer_norm": "ffn_norm_1",
    "feed_forward2.ffw_layer_1": "ffn_up_1",
    "feed_forward2.ffw_layer_2": "ffn_down_1",
    "feed_forward2.post_layer_norm": "ffn_post_norm_1",
    "norm_pre_attn": "attn_pre_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.relative_k_proj": "attn_k_rel",
    "self_attn.per_dim_scale": "per_dim_scale",
    "self_attn.post": "attn_out",
    "norm_post_attn": "attn_post_norm",
    # The two names of the converter are exchanged; its reader expects them so.
    "lconv1d.pre_layer_norm": "conv_norm",
    "lconv1d.conv_norm": "norm_conv",
    "lconv1d.linear_start": "conv_pw1",
    "lconv1d.depthwise_conv1d": "conv_dw",
    "lconv1d.linear_end": "conv_pw2",
    "norm_out": "ln2",
}
_LAYER = re.compile(r"model\.(vision|audio)_tower\.(?:encoder\.)?layers\.(0|[1-9][0-9]{0,3})\.(.+)")
_ALWAYS_FLOAT32 = ("v.position_embd.weight", "a.input_projection.weight", "a.conv1d.")


def encoder_name(name: str) -> str | None:
    """Returns the GGUF name of a tower's tensor; None if it has none."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _NAMES.get(name)
    inner, _, end = layer[3].rpartition(".")
    if end == "per_dim_scale":
        inner, end = layer[3], "weight"
    known = _VISION_LAYER if layer[1] == "vision" else _AUDIO_LAYER
    short = known.get(inner.removesuffix(".linear"))
    return None if short is None else f"{layer[1][0]}.blk.{layer[2]}.{short}.{end}"


def media_architecture(checkpoint: Checkpoint) -> MediaArchitecture:
    """Returns the towers of a target, whose tensors are all there and fit. Raises CheckpointError."""
    model = checkpoint.architecture
    media = parse_media(checkpoint.config, str(checkpoint.folder / "config.json"), model.hidden_size, model.vocab_size)
    wanted = media.shapes()
    for name, shape in wanted.items():
        stored = checkpoint.others.get(name)
        if stored is None or stored.shape != shape or stored.dtype not in SOURCE_TYPE:
            found = "missing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
            raise CheckpointError(f"{checkpoint.folder}: the tensor {name!r} of shape {list(shape)} is {found}; download it again")
    extra = [name for name in checkpoint.others if name.startswith((VISION, AUDIO, "model.embed_")) and name not in wanted]
    if extra:
        raise CheckpointError(f"{checkpoint.folder}: {extra[0]!r} is no tensor of the towers in its config; use an unmodified checkpoint")
    return media


def media_inputs(media: MediaArchitecture) -> MediaInputs:
    """Returns the manifest's entry."""
    image, audio = (
        None if tokens is None else MediaTokens(begin=tokens[0], placeholder=tokens[1], end=tokens[2])
        for tokens in (media.image_tokens, media.audio_tokens)
    )
    assert image is not None
    return MediaInputs(image=image, audio=audio)


def plan_encoder(checkpoint: Checkpoint, weight_type: FloatType, *, use_gelu: bool = True) -> GgufPlan:
    """Plans the encoder's file. Reads no weights. Raises CheckpointError if the checkpoint has no towers that llama.cpp can run."""
    media = media_architecture(checkpoint)
    tensors = tuple(_planned(tensor, weight_type) for name, tensor in checkpoint.others.items() if encoder_name(name))
    entries = _entries(checkpoint, media, weight_type)
    if use_gelu:
        entries.append((USE_GELU, "bool", True))
    types = [GGML_TYPES[tensor.type] if isinstance(tensor, PlannedTensor) else tensor.type for tensor in tensors]
    return GgufPlan(header=header_of("clip", "mmproj", checkpoint, tensors, types=types, entries=entries), tensors=tensors)


def _planned(stored: StoredTensor, weight_type: FloatType) -> PlannedTensor | RawTensor:
    name, shape = encoder_name(stored.name) or "", stored.shape or (1,)
    kind: FloatType = weight_type
    if len(shape) == 1 or name.endswith(("_norm.weight", ".conv_dw.weight")) or name.startswith(_ALWAYS_FLOAT32):
        kind = "f32"
    if name == "v.patch_embd.weight":
        side = 16
        half: Literal["f32", "f16"] = "f16" if weight_type == "f16" else "f32"
        return _rewritten(name, (shape[0], 3, side, side), half, stored, lambda v: v.reshape(-1, side, side, 3).transpose(0, 3, 1, 2))
    if name.endswith(".conv_dw.weight"):
        shape = (shape[0], shape[2])
    if name.endswith(".per_dim_scale.weight"):
        return _rewritten(name, shape, "f32", stored, _softplus)
    return PlannedTensor(name=name, shape=shape, type=kind, source=stored)


def _rewritten(
    name: str,
    shape: tuple[int, ...],
    kind: Literal["f32", "f16"],
    stored: StoredTensor,
    change: Callable[[NDArray[np.float32]], NDArray[Any]],
) -> RawTensor:
    """A small tensor whose values are changed when they are written."""

    def pieces() -> Iterator[Any]:
        values = np.concatenate([np.array(piece) for piece in read_float_chunks(stored, "f32")])
        changed = np.ascontiguousarray(change(values), dtype=np.float32)
        raw: NDArray[Any] = changed if kind == "f32" else changed.astype(np.float16)
        yield np.ascontiguousarray(raw).data.cast("B")

    return RawTensor(name=name, shape=shape, type=int(GGML_TYPES[kind]), bytes=prod(shape) * FLOAT_BYTES[kind], pieces=pieces)


def _softplus(values: NDArray[np.float32]) -> NDArray[Any]:
    """ln(1 + e^x), above 20 x itself, as torch has it."""
    wide = values.astype(np.float64)
    return np.where(wide > 20.0, wide, np.log1p(np.exp(np.minimum(wide, 20.0))))


def _entries(checkpoint: Checkpoint, media: MediaArchitecture, weight_type: FloatType) -> list[Entry]:
    vision, audio = media.vision, media.audio
    mean, deviation = _normalization(checkpoint)
    entries: list[Entry] = [
        ("general.file_type", "uint32", int(FILE_TYPES[weight_type])),
        ("clip.has_vision_encoder", "bool", True),
        ("clip.vision.projection_dim", "uint32", media.text_size),
        ("clip.vision.image_size", "uint32", _UNUSED_IMAGE_SIZE),
        ("clip.vision.patch_size", "uint32", 16),
        ("clip.vision.embedding_length", "uint32", vision.hidden_size),
        ("clip.vision.feed_forward_length", "uint32", vision.feed_forward),
        ("clip.vision.block_count", "uint32", vision.layers),
        ("clip.vision.attention.head_count", "uint32", vision.heads),
        ("clip.vision.image_mean", "array", mean),
        ("clip.vision.image_std", "array", deviation),
    ]
    if audio is not None:
        entries += [
            ("clip.has_audio_encoder", "bool", True),
            ("clip.audio.projection_dim", "uint32", media.text_size),
            ("clip.audio.embedding_length", "uint32", audio.hidden_size),
            ("clip.audio.feed_forward_length", "uint32", 4 * audio.hidden_size),
            ("clip.audio.block_count", "uint32", audio.layers),
            ("clip.audio.attention.head_count", "uint32", audio.heads),
        ]
    entries += [("clip.vision.projector_type", "string", "gemma4v"), ("clip.vision.attention.layer_norm_epsilon", "float32", _EPSILON)]
    if audio is not None:
        entries += [
            ("clip.audio.projector_type", "string", "gemma4a"),
            ("clip.audio.num_mel_bins", "uint32", MELS),
            ("clip.audio.attention.layer_norm_epsilon", "float32", _EPSILON),
        ]
    return entries


def _normalization(checkpoint: Checkpoint) -> tuple[list[float], list[float]]:
    """Mean and deviation of Gemma 4's processor, which change nothing. Raises CheckpointError if the checkpoint's have others."""
    identity = ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])
    for name in ("preprocessor_config.json", "processor_config.json"):
        found = read_optional_json_object(checkpoint.folder / name, _MAX_PROCESSOR_BYTES)
        inner = found.get("image_processor")
        found = found | (inner if isinstance(inner, dict) else {})
        for key, wanted in zip(("image_mean", "image_std"), identity, strict=True):
            if found.get(key, wanted) != wanted:
                raise CheckpointError(f"{checkpoint.folder / name}: {key} is {str(found[key])[:60]}, not {wanted}; use an unmodified file")
    return identity
