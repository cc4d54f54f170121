"""The keys and the tensor names of a Gemma 4 GGUF, as llama.cpp's converter writes them and its models load them."""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import gguf as gguf  # only this module imports gguf; writer.py imports the name from here
import yaml

from edge_devices.errors import errors_as
from edge_export.checkpoint.architecture import AssistantArchitecture, TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.media_architecture import AUDIO, EMBED_AUDIO, EMBED_VISION, EMBEDDER, VISION
from edge_export.checkpoint.safetensors import read_optional_json_object
from edge_export.checkpoint.tokenizer_vocabulary import SCORE, GgufVocabulary
from edge_export.errors import CheckpointError

# Source of the facts: llama.cpp, conversion/base.py (TextModel), conversion/gemma.py (Gemma3Model, Gemma4Model and its children).
# gguf's heuristics use README.md's front matter and the model's name, which are read here, with limits. gguf itself would read the whole
# file and expand every alias, so a small hostile file could use up all memory. Only this module of the exporter imports yaml.

ValueType = Literal["uint32", "float32", "bool", "string", "array"]
Entry = tuple[str, ValueType, Any]
SPECIAL_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}
GENERATION_NAME = "generation_config.json"
_MAX_GENERATION_BYTES = 1 << 20
CARD_NAME = "README.md"
MAX_FRONT_MATTER = 256 << 10
_FENCE = "---"
# Real front matter is nested about eight deep, in its evaluation results.
_MAX_DEPTH = 32
# gguf splits a name into words, which takes time that grows with the square of its length.
_LONGEST_NAME = 4096
# Fields of gguf.Metadata, and the names of the same settings in generation_config.json.
_GENERATION_KEYS = {
    "sampling_sequence": "sequence",
    "sampling_top_k": "top_k",
    "sampling_top_p": "top_p",
    "sampling_min_p": "min_p",
    "sampling_xtc_probability": "xtc_probability",
    "sampling_xtc_threshold": "xtc_threshold",
    "sampling_temp": "temperature",
    "sampling_penalty_last_n": "penalty_last_n",
    "sampling_penalty_repeat": "penalty_repeat",
    "sampling_mirostat": "mirostat",
    "sampling_mirostat_tau": "mirostat_tau",
    "sampling_mirostat_eta": "mirostat_eta",
}


def architecture_name(model: TextArchitecture) -> str:
    """Returns the value of general.architecture."""
    return "gemma4-assistant" if isinstance(model, AssistantArchitecture) else "gemma4"


def architecture_entries(checkpoint: Checkpoint, file_type: int) -> list[Entry]:
    """Returns the keys of the hyperparameters. `file_type` is llama.cpp's llama_ftype. Raises CheckpointError for bad suppress_tokens."""
    model = checkpoint.architecture
    name = architecture_name(model)
    feed_forward = [model.feed_forward_of(layer) for layer in range(model.layers)]
    kv_heads = [model.kv_heads_of(layer) for layer in range(model.layers)]
    sliding = [model.is_sliding(layer) for layer in range(model.layers)]
    entries: list[Entry] = [
        (f"{name}.block_count", "uint32", model.layers),
        (f"{name}.context_length", "uint32", model.context),
        (f"{name}.embedding_length", "uint32", model.hidden_size),
        (f"{name}.feed_forward_length", *_shared_or_array(feed_forward, model.double_wide)),
        (f"{name}.attention.head_count", "uint32", model.heads),
        (f"{name}.attention.head_count_kv", *_shared_or_array(kv_heads, model.full_kv_heads != model.kv_heads)),
        (f"{name}.rope.freq_base", "float32", model.full_rope_base),
        (f"{name}.rope.freq_base_swa", "float32", model.sliding_rope_base),
        (f"{name}.attention.layer_norm_rms_epsilon", "float32", model.norm_epsilon),
    ]
    if model.experts:
        entries += [(f"{name}.expert_count", "uint32", model.experts), (f"{name}.expert_used_count", "uint32", model.experts_used)]
    entries += [
        (f"{name}.attention.key_length", "uint32", model.full_head_dim),
        (f"{name}.attention.value_length", "uint32", model.full_head_dim),
        ("general.file_type", "uint32", file_type),
    ]
    # Without this key, llama.cpp caps a target's logits at 30 (src/llama-hparams.h), but not a drafter's. The value 0 means no cap.
    if model.logit_softcap is not None or not isinstance(model, AssistantArchitecture):
        entries.append((f"{name}.final_logit_softcapping", "float32", model.logit_softcap or 0.0))
    entries += [
        (f"{name}.attention.sliding_window", "uint32", model.window),
        (f"{name}.attention.shared_kv_layers", "uint32", model.kv_shared_layers),
        (f"{name}.embedding_length_per_layer_input", "uint32", model.per_layer_size),
        (f"{name}.attention.sliding_window_pattern", "array", sliding),
        (f"{name}.attention.key_length_swa", "uint32", model.head_dim),
        (f"{name}.attention.value_length_swa", "uint32", model.head_dim),
    ]
    if model.experts:
        entries.append((f"{name}.expert_feed_forward_length", "uint32", model.expert_size))
    entries += [
        (f"{name}.rope.dimension_count", "uint32", model.full_head_dim),
        (f"{name}.rope.dimension_count_swa", "uint32", model.head_dim),
    ]
    return entries + _suppressed(checkpoint) + _drafter_entries(name, model)


