"""The vision and audio parts of a multimodal checkpoint: their config and the shapes of their tensors.

Most members of the family have towers of layers. 12B, the unified member, projects pixels and samples directly into the text model.
Source of the facts: transformers, models/gemma4/modeling_gemma4.py and models/gemma4_unified/modeling_gemma4_unified.py. A config must
agree with the constants in llama.cpp (tools/mtmd/models/gemma4*.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_export.checkpoint.architecture import Shapes
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.safetensors import SOURCE_TYPE, CheckedValues
from edge_export.errors import CheckpointError
from edge_runtime.bundle.manifest import MediaInputs, MediaTokens, VisionSize

VISION, AUDIO = "model.vision_tower.", "model.audio_tower."
EMBED_VISION, EMBED_AUDIO = "model.embed_vision.embedding_projection.weight", "model.embed_audio.embedding_projection.weight"
EMBEDDER = "model.vision_embedder."
MELS = 128
# One row of the unified member is made of the colour values of 48 x 48 pixels.
PATCH_VALUES = 48 * 48 * 3
_UNIFIED = "gemma4_unified"
# Groups of `Checkpoint.left_out`.
TOWERS = ("vision_tower:", "audio_tower:", "vision_embedder:", "embed_vision:", "embed_audio:")
BOUNDS = ("input_max", "input_min", "output_max", "output_min")
_LARGEST = 1 << 20
_PATCHES: dict[str, Any] = {"patch_size": 16, "pooling_kernel_size": 3, "rms_norm_eps": 1e-6}
_RAW_SOUND: dict[str, Any] = {"audio_embed_dim": 640, "rms_norm_eps": 1e-6}
_AUDIO_BUILT_IN: dict[str, Any] = {
    "attention_chunk_size": 12,
    "attention_context_left": 13,
    "attention_context_right": 0,
    "attention_logit_cap": 50.0,
    "conv_kernel_size": 5,
    "residual_weight": 0.5,
    "rms_norm_eps": 1e-6,
}
_TOKEN_KEYS = {"image": ("boi_token_id", "image_token_id", "eoi_token_id"), "audio": ("boa_token_id", "audio_token_id", "eoa_token_index")}


@dataclass(frozen=True, kw_only=True)
class VisionTower:
    """The vision tower. `positions` is the number of rows of each position table. If `standardized`, output rows are shifted and scaled."""

    hidden_size: int
    feed_forward: int
    layers: int
    heads: int
    positions: int
    clipped: bool
    standardized: bool


@dataclass(frozen=True, kw_only=True)
class VisionEmbedder:
    """The unified member's layer from pixels to rows: one linear layer with norms. `positions` has the same meaning as in a tower."""

    hidden_size: int
    positions: int


@dataclass(frozen=True, kw_only=True)
class AudioTower:
    """The audio tower. `channels` are those of the two convolutions; `output_size` is the width of the rows before the embedder."""

    hidden_size: int
    layers: int
    heads: int
    channels: tuple[int, int]
    output_size: int
    clipped: bool


@dataclass(frozen=True, kw_only=True)
class RawSound:
    """The unified member's handling of sound: this number of `samples` is projected into one row."""

    samples: int


@dataclass(frozen=True, kw_only=True)
class MediaArchitecture:
    """The inputs of a model besides text. `text_size` is the width of a soft row. Tokens are (begin, placeholder, end).

    If `bidirectional`, sliding layers also attend to later rows within an image.
    """

    vision: VisionTower | VisionEmbedder
    audio: AudioTower | RawSound | None
    text_size: int
    bidirectional: bool
    image_tokens: tuple[int, int, int]
    audio_tokens: tuple[int, int, int] | None

    def shapes(self) -> Shapes:
        """Returns the names and shapes of all tensors of the vision and audio parts."""
        shapes = _vision_shapes(self.vision) if isinstance(self.vision, VisionTower) else _embedder_shapes(self.vision)
        shapes[EMBED_VISION] = (self.text_size, self.vision.hidden_size)
        if isinstance(self.audio, AudioTower):
            shapes |= _audio_shapes(self.audio) | {EMBED_AUDIO: (self.text_size, self.audio.output_size)}
        elif self.audio is not None:
            shapes[EMBED_AUDIO] = (self.text_size, self.audio.samples)
        return shapes


