"""Tensor names: Hugging Face's Gemma 4 names -> the names llama.cpp's `gemma4` and `gemma4-assistant` load.

Source of the facts: llama.cpp, gguf-py/gguf/tensor_mapping.py and src/models/gemma4*.cpp.
"""

from __future__ import annotations

import re

from edge_export.checkpoint.media_architecture import AUDIO, EMBED_AUDIO, EMBED_VISION, EMBEDDER, VISION
from edge_export.gguf.loader import gguf

ROPE_FREQUENCIES = "rope_freqs.weight"
# Names that gguf-py's table lacks, or has without an ending.
_OWN_NAMES = {
    "pre_projection.weight": "nextn.pre_projection.weight",
    "post_projection.weight": "nextn.post_projection.weight",
    "model.layers.0.layer_scalar": "blk.0.layer_output_scale.weight",
    "model.layers.0.router.scale": "blk.0.ffn_gate_inp.scale",
    "model.layers.0.router.per_expert_scale": "blk.0.ffn_down_exps.scale",
    "model.layers.0.experts.gate_up_proj": "blk.0.ffn_gate_up_exps.weight",
    "model.layers.0.experts.down_proj": "blk.0.ffn_down_exps.weight",
}
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, 1)
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
    of_first = name if layer is None else f"model.layers.0.{layer[2]}"
    short: str | None = _OWN_NAMES.get(of_first) or _NAMES.get_name(of_first, try_suffixes=(".weight",))
    return short.replace(".0.", f".{layer[1]}.", 1) if short is not None and layer is not None else short


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