def _shared_or_array(per_layer: list[int], differ: bool) -> tuple[ValueType, Any]:
    return ("array", per_layer) if differ else ("uint32", per_layer[0])


def _drafter_entries(name: str, model: TextArchitecture) -> list[Entry]:
    if not isinstance(model, AssistantArchitecture):
        return []
    return [
        (f"{name}.embedding_length_out", "uint32", model.target_hidden_size),
        (f"{name}.nextn_predict_layers", "uint32", model.layers),
    ]


def read_generation(folder: Path) -> dict[str, Any]:
    """Returns generation_config.json; empty if there is none. Raises CheckpointError if it is damaged or too large."""
    return read_optional_json_object(folder / GENERATION_NAME, _MAX_GENERATION_BYTES)


def _suppressed(checkpoint: Checkpoint) -> list[Entry]:
    """Returns the key of token ids that are never sampled. llama.cpp's converter writes it only for unified targets."""
    if checkpoint.model_type not in ("gemma4_unified", "gemma4_unified_text"):
        return []
    tokens = read_generation(checkpoint.folder).get("suppress_tokens") or []
    size = checkpoint.architecture.vocab_size
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < size for token in tokens):
        raise CheckpointError(f"{checkpoint.folder / GENERATION_NAME}: suppress_tokens is {tokens!r}, not a list of token ids; correct it")
    return [("tokenizer.ggml.suppress_tokens", "array", tokens)]


def vocabulary_entries(vocabulary: GgufVocabulary) -> list[Entry]:
    """Returns the tokenizer.* keys. add_bos_token is always true, as in Gemma4Model.set_vocab."""
    prefix = "tokenizer.ggml."
    entries: list[Entry] = [
        (f"{prefix}model", "string", "gemma4"),
        (f"{prefix}tokens", "array", vocabulary.pieces),
        (f"{prefix}scores", "array", [SCORE] * len(vocabulary.pieces)),
        (f"{prefix}token_type", "array", vocabulary.types),
        (f"{prefix}merges", "array", vocabulary.merges),
    ]
    entries += [(prefix + SPECIAL_KEYS[kind], "uint32", index) for kind, index in vocabulary.special_ids.items()]
    ends = vocabulary.added_at_ends
    entries += [(f"{prefix}add_{kind}_token", "bool", flag or kind == "bos") for kind, flag in ends.items()]
    if vocabulary.chat_template is not None:
        entries.append(("tokenizer.chat_template", "string", vocabulary.chat_template))
    entries.append((f"{prefix}add_space_prefix", "bool", False))
    if "bos" not in ends:
        entries.append((f"{prefix}add_bos_token", "bool", True))
    return entries