def parse_media(config: dict[str, Any], path: Path, text_size: int, vocab_size: int) -> MediaArchitecture:
    """Reads a checkpoint's config. Raises CheckpointError if the model has no vision part, or if llama.cpp would compute it differently."""
    outer, kind = CheckedValues(config, path, "", "use an unmodified config"), config.get("model_type")
    text = config.get("text_config")
    if not isinstance(config.get("vision_config"), dict) or not isinstance(text, dict) or kind not in ("gemma4", _UNIFIED):
        raise CheckpointError(f"{path} has no vision tower of a Gemma 4 member; leave --media out")
    vision = outer.section("vision_config")
    _check_built_in(vision, _PATCHES)
    architecture = MediaArchitecture(
        vision=VisionEmbedder(hidden_size=_size(vision, "mm_embed_dim"), positions=_size(vision, "mm_posemb_size"))
        if kind == _UNIFIED
        else _vision(vision),
        audio=None,
        text_size=text_size,
        bidirectional=text.get("use_bidirectional_attention") == "vision",
        image_tokens=_tokens(outer, "image", vocab_size),
        audio_tokens=None,
    )
    if not isinstance(config.get("audio_config"), dict):
        return architecture
    audio = outer.section("audio_config")
    _check_built_in(audio, _RAW_SOUND if kind == _UNIFIED else _AUDIO_BUILT_IN)
    encoder = RawSound(samples=_RAW_SOUND["audio_embed_dim"]) if kind == _UNIFIED else _audio(audio)
    return replace(architecture, audio=encoder, audio_tokens=_tokens(outer, "audio", vocab_size))


def media_architecture(checkpoint: Checkpoint) -> MediaArchitecture:
    """Returns the vision and audio parts of a target, whose tensors are all there and fit. Raises CheckpointError."""
    model = checkpoint.architecture
    media = parse_media(checkpoint.config, checkpoint.folder / "config.json", model.hidden_size, model.vocab_size)
    shapes = media.shapes()
    for name, shape in shapes.items():
        stored = checkpoint.others.get(name)
        if stored is None or stored.shape != shape or stored.dtype not in SOURCE_TYPE:
            described = "missing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
            raise CheckpointError(f"{checkpoint.folder}: the tensor {name!r} of shape {list(shape)} is {described}; download it again")
    extra = [name for name in checkpoint.others if name.startswith((VISION, AUDIO, EMBEDDER, "model.embed_")) and name not in shapes]
    if extra:
        raise CheckpointError(f"{checkpoint.folder}: {extra[0]!r} is no tensor of the parts in its config; use an unmodified checkpoint")
    return media


def media_inputs(media: MediaArchitecture) -> MediaInputs:
    """Returns the manifest's entry."""
    image, audio = (
        None if tokens is None else MediaTokens(begin=tokens[0], placeholder=tokens[1], end=tokens[2])
        for tokens in (media.image_tokens, media.audio_tokens)
    )
    assert image is not None
    raw = media.audio.samples if isinstance(media.audio, RawSound) else None
    tower = media.vision if isinstance(media.vision, VisionTower) else None
    size = VisionSize(
        hidden_size=media.vision.hidden_size,
        layers=tower.layers if tower else None,
        feed_forward_size=tower.feed_forward if tower else None,
    )
    return MediaInputs(image=image, audio=audio, bidirectional=media.bidirectional, samples_per_row=raw, vision=size)


def _size(values: CheckedValues, key: str) -> int:
    return values.integer(key, high=_LARGEST)


def _vision(values: CheckedValues) -> VisionTower:
    rope = values.get("rope_parameters") or {}
    if isinstance(rope, dict) and rope.get("rope_theta", 100.0) != 100.0:
        raise _differs(values, f"rope_theta {rope['rope_theta']!r}, llama.cpp computes with 100")
    tower = VisionTower(
        hidden_size=_size(values, "hidden_size"),
        feed_forward=_size(values, "intermediate_size"),
        layers=_size(values, "num_hidden_layers"),
        heads=_size(values, "num_attention_heads"),
        positions=_size(values, "position_embedding_size"),
        clipped=values.get("use_clipped_linears") is True,
        standardized=values.get("standardize") is True,
    )
    if values.get("num_key_value_heads") != tower.heads or values.get("head_dim") != tower.hidden_size / tower.heads:
        raise _differs(values, "heads that do not share hidden_size evenly")
    return tower


def _audio(values: CheckedValues) -> AudioTower:
    channels = values.array("subsampling_conv_channels", 2)
    if not all(type(count) is int and 0 < count <= _LARGEST for count in channels):
        raise values.wrong("subsampling_conv_channels", "two counts")
    tower = AudioTower(
        hidden_size=_size(values, "hidden_size"),
        layers=_size(values, "num_hidden_layers"),
        heads=_size(values, "num_attention_heads"),
        channels=(channels[0], channels[1]),
        output_size=_size(values, "output_proj_dims"),
        clipped=values.get("use_clipped_linears") is True,
    )
    if tower.hidden_size % tower.heads:
        raise _differs(values, "heads that do not share hidden_size evenly")
    return tower


