"""Fields of a request's JSON: typed access, the fields of other servers, and the fields about sampling."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edge_runtime.config.schema import MAX_CONTEXT
from edge_runtime.decoding.sampling import BUNDLE_NAMES, PENALTY_WINDOW, SamplingParams
from edge_runtime.server.errors import ApiError, invalid
from edge_runtime.text.channels import StopStrings

_NAMES = {bool: "true or false", int: "an integer", str: "a string", list: "a list", dict: "an object"}


class Fields:
    """A JSON object at the path `where` of a request. A null field counts as absent. All readers raise ApiError (400).

    `remarks` are sentences for the operator about fields that the server ignores. Inner objects add to the same list.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "", remarks: list[str] | None = None) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._where = where
        self.remarks = [] if remarks is None else remarks

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def place(self, name: str) -> str:
        """Returns the path of a field from the top of the request."""
        return f"{self._where}.{name}" if self._where else name

    def only(self, known: Collection[str], foreign: Mapping[str, Sequence[Any] | None] | None = None) -> None:
        """Refuses fields whose name is not `known`; the error suggests the most similar known name.

        A `foreign` field is ignored, with a remark, if its value is among the given ones (None: any), and refused otherwise.
        """
        for name, value in self._values.items():
            if name in known:
                continue
            if foreign is None or name not in foreign:
                near = difflib.get_close_matches(name[:64], known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "leave it out"
                raise invalid(f"{self.place(name[:64])!r} is not supported; {hint}", self.place(name[:64]), code="unknown_parameter")
            harmless = foreign[name]
            if harmless is not None and not _among(value, harmless):
                reason = f"is {_shown(value)}, which would change the answer and is not supported; leave it out"
                raise self.wrong(name, reason, code="unsupported_parameter")
            self.remarks.append(f"the field {self.place(name)!r} is ignored; it changes no answer of this server")

    def refuse(self, name: str, *harmless: object, why: str = "leave it out") -> None:
        """Refuses a known field that is not supported, unless its value is one of the `harmless` ones, which change nothing."""
        if name in self._values and not _among(self._values[name], harmless):
            raise self.wrong(name, f"is not supported; {why}", code="unsupported_parameter")

    def text(self, name: str, default: str | None = None) -> str | None:
        value: str | None = self._typed(name, str, default)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value: bool = self._typed(name, bool, default)
        return value

    def integer(self, name: str, lowest: int, highest: int, default: int | None = None) -> int | None:
        """Returns an integer from `lowest` to `highest`."""
        value: int | None = self._typed(name, int, default)
        if value is not None and name in self._values and not lowest <= value <= highest:
            raise self.wrong(name, f"is {_shown(value)}; it must be {lowest} to {highest}")
        return value

    def number(self, name: str, lowest: float, highest: float, default: float) -> float:
        """Returns a number from `lowest` to `highest`."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, f"is {_shown(value)}; it must be a number")
        if not lowest <= value <= highest:
            raise self.wrong(name, f"is {_shown(value)}; it must be {lowest:g} to {highest:g}")
        return float(value)

    def items(self, name: str, limit: int) -> Sequence[Any]:
        """Returns a list of at most `limit` items; empty if absent."""
        value: list[Any] = self._typed(name, list, [])
        if len(value) > limit:
            raise self.wrong(name, f"has {len(value)} items; at most {limit} are allowed")
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value: dict[str, Any] | None = self._typed(name, dict, None)
        return value

    def inner(self, name: str) -> Fields:
        """Returns the fields of an object; an empty object if absent."""
        return Fields(self.object(name) or {}, self.place(name), self.remarks)

    def objects(self, name: str, limit: int) -> list[Fields]:
        """Returns the fields of each object in a list of at most `limit` objects."""
        return [self._inner_of(item, f"{name}[{i}]") for i, item in enumerate(self.items(name, limit))]

    def parts(self, name: str, limit: int) -> list[str | Fields]:
        """Returns the items of a list of at most `limit` texts and objects, these as their fields."""
        items = enumerate(self.items(name, limit))
        return [item if isinstance(item, str) else self._inner_of(item, f"{name}[{i}]") for i, item in items]

    def choice(self, name: str, allowed: Collection[str], default: str = "", *, code: str | None = None) -> str:
        """Returns one of the allowed strings."""
        value = self.text(name, default)
        if value not in allowed:
            raise self.wrong(name, f"is {str(self.get(name))[:40]!r}; it must be one of {', '.join(allowed)}", code=code)
        return str(value)

    def get(self, name: str) -> Any:
        """Returns a value of any type; None if absent."""
        return self._values.get(name)

    def wrong(self, name: str, message: str, *, code: str | None = None) -> ApiError:
        """Returns the error about a field, for the caller to raise."""
        return invalid(f"{self.place(name)} {message}", self.place(name), code=code)

    def _inner_of(self, value: Any, name: str) -> Fields:
        if not isinstance(value, dict):
            raise self.wrong(name, f"is {_shown(value)}; it must be an object")
        return Fields(value, self.place(name), self.remarks)

    def _typed(self, name: str, kind: type, default: Any) -> Any:
        value = self._values.get(name, default)
        if name in self._values and type(value) is not kind:
            raise self.wrong(name, f"is {_shown(value)}; it must be {_NAMES[kind]}")
        return value


def _among(value: object, values: Sequence[object]) -> bool:
    """Whether a JSON value is one of `values`. Unlike in Python, true and false do not equal 1 and 0."""
    return any(isinstance(value, bool) == isinstance(other, bool) and value == other for other in values)


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a number of more than 40 digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


# Fields that only other servers of these APIs have. Those that change no answer are ignored; the others are refused by name.
#
# Sources: llama-server's README, vLLM's ChatCompletionRequest and CompletionRequest, Ollama's api.Options, OpenRouter's request body.

# Fields about how a request is scheduled, cached, drafted or reported. The answer is the same, whatever their values.
_HARMLESS = (
    *("cache_prompt", "cache_salt", "id_slot", "keep_alive", "n_cache_reuse", "n_discard", "n_keep", "post_sampling_probs"),
    *("return_progress", "return_tokens", "sse_ping_interval", "timings_per_token", "verbose"),
    *("speculative.n_max", "speculative.n_min", "speculative.p_min", "speculative.type"),
    *("ec_transfer_params", "kv_transfer_params", "priority", "request_id", "return_token_ids", "session_id", "skip_special_tokens"),
    *("spaces_between_special_tokens", "stream_interval", "truncation_side"),
    *("client_metadata", "provider", "route", "transforms", "usage"),
    *("shift", "truncate"),
    # Settings of samplers that are off unless another field switches them on.
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
# For each name, the values that are ignored; None means any.
FOREIGN: dict[str, Sequence[Any] | None] = {**dict.fromkeys(_HARMLESS), **_OFF}
# Ollama's options about loading and running a model. Here the server's own options decide about that.
OLLAMA_LOADING: dict[str, Sequence[Any] | None] = dict.fromkeys(
    (
        *("embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_gqa", "num_keep"),
        *("num_thread", "numa", "rope_frequency_base", "rope_frequency_scale", "use_mlock", "use_mmap", "vocab_only"),
    )
)


# Some values mean "none", as in llama-server, vLLM and Ollama: a limit of -1 or -2 tokens, seed -1, top_k -1 and 0, empty stop strings,
# and a penalty of 0 or over the last 0 tokens. top_p 0 leaves only the likeliest token, as in llama-server and Ollama.

MAX_STOPS = 16
MAX_BIASES = 1024
SEEDS = 1 << 64
NO_END = 1 << 31
# Values that mean no seed: -1, and -1 as an unsigned 32-bit number, which llama-server's /props states.
_NO_SEED = (-1, (1 << 32) - 1)
_NO_LIMIT = (-1, -2)
SAMPLING_FIELDS = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repeat_last_n",
        "repeat_penalty",
        "repetition_penalty",
        "seed",
        "stop",
        "temperature",
        "top_k",
        "top_p",
    }
)


def read_sampling(fields: Fields) -> tuple[SamplingParams, frozenset[str]]:
    """Returns the sampling, and the names of those of its values that the request gives and a bundle may give too. Raises ApiError."""
    penalty = "repetition_penalty" if "repetition_penalty" in fields else "repeat_penalty"
    repetition = fields.number(penalty, 0, 10, 1) or 1.0
    frequency, presence = fields.number("frequency_penalty", -2, 2, 0), fields.number("presence_penalty", -2, 2, 0)
    window = fields.integer("repeat_last_n", -1, MAX_CONTEXT, PENALTY_WINDOW)
    if window == 0:
        repetition, frequency, presence = 1.0, 0.0, 0.0
    seed = fields.integer("seed", -(1 << 63), SEEDS - 1)
    sampling = SamplingParams(
        temperature=fields.number("temperature", 0, 2, 1),
        top_k=fields.integer("top_k", -NO_END, NO_END, 0) or 0,
        top_p=fields.number("top_p", 0, 1, 1),
        min_p=fields.number("min_p", 0, 1, 0),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        penalty_window=window if window is not None and window > 0 else MAX_CONTEXT,
        logit_bias=_biases(fields),
        seed=None if seed is None or seed in _NO_SEED else seed % SEEDS,
    )
    named = {name for name in BUNDLE_NAMES if name in fields}
    if penalty in fields or window == 0:
        named.add("repetition_penalty")
    return sampling, frozenset(named)


def read_limit(fields: Fields, *names: str, default: int | None = None) -> int | None:
    """Returns the most tokens of an answer, from the first of the fields `names` that is present; None is no limit. Raises ApiError."""
    name = next((name for name in names if name in fields), names[0])
    limit = fields.integer(name, min(_NO_LIMIT), NO_END, default)
    if limit == 0:
        raise fields.wrong(name, "is 0; it must be 1 or more, or -1 for no limit")
    return None if limit in _NO_LIMIT else limit


def read_minimum(fields: Fields, limit: int | None) -> int:
    """Returns the least number of tokens before an end token; with `ignore_eos` it is never reached. Raises ApiError."""
    minimum = fields.integer("min_tokens", 0, NO_END, 0) or 0
    if limit is not None and minimum > limit:
        raise fields.wrong("min_tokens", f"is {minimum}, more than the limit of {limit} tokens; lower it, or raise the limit")
    return NO_END if fields.flag("ignore_eos") else minimum


def read_stops(fields: Fields) -> tuple[str, ...]:
    """Returns the stop strings. Raises ApiError, or RequestError for overlong ones."""
    stop = fields.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(fields.items("stop", MAX_STOPS))
    if not all(isinstance(text, str) for text in stops):
        raise fields.wrong("stop", "must be a string or a list of strings")
    stops = tuple(filter(None, stops))
    StopStrings(stops)
    return stops


def _biases(fields: Fields) -> dict[int, float]:
    if fields.get("logit_bias") == []:  # llama-server's default
        return {}
    biases = fields.inner("logit_bias")
    names = list(fields.object("logit_bias") or {})
    if len(names) > MAX_BIASES:
        raise fields.wrong("logit_bias", f"has {len(names)} tokens; at most {MAX_BIASES} are allowed")
    for name in names:
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise fields.wrong("logit_bias", f"names {name[:20]!r}; its keys must be token ids")
    return {int(name): biases.number(name, -100, 100, 0) for name in names}