def add_general(writer: Any, folder: Path, config: dict[str, Any], kind: str = gguf.GGUFType.MODEL) -> None:
    """Adds the general.* keys as llama.cpp's converter writes them. `config` is the parsed config.json.

    Raises CheckpointError for a file beyond the limits. Values that do not fit their key are found only when the header is written (see
    `unfit_values`).
    """
    total, shared, expert, experts = writer.get_total_parameter_count()
    named = {"_name_or_path": name_or_path(config, folder)}
    metadata = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), read_card(folder), named, folder, total)
    generation = read_generation(folder)
    for field, key in _GENERATION_KEYS.items():
        setattr(metadata, field, generation.get(key))
    if metadata.sampling_penalty_repeat is None:
        # llama.cpp's own copy of gguf reads this spelling too; gguf 0.19 does not.
        metadata.sampling_penalty_repeat = generation.get("repetition_penalty")
    metadata.name = metadata.name if metadata.name is not None else folder.name
    if metadata.size_label is None and total > 0:
        metadata.size_label = gguf.size_label(total, shared, expert, experts)
    writer.add_type(kind)
    metadata.set_gguf_meta_model(writer)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml publishes no types
    """A SafeLoader that rejects deep nesting, and aliases, by which a small file can expand to a huge one."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 2}: aliases (*) are not allowed")
        if self.depth == _MAX_DEPTH:
            raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 2}: nested more than {_MAX_DEPTH} deep")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


@contextlib.contextmanager
def unfit_values(folder: Path) -> Iterator[None]:
    """Turns the errors that gguf raises for unfit values into a CheckpointError. gguf's heuristics do not check values themselves."""
    try:
        yield
    except (struct.error, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        where = f"{folder}: {CARD_NAME}, {GENERATION_NAME}, config.json or the tokenizer"
        raise CheckpointError(f"{where} holds a value that no GGUF key can ({str(error)[:200]}); correct it") from error


def read_card(folder: Path) -> dict[str, Any]:
    """Returns the front matter of README.md, parsed as in gguf; empty if there is none. Raises CheckpointError."""
    path = folder / CARD_NAME
    if not path.is_file():
        return {}
    # gguf makes the same two changes: `no` is a language (Norwegian) and not false, and tabs become spaces.
    text = _front_matter(path).replace("- no\n", '- "no"\n').replace("\t", "  ")
    try:
        data = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, LookupError, ArithmeticError, AttributeError, TypeError) as error:
        # Other errors than YAMLError come from numbers of thousands of digits, impossible dates, and tags that do not fit their value.
        raise CheckpointError(f"{path} has front matter that cannot be read ({' '.join(str(error).split())[:200]}); correct it") from error
    return data if isinstance(data, dict) else {}


def _front_matter(path: Path) -> str:
    """Returns the lines between the first two fences. Reads at most MAX_FRONT_MATTER characters."""
    try:
        with errors_as(CheckpointError, f"{path} cannot be read", "check the checkpoint"), path.open(encoding="utf-8") as file:
            text = file.read(MAX_FRONT_MATTER)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from error
    lines = text.splitlines()
    if not lines or lines[0] != _FENCE:
        return ""
    if _FENCE in lines[1:]:
        lines = lines[: lines.index(_FENCE, 1)]
    elif len(text) == MAX_FRONT_MATTER:
        raise CheckpointError(f"{path} has more than {MAX_FRONT_MATTER} characters of front matter; shorten it")
    return "\n".join(lines[1:]) + "\n"


def name_or_path(config: dict[str, Any], folder: Path) -> Any:
    """Returns `_name_or_path` of config.json; None if it is missing. Raises CheckpointError if it is not a name."""
    name = config.get("_name_or_path")
    if name is not None and not (isinstance(name, str) and len(name) <= _LONGEST_NAME):
        raise CheckpointError(f"{folder / 'config.json'}: _name_or_path is not a name of at most {_LONGEST_NAME} characters; correct it")
    return name


# Tensor names: from Hugging Face's names for Gemma 4 to those that llama.cpp's `gemma4` and `gemma4-assistant` load.
#
# Source of the facts: llama.cpp, gguf-py/gguf/tensor_mapping.py and src/models/gemma4*.cpp.

ROPE_FREQUENCIES = "rope_freqs.weight"
# Names that gguf-py's table lacks, or has without their ending.
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
    # llama.cpp's converter exchanges these two names, and its reader expects that.
    "lconv1d.pre_layer_norm": "conv_norm",
    "lconv1d.conv_norm": "norm_conv",
    "lconv1d.linear_start": "conv_pw1",
    "lconv1d.depthwise_conv1d": "conv_dw",
    "lconv1d.linear_end": "conv_pw2",
    "norm_out": "ln2",
}
_TOWER_LAYER = re.compile(r"model\.(vision|audio)_tower\.(?:encoder\.)?layers\.(0|[1-9][0-9]{0,3})\.(.+)")


def gguf_name(name: str) -> str | None:
    """Returns the GGUF name of a text tensor, such as blk.3.ffn_up.weight for model.layers.3.mlp.up_proj.weight; None if it has none."""
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
