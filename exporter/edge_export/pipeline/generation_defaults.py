"""What a target's generation_config.json, or the keys that a GGUF has of it, say about generation, for the manifest."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

from edge_export.checkpoint.sources import ResolvedSource
from edge_export.errors import CheckpointError
from edge_export.gguf.keys import GENERATION_NAME, read_generation
from edge_runtime.bundle.manifest import GenerationDefaults

# Our names and those of generation_config.json -> the keys that llama.cpp's converter writes for them.
_NUMBERS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_TOP_K, _SUPPRESSED = "general.sampling.top_k", "tokenizer.ggml.suppress_tokens"
# (least, most): SamplingParams refuses others.
_RANGES = {"temperature": (0.0, 100.0), "top_p": (1e-9, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (1e-6, 1e6)}


def generation_defaults(target: ResolvedSource) -> GenerationDefaults | None:
    """Returns what the target says; None for nothing. Raises CheckpointError for values that cannot be."""
    size = target.checkpoint.architecture.vocab_size
    if target.gguf is None:
        path, values = target.path / GENERATION_NAME, dict(read_generation(target.path))
        if values.get("do_sample") is not True:
            values = {key: value for key, value in values.items() if key not in (*_NUMBERS, "top_k")}
            values |= {"temperature": 0.0} if "do_sample" in values else {}
    else:
        path, keys = target.path, target.gguf.keys
        values = {name: keys.get(key) for name, key in _NUMBERS.items()}
        # Greedy decoding is not written there; a temperature is written only where it is set.
        values |= {"top_k": keys.get(_TOP_K), "suppress_tokens": keys.get(_SUPPRESSED)}
    defaults = GenerationDefaults(
        **{name: _number(values, name, path) for name in _NUMBERS},
        top_k=_top_k(values, path),
        end_tokens=_tokens(values, "eos_token_id", size, path),
        suppress_tokens=_tokens(values, "suppress_tokens", size, path),
    )
    plain = (defaults.temperature, defaults.top_k, defaults.suppress_tokens) == (None, None, ()) and len(defaults.end_tokens) <= 1
    return None if plain else defaults


def _number(values: dict[str, Any], name: str, path: Path) -> float | None:
    value = values.get(name)
    if value is None:
        return None
    minimum, maximum = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or not minimum <= value <= maximum:
        raise _wrong(path, name, value, f"a number from {minimum:g} to {maximum:g}")
    return float(value)


def _top_k(values: dict[str, Any], path: Path) -> int | None:
    value = values.get("top_k")
    if value is not None and (type(value) is not int or not 0 <= value < 1 << 31):
        raise _wrong(path, "top_k", value, "a number of tokens")
    return value


def _tokens(values: dict[str, Any], name: str, size: int, path: Path) -> tuple[int, ...]:
    value = values.get(name)
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < size for token in tokens):
        raise _wrong(path, name, value, f"ids of tokens below {size}")
    return tuple(dict.fromkeys(tokens))


def _wrong(path: Path, name: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{path}: {name} is {str(value)[:60]!r}, not {expected}; correct it")
