"""Reads and checks a Gemma 4 config.json, and derives which tensors the text model must have.

Field names and defaults are those of transformers, models/gemma4/configuration_gemma4.py; shapes are those of modeling_gemma4.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_export.checkpoint.safetensors import CheckedValues
from edge_export.errors import CheckpointError

SLIDING, FULL = "sliding_attention", "full_attention"
TARGET_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
MAX_LAYERS = 1024
_LAYER_DIGITS = 9
_HEAD_DIM, _VOCABULARY = 256, 262_144
Shapes = dict[str, tuple[int, ...]]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SPARSE_HEAD = "masked_embedding"
CENTROIDS = f"{SPARSE_HEAD}.centroids.weight"
TOKEN_ORDERING = f"{SPARSE_HEAD}.token_ordering"
# Prefixes of tensor names, longer ones first, because the first match counts. The last one is Google's; the others are old spellings of
# transformers, Unsloth and MLX.
_PREFIXES = {
    "model.language_model.model.": "model.",
    "model.language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
    "model.language_model.": "model.",
}
# How names of the text model's own tensors begin. Other tensors of a multimodal checkpoint belong to its towers.
_TEXT = ("model.layers.", "model.embed_tokens", "model.norm.", "model.per_layer_", "lm_head.")


@dataclass(frozen=True, kw_only=True)
class TextArchitecture:
    """A Gemma 4 decoder. `full_*` are values of full-attention layers; the same names without `full_` are those of sliding layers.

    `per_layer_size` is the width of a layer's per-layer embedding; 0 means none. The last `kv_shared_layers` layers own no K/V. `window`
    and `context` are in tokens. If `tied`, the embedding is the output head too.
    """

    hidden_size: int
    layer_types: tuple[str, ...]
    heads: int
    kv_heads: int
    full_kv_heads: int
    head_dim: int
    full_head_dim: int
    intermediate_size: int
    double_wide: bool
    kv_shared_layers: int
    k_eq_v: bool
    window: int
    context: int
    vocab_size: int
    per_layer_size: int
    per_layer_vocab_size: int
    experts: int
    experts_used: int
    expert_size: int
    norm_epsilon: float
    logit_softcap: float | None
    full_rope_base: float
    sliding_rope_base: float
    full_rotary_share: float
    tied: bool

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_types)

    @property
    def owning_layers(self) -> int:
        """Number of layers that own K/V rows; these are the first ones."""
        return self.layers - self.kv_shared_layers

    @property
    def table_weights(self) -> int:
        """Number of weights in tables with a row per token: the embedding and the per-layer embeddings."""
        return self.vocab_size * self.hidden_size + self.per_layer_vocab_size * self.layers * self.per_layer_size

    def is_sliding(self, layer: int) -> bool:
        """Whether this layer attends to a window."""
        return self.layer_types[layer] == SLIDING

    def head_dim_of(self, layer: int) -> int:
        """Head dimension of this layer."""
        return self.head_dim if self.is_sliding(layer) else self.full_head_dim

    def kv_heads_of(self, layer: int) -> int:
        """K/V heads of this layer."""
        return self.kv_heads if self.is_sliding(layer) else self.full_kv_heads

    def feed_forward_of(self, layer: int) -> int:
        """Width of this layer's dense feed-forward block. It is doubled in the K/V-shared layers of E2B (Gemma4TextMLP)."""
        return self.intermediate_size * (2 if self.double_wide and layer >= self.owning_layers else 1)

    def last_owner(self, kind: str) -> int:
        """The last layer of this kind that owns K/V rows, which K/V-shared layers read. Raises ValueError if there is none."""
        return max(layer for layer in range(self.owning_layers) if self.layer_types[layer] == kind)


@dataclass(frozen=True, kw_only=True)
class AssistantArchitecture(TextArchitecture):
    """A drafter, which is a decoder whose layers own no K/V. `target_hidden_size` is the width of the hidden rows in its input."""

    target_hidden_size: int
    ordered_embeddings: bool
    centroids: int
    top_centroids: int


