"""Checks a media encoder's GGUF before llama.cpp opens it: the keys of a Gemma 4 member, and every tensor with
the shape that they require. Members have towers of layers (gemma4v, gemma4a), or projections alone (12B: gemma4uv, gemma4ua).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.bundle.gguf_header import GgufError, GgufHeader, read_gguf_header
from edge_runtime.errors import BackendError

_LARGEST = 1 << 16
_MAX_LAYERS = 128
# ggml's numbers of f32, f16 and bf16
_TYPES = (0, 1, 30)
_Q8_0 = 8
# Matrices that ggml multiplies with, which may be quantized.
_MATRIX = re.compile(r"(?:[va]\.blk\.\d+\.(?:attn|ffn|conv_pw)\w*|mm\.(?:a\.)?input_projection|a\.pre_encode\.out)\.weight")
_PATCH, _POOLING, _COLOURS = 16, 3, 3
# Of sound at 16 kHz in one row, without an audio tower (tools/mtmd/clip.cpp).
_SAMPLES = 640
_BOUNDS = ("input_max", "input_min", "output_max", "output_min")
Shapes = dict[str, tuple[int, ...]]
# GGUF's types of all keys that an encoder has and libmtmd reads; it ends the process at another type.
_U32, _F32, _BOOL, _STRING, _FLOATS = (4,), (6,), (7,), (8,), (9, 6)
_SIZES = ("projection_dim", "embedding_length", "feed_forward_length", "block_count", "attention.head_count")
_EPSILON = "attention.layer_norm_epsilon"
_KEY_TYPES: dict[str, tuple[int, ...]] = (
    dict.fromkeys(("general.architecture", "general.name", "general.description"), _STRING)
    | dict.fromkeys(("clip.has_vision_encoder", "clip.has_audio_encoder", "clip.use_gelu"), _BOOL)
    | {f"clip.{tower}.{key}": _U32 for tower in ("vision", "audio") for key in _SIZES}
    | {f"clip.{tower}.projector_type": _STRING for tower in ("vision", "audio")}
    | {f"clip.{tower}.{_EPSILON}": _F32 for tower in ("vision", "audio")}
    | {"clip.vision.image_size": _U32, "clip.vision.patch_size": _U32, "clip.audio.num_mel_bins": _U32}
    | dict.fromkeys(("clip.vision.image_mean", "clip.vision.image_std"), _FLOATS)
)


@dataclass(frozen=True, kw_only=True)
class EncoderFacts:
    """`has_audio`: it takes sound too, `mel_frames`: through an audio tower. `longest`: the most pixels on a side of an image."""

    has_audio: bool
    mel_frames: bool
    longest: int


def check_encoder(path: Path, width: int) -> EncoderFacts:
    """Returns what the encoder takes. `width` is the hidden size of the target.

    Raises BackendError for a file that is damaged, of another kind, or of another target.
    """
    try:
        header = read_gguf_header(path)
    except GgufError as error:
        raise BackendError(str(error)) from error
    audio = header.keys.get("clip.has_audio_encoder") is True
    unified = header.keys.get("clip.vision.projector_type") == "gemma4uv"
    _check_keys(path, header, _expected_keys(width, audio=audio, unified=unified))
    if unified:
        expected = _embedder_shapes(path, header, width) | ({"mm.a.input_projection.weight": (width, _SAMPLES)} if audio else {})
    else:
        expected = _vision_shapes(path, header, width) | (_audio_shapes(path, header, width) if audio else {})
    _check_tensors(path, header, expected)
    side = _PATCH * (_POOLING if unified else 1)
    return EncoderFacts(
        has_audio=audio, mel_frames=audio and not unified, longest=side * _dimension(path, header, "v.position_embd.weight", 1)
    )


def _expected_keys(width: int, *, audio: bool, unified: bool) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.vision.projector_type": "gemma4uv" if unified else "gemma4v",
        "clip.vision.patch_size": _PATCH,
        "clip.vision.projection_dim": width,
    }
    if audio:
        kind = "gemma4ua" if unified else "gemma4a"
        keys |= {"clip.audio.projector_type": kind, "clip.audio.num_mel_bins": 128, "clip.audio.projection_dim": width}
    if not unified:
        return keys | {"clip.use_gelu": True}
    inputs = ("vision", "audio") if audio else ("vision",)
    return keys | {f"clip.{medium}.{key}": 0 for medium in inputs for key in ("feed_forward_length", "block_count", "attention.head_count")}


def _check_keys(path: Path, header: GgufHeader, expected: dict[str, Any]) -> None:
    for key, types in header.types.items():
        if types != _KEY_TYPES.get(key, None if key.startswith("clip.") else types):
            raise BackendError(f"{path}: the key {key[:80]!r} is none of an encoder, or of another type; export the bundle again")
        value = header.keys[key]
        odd = key.endswith(_EPSILON) and not 0 <= value < 1
        if key in _KEY_TYPES and types == _FLOATS:
            odd = not isinstance(value, list) or len(value) != _COLOURS
        if odd:
            raise BackendError(f"{path}: {key} is {str(value)[:40]}, which no encoder has; export the bundle again")
    for key, value in expected.items():
        if header.keys.get(key) != value:
            raise BackendError(f"{path}: {key} is {str(header.keys.get(key))[:40]!r}, not {value!r}; export the bundle again")


def _check_tensors(path: Path, header: GgufHeader, expected: Shapes) -> None:
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if tensors.keys() != expected.keys():
        odd = sorted(tensors.keys() ^ expected.keys())[0]
        raise BackendError(f"{path}: the tensor {odd[:80]!r} is {'unknown' if odd in tensors else 'missing'}; export the bundle again")
    for name, shape in expected.items():
        quantized = tensors[name].type == _Q8_0 and len(shape) == 2 and _MATRIX.fullmatch(name)
        if tuple(tensors[name].shape)[::-1] != shape or not (quantized or tensors[name].type in _TYPES):
            got = f"{list(tensors[name].shape)[::-1]} of type {tensors[name].type}"
            raise BackendError(f"{path}: {name!r} is {got}, not {list(shape)} of floats or q8_0; export the bundle again")


def _count(path: Path, header: GgufHeader, key: str, maximum: int = _LARGEST) -> int:
    value = header.keys.get(key)
    if type(value) is not int or not 0 < value <= maximum:
        raise BackendError(f"{path}: {key} is {str(value)[:40]!r}, not a number from 1 to {maximum}; export the bundle again")
    return value


def _dimension(path: Path, header: GgufHeader, name: str, index: int) -> int:
    """A size that no key has: dimension `index` of a tensor, rows first."""
    for tensor in header.tensors:
        if tensor.name == name and len(tensor.shape) > index and 0 < tensor.shape[::-1][index] <= _LARGEST:
            return tensor.shape[::-1][index]
    raise BackendError(f"{path} lacks a usable tensor {name!r}; export the bundle again")


def _heads(path: Path, header: GgufHeader, tower: str, size: int) -> int:
    heads = _count(path, header, f"clip.{tower}.attention.head_count")
    if size % (4 * heads):
        raise BackendError(f"{path}: {heads} heads do not share {size} values in fours; export the bundle again")
    return heads


def _linear(name: str, shape: tuple[int, int], clipped: bool) -> Shapes:
    return {f"{name}.weight": shape} | ({f"{name}.{bound}": (1,) for bound in _BOUNDS} if clipped else {})


def _embedder_shapes(path: Path, header: GgufHeader, width: int) -> Shapes:
    size = _count(path, header, "clip.vision.embedding_length")
    values = 3 * (_PATCH * _POOLING) ** 2
    shapes: Shapes = {
        "v.patch_embd.weight": (size, values),
        "v.patch_embd.bias": (size,),
        "v.position_embd.weight": (2, _dimension(path, header, "v.position_embd.weight", 1), size),
        "mm.input_projection.weight": (width, size),
    }
    for norm, length in ((1, values), (2, size), (3, size)):
        shapes |= {f"v.patch_norm.{norm}.{part}": (length,) for part in ("weight", "bias")}
    return shapes


def _vision_shapes(path: Path, header: GgufHeader, width: int) -> Shapes:
    size = _count(path, header, "clip.vision.embedding_length")
    wide = _count(path, header, "clip.vision.feed_forward_length")
    head = size // _heads(path, header, "vision", size)
    clipped = any(tensor.name == "v.blk.0.attn_q.input_max" for tensor in header.tensors)
    positions = _dimension(path, header, "v.position_embd.weight", 1)
    shapes: Shapes = {
        "v.patch_embd.weight": (size, 3, 16, 16),
        "v.position_embd.weight": (2, positions, size),
        "mm.input_projection.weight": (width, size),
    }
    if any(tensor.name.startswith("v.std_") for tensor in header.tensors):
        shapes |= {"v.std_bias": (size,), "v.std_scale": (size,)}
    for layer in range(_count(path, header, "clip.vision.block_count", _MAX_LAYERS)):
        at = f"v.blk.{layer}."
        shapes |= {f"{at}{norm}.weight": (size,) for norm in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm")}
        shapes |= {f"{at}{norm}.weight": (head,) for norm in ("attn_q_norm", "attn_k_norm")}
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes |= _linear(at + name, (size, size), clipped)
        for name, shape in (("ffn_gate", (wide, size)), ("ffn_up", (wide, size)), ("ffn_down", (size, wide))):
            shapes |= _linear(at + name, shape, clipped)
    return shapes


def _audio_shapes(path: Path, header: GgufHeader, width: int) -> Shapes:
    size = _count(path, header, "clip.audio.embedding_length")
    head = size // _heads(path, header, "audio", size)
    clipped = any(tensor.name == "a.blk.0.attn_q.input_max" for tensor in header.tensors)
    first, second = (_dimension(path, header, f"a.conv1d.{i}.norm.weight", 0) for i in (0, 1))
    output = _dimension(path, header, "a.pre_encode.out.bias", 0)
    shapes: Shapes = {
        "a.conv1d.0.weight": (first, 1, 3, 3),
        "a.conv1d.0.norm.weight": (first,),
        "a.conv1d.1.weight": (second, first, 3, 3),
        "a.conv1d.1.norm.weight": (second,),
        "a.input_projection.weight": (size, 32 * second),
        "a.pre_encode.out.weight": (output, size),
        "a.pre_encode.out.bias": (output,),
        "mm.a.input_projection.weight": (width, output),
    }
    norms = (
        "ffn_norm",
        "ffn_post_norm",
        "ffn_norm_1",
        "ffn_post_norm_1",
        "attn_pre_norm",
        "attn_post_norm",
        "conv_norm",
        "norm_conv",
        "ln2",
    )
    for layer in range(_count(path, header, "clip.audio.block_count", _MAX_LAYERS)):
        at = f"a.blk.{layer}."
        shapes |= {f"{at}{norm}.weight": (size,) for norm in norms}
        shapes |= {f"{at}per_dim_scale.weight": (head,), f"{at}attn_k_rel.weight": (size, size), f"{at}conv_dw.weight": (size, 5)}
        for end in ("", "_1"):
            shapes |= _linear(f"{at}ffn_up{end}", (4 * size, size), clipped) | _linear(f"{at}ffn_down{end}", (size, 4 * size), clipped)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out", "conv_pw2"):
            shapes |= _linear(at + name, (size, size), clipped)
        shapes |= _linear(f"{at}conv_pw1", (2 * size, size), clipped)
    return shapes
