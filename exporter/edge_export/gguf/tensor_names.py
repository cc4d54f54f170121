"""Tensor names: Hugging Face's Gemma 4 names -> the names llama.cpp's `gemma4` and `gemma4-assistant` load.

Source of the facts: llama.cpp, gguf-py/gguf/tensor_mapping.py and src/models/gemma4*.cpp.
"""

from __future__ import annotations

import re

ROPE_FREQUENCIES = "rope_freqs.weight"
MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
}
_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,3})\.(.+)")


def gguf_name(name: str) -> str | None:
    """Returns the GGUF name of a text tensor, e.g. model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight; None if it has none."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return MODEL_NAMES.get(name)
    inner = LAYER_NAMES.get(layer[2])
    return None if inner is None else f"blk.{layer[1]}.{inner}"


def stays_float32(name: str, dimensions: int) -> bool:
    """Whether the tensor with this GGUF name is float32 in every file: vectors, norms, scales and the router (conversion/base.py)."""
    return dimensions <= 1 or name.endswith(("_norm.weight", ".ffn_gate_inp.weight")) or not name.endswith(".weight")