def parse_architecture(config: dict[str, Any], path: Path) -> TextArchitecture:
    """Reads a parsed config.json, in the published format or in the one with transformers' per_layer_config.

    `path` is used in messages. Returns an AssistantArchitecture for an assistant. Raises CheckpointError for other model types, and for
    values out of range.
    """
    kind = config.get("model_type")
    if kind not in TARGET_TYPES + ASSISTANT_TYPES:
        known = ", ".join(TARGET_TYPES + ASSISTANT_TYPES)
        raise CheckpointError(f"{path}: model_type is {kind!r}, not one of {known}; give a Gemma 4 checkpoint or its assistant")
    outer = CheckedValues(config, path, "", "use an unmodified Gemma 4 config")
    text = outer if str(kind).endswith("_text") else outer.section("text_config")
    if kind not in ASSISTANT_TYPES:
        return TextArchitecture(**_text_fields(text, tied=outer.flag("tie_word_embeddings", True)))
    fields = _text_fields(text, tied=outer.flag("tie_word_embeddings", True))
    _check_assistant(text, fields)
    return AssistantArchitecture(
        **fields | {"kv_shared_layers": len(fields["layer_types"])},
        target_hidden_size=outer.integer("backbone_hidden_size"),
        ordered_embeddings=outer.flag("use_ordered_embeddings", False),
        centroids=outer.integer("num_centroids", default=2048),
        top_centroids=outer.integer("centroid_intermediate_top_k", default=32),
    )


def _text_fields(text: CheckedValues, *, tied: bool) -> dict[str, Any]:
    text.demand("hidden_activation", "gelu_pytorch_tanh")
    text.demand("attention_bias", False, None)
    text.demand("use_bidirectional_attention", None, "vision")
    layer_types = _layer_types(text)
    shared = text.integer("num_kv_shared_layers", 0, len(layer_types), default=0)
    k_eq_v = text.flag("attention_k_eq_v", False)
    unified = "unified" in str(text.get("model_type"))
    per_layer_size = text.integer("hidden_size_per_layer_input", 0, default=0 if unified else 256)
    heads, kv_heads = text.integer("num_attention_heads", default=8), text.integer("num_key_value_heads", default=4)
    head_dim = text.integer("head_dim", default=_HEAD_DIM)
    full_head_dim, override = _full_layers(text, layer_types, k_eq_v)
    full_kv_heads = kv_heads if override is None else override
    for key, size in (("head_dim", head_dim), ("full-attention head_dim", full_head_dim)):
        if size % 2:
            raise CheckpointError(f"{text.path}: {key} is {size}, and values are rotated in pairs; use an unmodified Gemma 4 config")
    for key, count in (("num_key_value_heads", kv_heads), ("num_global_key_value_heads", full_kv_heads)):
        if heads % count:
            raise CheckpointError(f"{text.path}: {heads} attention heads do not divide by {key} {count}; use an unmodified Gemma 4 config")
    return (
        {
            "hidden_size": text.integer("hidden_size", default=2304),
            "layer_types": layer_types,
            "heads": heads,
            "kv_heads": kv_heads,
            "full_kv_heads": full_kv_heads,
            "head_dim": head_dim,
            "full_head_dim": full_head_dim,
            "intermediate_size": text.integer("intermediate_size", default=9216),
            "double_wide": text.flag("use_double_wide_mlp", False),
            "kv_shared_layers": shared,
            "k_eq_v": k_eq_v,
            "window": text.integer("sliding_window", default=512),
            "context": text.integer("max_position_embeddings", default=131_072),
            "vocab_size": text.integer("vocab_size", default=_VOCABULARY),
            "per_layer_size": per_layer_size,
            "per_layer_vocab_size": _per_layer_rows(text) if per_layer_size else 0,
            "norm_epsilon": text.number("rms_norm_eps", 1e-6),
            "tied": tied and text.flag("tie_word_embeddings", True),
            "logit_softcap": None if text.get("final_logit_softcapping") is None else text.number("final_logit_softcapping", 30.0),
        }
        | _experts(text)
        | _rope(text, layer_types)
    )


def _per_layer_rows(text: CheckedValues) -> int:
    """Rows of the per-layer table. There must be one per token: llama.cpp loads no other table, and in a smaller one tokens lack rows."""
    rows, tokens = (text.integer(key, default=_VOCABULARY) for key in ("vocab_size_per_layer_input", "vocab_size"))
    if rows != tokens:
        raise text.wrong("vocab_size_per_layer_input", f"vocab_size {tokens}: every token needs its row")
    return rows


