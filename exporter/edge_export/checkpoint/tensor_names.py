"""The tensors of a Gemma 4 text model: their shapes, as transformers' modeling_gemma4.py builds them, and the prefixes of their names."""

from __future__ import annotations

from edge_export.checkpoint.architecture import AssistantArchitecture, TextArchitecture

Shapes = dict[str, tuple[int, ...]]
SPARSE_HEAD = "masked_embedding"
CENTROIDS = f"{SPARSE_HEAD}.centroids.weight"
TOKEN_ORDERING = f"{SPARSE_HEAD}.token_ordering"
# In this order: longer ones first. Old spellings of transformers, Unsloth and MLX; the last one is Google's.
_PREFIXES = {
    "model.language_model.model.": "model.",
    "model.language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
    "model.language_model.": "model.",
}
# The text model's own tensors; other tensors of a multimodal checkpoint belong to its towers.
_TEXT = ("model.layers.", "model.embed_tokens", "model.norm.", "model.per_layer_", "lm_head.")


def needed_shapes(model: TextArchitecture) -> Shapes:
    """Names and shapes [out, in] of the required tensors."""
    shapes: Shapes = {"model.embed_tokens.weight": (model.vocab_size, model.hidden_size), "model.norm.weight": (model.hidden_size,)}
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab_size, model.hidden_size)
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
    """Names and shapes of the optional tensors: a copy of the tied head, and K/V weights of layers that share them."""
    if isinstance(model, AssistantArchitecture):
        return {}
    shapes: Shapes = {"lm_head.weight": (model.vocab_size, model.hidden_size)}
    for layer in range(model.owning_layers, model.layers):
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
    """Returns a tensor's name in a text-only checkpoint; None if it belongs to another part of a multimodal one."""
    for prefix, short in _PREFIXES.items():
        if name.startswith(prefix):
            return short + name[len(prefix) :]
    return name if not multimodal or name.startswith(_TEXT) else None
