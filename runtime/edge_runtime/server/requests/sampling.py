"""The fields of a request that choose tokens and end the answer."""

from __future__ import annotations

from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.server.requests.fields import Fields
from edge_runtime.text.stream import StopStrings

MAX_STOPS = 16
MAX_BIASES = 1024
_SEEDS = 1 << 64
SAMPLING_FIELDS = frozenset(
    {
        "frequency_penalty",
        "logit_bias",
        "min_p",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "stop",
        "temperature",
        "top_k",
        "top_p",
    }
)


def read_sampling(fields: Fields) -> SamplingParams:
    """Returns the sampling options of a request. Raises ApiError."""
    seed = fields.integer("seed", -(1 << 63), _SEEDS - 1)
    return SamplingParams(
        temperature=fields.number("temperature", 0, 2, 1),
        top_k=fields.integer("top_k", 0, 1 << 31, 0) or 0,
        top_p=fields.number("top_p", 1e-9, 1, 1),
        min_p=fields.number("min_p", 0, 1, 0),
        repetition_penalty=fields.number("repetition_penalty", 0.1, 10, 1),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0),
        logit_bias=_biases(fields),
        seed=None if seed is None else seed % _SEEDS,
    )


def next_seed(seed: int | None, number: int) -> int | None:
    """Returns the seed of the choice `number` of a request: choices with the same seed would be the same."""
    return None if seed is None else (seed + number) % _SEEDS


def read_stops(fields: Fields) -> tuple[str, ...]:
    """Returns the stop strings. Raises ApiError, or RequestError for empty and overlong ones."""
    stop = fields.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(fields.items("stop", MAX_STOPS))
    if not all(isinstance(one, str) for one in stops):
        raise fields.wrong("stop", "must be a string or a list of strings")
    StopStrings(stops)
    return stops


def _biases(fields: Fields) -> dict[int, float]:
    biases = Fields(fields.object("logit_bias") or {}, "logit_bias")
    names = list(fields.object("logit_bias") or {})
    if len(names) > MAX_BIASES:
        raise fields.wrong("logit_bias", f"has {len(names)} tokens; at most {MAX_BIASES} are allowed")
    for name in names:
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise fields.wrong("logit_bias", f"names {name[:20]!r}; its keys must be token ids")
    return {int(name): biases.number(name, -100, 100, 0) for name in names}