def _check_built_in(values: CheckedValues, built_in: dict[str, Any]) -> None:
    for key, value in built_in.items():
        if values.values.get(key, value) != value:
            raise _differs(values, f"{key} {str(values.get(key))[:40]}, llama.cpp computes with {value}")


def _differs(values: CheckedValues, what: str) -> CheckpointError:
    return CheckpointError(f"{values.path}: {values.where.rstrip('.')} has {what}; leave --media out")


def _tokens(values: CheckedValues, kind: str, vocab_size: int) -> tuple[int, int, int]:
    begin, placeholder, end = (values.integer(key, low=0, high=vocab_size - 1) for key in _TOKEN_KEYS[kind])
    return begin, placeholder, end


def _linear(name: str, rows: int, columns: int, clipped: bool) -> Shapes:
    bounds: Shapes = {f"{name}.{bound}": () for bound in BOUNDS} if clipped else {}
    return {f"{name}.linear.weight": (rows, columns)} | bounds


def _embedder_shapes(embedder: VisionEmbedder) -> Shapes:
    size = embedder.hidden_size
    shapes: Shapes = {
        f"{EMBEDDER}patch_dense.weight": (size, PATCH_VALUES),
        f"{EMBEDDER}patch_dense.bias": (size,),
        f"{EMBEDDER}pos_embedding": (embedder.positions, 2, size),
    }
    for norm, width in (("patch_ln1", PATCH_VALUES), ("patch_ln2", size), ("pos_norm", size)):
        shapes |= {f"{EMBEDDER}{norm}.{part}": (width,) for part in ("weight", "bias")}
    return shapes


def _vision_shapes(tower: VisionTower) -> Shapes:
    size, wide, clipped = tower.hidden_size, tower.feed_forward, tower.clipped
    shapes: Shapes = {
        f"{VISION}patch_embedder.input_proj.weight": (size, 16 * 16 * 3),
        f"{VISION}patch_embedder.position_embedding_table": (2, tower.positions, size),
    }
    if tower.standardized:
        shapes |= {f"{VISION}std_{part}": (size,) for part in ("bias", "scale")}
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    for layer in range(tower.layers):
        at = f"{VISION}encoder.layers.{layer}."
        shapes |= {f"{at}{norm}.weight": (size,) for norm in norms}
        shapes |= {f"{at}self_attn.{norm}.weight": (size // tower.heads,) for norm in ("q_norm", "k_norm")}
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes |= _linear(f"{at}self_attn.{name}", size, size, clipped)
        for name in ("gate_proj", "up_proj"):
            shapes |= _linear(f"{at}mlp.{name}", wide, size, clipped)
        shapes |= _linear(f"{at}mlp.down_proj", size, wide, clipped)
    return shapes


def _audio_shapes(tower: AudioTower) -> Shapes:
    size, clipped, (first, second) = tower.hidden_size, tower.clipped, tower.channels
    at = f"{AUDIO}subsample_conv_projection."
    shapes: Shapes = {
        f"{at}layer0.conv.weight": (first, 1, 3, 3),
        f"{at}layer0.norm.weight": (first,),
        f"{at}layer1.conv.weight": (second, first, 3, 3),
        f"{at}layer1.norm.weight": (second,),
        f"{at}input_proj_linear.weight": (size, MELS // 4 * second),
        f"{AUDIO}output_proj.weight": (tower.output_size, size),
        f"{AUDIO}output_proj.bias": (tower.output_size,),
    }
    for layer in range(tower.layers):
        at = f"{AUDIO}layers.{layer}."
        norms = [f"feed_forward{i}.{norm}_layer_norm" for i in (1, 2) for norm in ("pre", "post")]
        norms += ["lconv1d.pre_layer_norm", "lconv1d.conv_norm", "norm_pre_attn", "norm_post_attn", "norm_out"]
        shapes |= {f"{at}{norm}.weight": (size,) for norm in norms}
        shapes |= {f"{at}self_attn.per_dim_scale": (size // tower.heads,), f"{at}self_attn.relative_k_proj.weight": (size, size)}
        shapes[f"{at}lconv1d.depthwise_conv1d.weight"] = (size, 1, 5)
        for i in (1, 2):
            shapes |= _linear(f"{at}feed_forward{i}.ffw_layer_1", 4 * size, size, clipped)
            shapes |= _linear(f"{at}feed_forward{i}.ffw_layer_2", size, 4 * size, clipped)
        shapes |= _linear(f"{at}lconv1d.linear_start", 2 * size, size, clipped)
        shapes |= _linear(f"{at}lconv1d.linear_end", size, size, clipped)
        for name in ("q_proj", "k_proj", "v_proj", "post"):
            shapes |= _linear(f"{at}self_attn.{name}", size, size, clipped)
    return shapes
