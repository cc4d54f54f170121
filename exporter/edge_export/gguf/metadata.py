"""The keys of a Gemma 4 GGUF below the architecture's name, in the order and with the types llama.cpp's converter writes them.

Source of the facts: llama.cpp, conversion/base.py (TextModel), conversion/gemma.py (Gemma3Model, Gemma4Model and its children).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from edge_export.checkpoint.architecture import AssistantArchitecture, TextArchitecture
from edge_export.checkpoint.checkpoint import Checkpoint
from edge_export.checkpoint.json_file import read_optional_json_object
from edge_export.checkpoint.tokenizer_vocabulary import SCORE, GgufVocabulary
from edge_export.errors import CheckpointError

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


def architecture_name(model: TextArchitecture) -> str:
    """The value of general.architecture."""
    return "gemma4-assistant" if isinstance(model, AssistantArchitecture) else "gemma4"


def architecture_entries(checkpoint: Checkpoint, file_type: int) -> list[Entry]:
    """Hyperparameters; `file_type` is llama.cpp's llama_ftype. Raises CheckpointError for unusable suppress_tokens."""
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
    if model.logit_softcap is not None:
        entries.append((f"{name}.final_logit_softcapping", "float32", model.logit_softcap))
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
    """Token ids that are never sampled; the converter writes them for unified targets only."""
    if checkpoint.model_type not in ("gemma4_unified", "gemma4_unified_text"):
        return []
    tokens = read_generation(checkpoint.folder).get("suppress_tokens") or []
    size = checkpoint.architecture.vocab_size
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < size for token in tokens):
        raise CheckpointError(f"{checkpoint.folder / GENERATION_NAME}: suppress_tokens is {tokens!r}, not a list of token ids; correct it")
    return [("tokenizer.ggml.suppress_tokens", "array", tokens)]


def vocabulary_entries(vocabulary: GgufVocabulary) -> list[Entry]:
    """The tokenizer.* keys. add_bos_token is always true, as in Gemma4Model.set_vocab."""
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