def _layer_types(text: CheckedValues) -> tuple[str, ...]:
    layers = text.integer("num_hidden_layers", high=MAX_LAYERS, default=30)
    kinds = text.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if (layer + 1) % 6 else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (SLIDING, FULL) for kind in kinds):
        raise text.wrong("layer_types", f"{layers} times {SLIDING} or {FULL}")
    if kinds[-1] != FULL:
        raise text.wrong("layer_types", f"a list that ends in {FULL}")
    return tuple(kinds)


def _full_layers(text: CheckedValues, layer_types: tuple[str, ...], k_eq_v: bool) -> tuple[int, int | None]:
    """Head dimension and K/V heads of full layers, from either config format. None heads means as many as sliding layers have."""
    if text.get("per_layer_config") is None:
        head_dim = text.integer("global_head_dim", default=512)
        named = text.get("num_global_key_value_heads") is not None
        # transformers reads this count only if K and V share a projection.
        return head_dim, text.integer("num_global_key_value_heads") if named and k_eq_v else None
    overrides = text.section("per_layer_config")
    full = {layer for layer, kind in enumerate(layer_types) if kind == FULL}
    # If there are more than nine layers, transformers writes their numbers with leading zeros.
    sections = [overrides.section(key) for key in overrides.values if key.isdecimal() and int(key[:_LAYER_DIGITS]) in full]
    if len(sections) != len(overrides.values):
        raise text.wrong("per_layer_config", f"overrides of the full-attention layers {', '.join(map(str, sorted(full)))}")
    head_dim = text.integer("head_dim", default=_HEAD_DIM)
    if not sections:
        return head_dim, None
    for section in sections:
        if foreign := section.values.keys() - {"head_dim", "num_key_value_heads"}:
            raise text.wrong("per_layer_config", f"overrides of head_dim and num_key_value_heads, without {min(foreign)}")
    head_dim, count = sections[0].integer("head_dim", default=head_dim), sections[0].get("num_key_value_heads")
    if any(section.values != sections[0].values for section in sections) or len(sections) != len(full):
        raise text.wrong("per_layer_config", "the same for all full-attention layers")
    return head_dim, None if count is None else sections[0].integer("num_key_value_heads")


def _experts(text: CheckedValues) -> dict[str, int]:
    if not text.flag("enable_moe_block", False):
        return {"experts": 0, "experts_used": 0, "expert_size": 0}
    experts = text.integer("num_experts")
    used = text.integer("top_k_experts", high=experts)
    # The first published configs had another name for this size.
    size = "moe_intermediate_size" if text.get("moe_intermediate_size") is not None else "expert_intermediate_size"
    return {"experts": experts, "experts_used": used, "expert_size": text.integer(size)}


def _rope(text: CheckedValues, layer_types: tuple[str, ...]) -> dict[str, float]:
    """RoPE bases and the share of rotated pairs, as transformers reads them.

    `partial_rotary_factor` beside `rope_parameters` is used for kinds of layers that have none inside it.
    """
    made = {"full_rope_base": 1e6, "sliding_rope_base": 1e4, "full_rotary_share": 0.25}
    if text.get("rope_parameters") is None:
        return made
    rope = text.section("rope_parameters")
    outer = {} if text.get("partial_rotary_factor") is None else {"partial_rotary_factor": text.get("partial_rotary_factor")}
    for kind, base in ((FULL, "full_rope_base"), (SLIDING, "sliding_rope_base")):
        if kind not in layer_types:
            continue
        part = rope.section(kind)
        part = part.over(outer | {"rope_type": part.get("type") or "default"})
        part.demand("rope_type", "default", *(("proportional",) if kind == FULL else ()))
        part.demand("factor", None, 1, 1.0)
        made[base] = part.number("rope_theta")
        if kind == FULL:  # the default type rotates all pairs and ignores the factor
            made["full_rotary_share"] = share = (
                part.number("partial_rotary_factor", 1.0) if part.get("rope_type") == "proportional" else 1.0
            )
            if share > 1:
                raise part.wrong("partial_rotary_factor", "at most 1")
    return made


