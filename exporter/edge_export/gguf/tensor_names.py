"""Tensor names: Hugging Face's Gemma 4 names -> the names llama.cpp's `gemma4` and `gemma4-assistant` load.

Source of the facts: llama.cpp, gguf-py/gguf/tensor_mapping.py and src/models/gemma4*.cpp.
"""

from __future__ import annotations

import re

from edge_export.checkpoint.media_architecture import AUDIO, EMBED_AUDIO, EMBED_VISION, EMBEDDER, VISION

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
_TOWER_NAMES = {
    EMBED_VISION: "mm.input_projection.weight",
    EMBED_AUDIO: "mm.a.input_projection.weight",
    f"{VISION}patch_embedder.input_proj.weight": "v.patch_embd.weight",
    f"{VISION}patch_embedder.position_embedding_table": "v.position_embd.weight",
    f"{VISION}std_bias": "v.std_bias",
    f"{VISION}std_scale": "v.std_scale",
    f"{EMBEDDER}patch_dense.weight": "v.patch_embd.weight",
    f"{EMBEDDER}patch_dense.bias": "v.patch_embd.bias",
    f"{EMBEDDER}pos_embedding": "v.position_embd.weight",
    f"{EMBEDDER}patch_ln1.weight": "v.patch_norm.1.weight",
    f"{EMBEDDER}patch_ln1.bias": "v.patch_norm.1.bias",
    f"{EMBEDDER}patch_ln2.weight": "v.patch_norm.2.weight",
    f"{EMBEDDER}patch_ln2.bias": "v.patch_norm.2.bias",
    f"{EMBEDDER}pos_norm.weight": "v.patch_norm.3.weight",
    f"{EMBEDDER}pos_norm.bias": "v.patch_norm.3.bias",
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
_TOWER_LAYER = re.compile(r"model\.(vision|audio)_tower\.(?:encoder\.)?layers\.(0|[1-9][0-9]{0,3})\.(.+)")


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


def encoder_name(name: str) -> str | None:
    """Returns the GGUF name of a tower's tensor; None if it has none."""
    layer = _TOWER_LAYER.fullmatch(name)
    if layer is None:
        return _TOWER_NAMES.get(name)
    inner, _, end = layer[3].rpartition(".")
    if end == "per_dim_scale":
        inner, end = layer[3], "weight"
    known = _VISION_LAYER if layer[1] == "vision" else _AUDIO_LAYER
    short = known.get(inner.removesuffix(".linear"))
    return None if short is None else f"{layer[1][0]}.blk.{layer[2]}.{short}.{end}"
