"""How a request's tokens are drawn, and where its answer ends, by the names of OpenAI, llama-server and vLLM.

Values that mean "none" to clients mean it here, as in llama-server, vLLM and Ollama: a limit of -1 or -2 tokens, seed -1, top_k -1 and 0,
empty stop strings, a penalty of 0 or over the last 0 tokens. top_p 0 leaves the likeliest token alone, as in llama-server and Ollama.
"""

from __future__ import annotations

from edge_runtime.config.schema import MAX_CONTEXT
from edge_runtime.decoding.sampling import BUNDLE_NAMES, PENALTY_WINDOW, SamplingParams
from edge_runtime.server.requests.fields import Fields
from edge_runtime.text.channels import StopStrings

MAX_STOPS = 16
MAX_BIASES = 1024
SEEDS = 1 << 64
NO_END = 1 << 31
# No seed: -1, and what it is as llama-server's unsigned number, which its /props states.
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
    """Returns the sampling, and which of its values that a bundle may have the request names. Raises ApiError."""
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
    """Returns the most tokens of an answer, from the first of these fields that is there; None is no limit. Raises ApiError."""
    name = next((name for name in names if name in fields), names[0])
    limit = fields.integer(name, min(_NO_LIMIT), NO_END, default)
    if limit == 0:
        raise fields.wrong(name, "is 0; it must be 1 or more, or -1 for no limit")
    return None if limit in _NO_LIMIT else limit


def read_minimum(fields: Fields, limit: int | None) -> int:
    """Returns before how many tokens no end token may come; with `ignore_eos` none ever does. Raises ApiError."""
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