def _check_assistant(text: CheckedValues, fields: dict[str, Any]) -> None:
    """Checks the rules of transformers' Gemma4AssistantConfig.validate_architecture."""
    if fields["per_layer_size"] or fields["experts"] or fields["double_wide"]:
        raise CheckpointError(f"{text.path}: an assistant has no per-layer embeddings, experts or double-wide MLP")
    if fields["kv_shared_layers"] not in (0, len(fields["layer_types"])):
        raise text.wrong("num_kv_shared_layers", "the number of layers (an assistant owns no K/V)")


def needed_shapes(model: TextArchitecture) -> Shapes:
    """Returns the names and shapes [out, in] of the required tensors."""
    shapes: Shapes = {EMBEDDING: (model.vocab_size, model.hidden_size), "model.norm.weight": (model.hidden_size,)}
    if not model.tied:
        shapes[HEAD] = (model.vocab_size, model.hidden_size)
    if model.per_layer_size:
        width = model.layers * model.per_layer_size
        shapes["model.embed_tokens_per_layer.weight"] = (model.per_layer_vocab_size, width)
        shapes["model.per_layer_model_projection.weight"] = (width, model.hidden_size)
        shapes["model.per_layer_projection_norm.weight"] = (model.per_layer_size,)
    if isinstance(model, AssistantArchitecture):
        shapes["pre_projection.weight"] = (model.hidden_size, 2 * model.target_hidden_size)
        shapes["post_projection.weight"] = (model.target_hidden_size, model.hidden_size)
        if model.ordered_embeddings:
            shapes[CENTROIDS] = (model.centroids, model.hidden_size)
            shapes[TOKEN_ORDERING] = (model.vocab_size,)
    for layer in range(model.layers):
        inner = _block(model, layer) | (_key_value(model, layer) if layer < model.owning_layers else {})
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inner.items()}
    return shapes


def allowed_shapes(model: TextArchitecture) -> Shapes:
    """Returns the names and shapes of the optional tensors: an untied head, and unused K/V weights of a target's K/V-shared layers."""
    shapes: Shapes = {HEAD: (model.vocab_size, model.hidden_size)}
    for layer in () if isinstance(model, AssistantArchitecture) else range(model.owning_layers, model.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _key_value(model, layer).items()}
    return shapes


def _block(model: TextArchitecture, layer: int) -> Shapes:
    hidden, head_dim, feed_forward = model.hidden_size, model.head_dim_of(layer), model.feed_forward_of(layer)
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (model.heads * head_dim, hidden),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.o_proj.weight": (hidden, model.heads * head_dim),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (feed_forward, hidden),
        "mlp.up_proj.weight": (feed_forward, hidden),
        "mlp.down_proj.weight": (hidden, feed_forward),
        "post_feedforward_layernorm.weight": (hidden,),
        "layer_scalar": (1,),
    }
    if model.per_layer_size:
        shapes["per_layer_input_gate.weight"] = (model.per_layer_size, hidden)
        shapes["per_layer_projection.weight"] = (hidden, model.per_layer_size)
        shapes["post_per_layer_input_norm.weight"] = (hidden,)
    if model.experts:
        shapes["router.proj.weight"] = (model.experts, hidden)
        shapes["router.scale"] = (hidden,)
        shapes["router.per_expert_scale"] = (model.experts,)
        shapes["experts.gate_up_proj"] = (model.experts, 2 * model.expert_size, hidden)
        shapes["experts.down_proj"] = (model.experts, hidden, model.expert_size)
        for norm in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
            shapes[f"{norm}.weight"] = (hidden,)
    return shapes


def _key_value(model: TextArchitecture, layer: int) -> Shapes:
    rows = model.kv_heads_of(layer) * model.head_dim_of(layer)
    shapes: Shapes = {"self_attn.k_proj.weight": (rows, model.hidden_size), "self_attn.k_norm.weight": (model.head_dim_of(layer),)}
    if not (model.k_eq_v and not model.is_sliding(layer)):
        shapes["self_attn.v_proj.weight"] = (rows, model.hidden_size)
    return shapes


def text_name(name: str, *, multimodal: bool) -> str | None:
    """Returns the name that a tensor has in a text-only checkpoint; None if it belongs to another part of a multimodal one."""
    for prefix, short in _PREFIXES.items():
        if name.startswith(prefix):
            return short + name[len(prefix) :]
    return name if not multimodal or name.startswith(_TEXT) else None
