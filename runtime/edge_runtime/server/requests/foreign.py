"""Fields that other servers of these APIs have and this one has not: those that change no answer are ignored, the others refused by name.

Sources: llama-server's README, vLLM's ChatCompletionRequest and CompletionRequest, Ollama's api.Options, OpenRouter's request body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# How a request is scheduled, cached, drafted or reported: whatever its value, the answer is the same.
_HARMLESS = (
    *("cache_prompt", "cache_salt", "id_slot", "keep_alive", "n_cache_reuse", "n_discard", "n_keep", "post_sampling_probs"),
    *("return_progress", "return_tokens", "sse_ping_interval", "timings_per_token", "verbose"),
    *("speculative.n_max", "speculative.n_min", "speculative.p_min", "speculative.type"),
    *("ec_transfer_params", "kv_transfer_params", "priority", "request_id", "return_token_ids", "session_id", "skip_special_tokens"),
    *("spaces_between_special_tokens", "stream_interval", "truncation_side"),
    *("client_metadata", "provider", "route", "transforms", "usage"),
    *("shift", "truncate"),
    # Settings of samplers that are off, unless the field that switches them on is there too.
    *("adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"),
    *("mirostat_eta", "mirostat_tau", "xtc_threshold"),
)
# Fields that would change the answer, with the values that do not.
_OFF: dict[str, Sequence[Any] | None] = {
    "adaptive_target": (-1,),
    "add_special_tokens": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora": ([],),
    "min_keep": (0, 1),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "n_cmpl": (1,),
    "n_indent": (0,),
    "n_probs": (0,),
    "parse_tool_calls": (True,),
    "penalize_newline": (True,),
    "penalize_nl": (True,),
    "prompt_logprobs": (False,),
    "reasoning_format": ("auto", "deepseek"),
    "response_fields": ([],),
    "return_tokens_as_token_ids": (False,),
    "samplers": ([], ""),
    "stop_token_ids": ([],),
    "t_max_predict_ms": (0, -1),
    "tfs_z": (1,),
    "thinking_budget_tokens": (-1,),
    "thinking_token_budget": (-1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "truncate_prompt_tokens": (-1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "watermarking": (False,),
    "xtc_probability": (0,),
}
# By name, the values that are ignored; None is any.
FOREIGN: dict[str, Sequence[Any] | None] = {**dict.fromkeys(_HARMLESS), **_OFF}
# What Ollama's options say about loading and computing a model, which this server's own options do.
OLLAMA_LOADING: dict[str, Sequence[Any] | None] = dict.fromkeys(
    (
        *("embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_gqa", "num_keep"),
        *("num_thread", "numa", "rope_frequency_base", "rope_frequency_scale", "use_mlock", "use_mmap", "vocab_only"),
    )
)
