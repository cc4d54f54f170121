"""Sampling options, and the distribution of the next token that follows from a row of logits.

The steps are in llama.cpp's order: logit bias, penalties, top-k, top-p, min-p, temperature (common/common.h,
common_params_sampling.samplers; the bias comes first in common/sampling.cpp). transformers (generation/utils.py) applies the temperature
before top-k. That is the same at temperature 1; at others, top-p and min-p here keep the tokens that they would keep at temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_devices.option_fields import option
from edge_runtime.bundle.manifest import GenerationDefaults
from edge_runtime.decoding.shared_noise import Distribution, PlaceNoise, Tokens, Weights
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Logits

PENALTY_WINDOW = 64
# Far above any logit, but far below the float32 limit, so that no sum overflows.
MAX_PENALTY = 1e6

# Logits per block in the search for the greatest ones.
_BLOCK = 256
# Sums of the same numbers in different orders differ by less than this share.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn; the defaults draw from the model's own distribution. Raises RequestError for a value out of range.

    - `temperature`: 0 is greedy.
    - `top_k`: keeps the k likeliest tokens; 0 or a negative number keeps all, as in llama.cpp.
    - `top_p`: keeps the smallest set of the likeliest tokens that has this probability; 1 keeps all, 0 only the likeliest token.
    - `min_p`: keeps tokens with at least this fraction of the likeliest token's probability; 0 keeps all.
    - Penalties apply to the last `penalty_window` tokens of prompt and output. `repetition_penalty` divides positive logits and multiplies
      others (1: off). `frequency_penalty` is subtracted once per occurrence, `presence_penalty` once per token.
    - `logit_bias`: added to the logits of its token ids; -inf bans a token.
    - `seed`: fixes the text, with drafts and without. None, or -1 as in llama.cpp, draws differently each time.
    """

    temperature: float = option(
        "-T",
        default=1.0,
        show_default="the bundle's, else 0",
        help="Sampling temperature; 0 is greedy, 1 the model's own distribution.",
    )
    top_k: int = option(default=0, show_default="the bundle's, else 0", help="Sample from the K most likely tokens; 0 is all.")
    top_p: float = option(
        default=1.0,
        show_default="the bundle's, else 1",
        help="Sample from the most likely tokens whose probabilities add up to this.",
    )
    min_p: float = option(default=0.0, help="Sample from tokens with at least this fraction of the highest probability.")
    repetition_penalty: float = option(default=1.0, help="Divide positive logits of recent tokens by this; multiply negative ones.")
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_window: int = PENALTY_WINDOW
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = option(
        help="Random seed: the same seed gives the same text, with drafts and without; -1 is none.  [default: random]"
    )

    def __post_init__(self) -> None:
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if type(self.top_k) is int and self.top_k < 0:
            object.__setattr__(self, "top_k", 0)
        _require(_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or more")
        _require(_whole(self.top_k), "top_k", self.top_k, "a whole number, 0 to keep all tokens")
        _require(_number(self.top_p) and 0 <= self.top_p <= 1, "top_p", self.top_p, "0 to 1, 1 to keep all tokens")
        _require(_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "0 to 1, 0 to keep all tokens")
        penalty = self.repetition_penalty
        _require(
            _number(penalty) and 1 / MAX_PENALTY <= penalty <= MAX_PENALTY,
            "repetition_penalty",
            penalty,
            f"{1 / MAX_PENALTY:g} to {MAX_PENALTY:g}, 1 for none",
        )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(_number(value) and abs(value) <= MAX_PENALTY, name, value, f"{-MAX_PENALTY:g} to {MAX_PENALTY:g}, 0 for none")
        _require(_whole(self.penalty_window, minimum=1), "penalty_window", self.penalty_window, "a whole number of tokens, at least 1")
        _require(self.seed is None or _whole(self.seed), "seed", self.seed, "a whole number, at least 0, or None or -1 for none")
        self._check_bias()

    def _check_bias(self) -> None:
        for token, bias in self.logit_bias.items():
            _require(_whole(token), "logit_bias", token, "keyed by token ids, at least 0")
            fits = bias == -math.inf or (_number(bias) and abs(bias) <= MAX_PENALTY)
            _require(fits, f"logit_bias[{token}]", bias, f"{-MAX_PENALTY:g} to {MAX_PENALTY:g}, or -inf to ban the token")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller's own mapping may change later

    def to_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys. A ban is the text "-inf", since JSON has no such number."""
        biases = {str(token): bias if math.isfinite(bias) else str(bias) for token, bias in self.logit_bias.items()}
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"logit_bias": biases}

    @property
    def penalises(self) -> bool:
        """Whether a distribution depends on earlier tokens."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)


class NothingToDraw(RequestError):
    """Every token is banned, or the logits are not finite."""


class Sampler:
    """Applies `SamplingParams` to logits. `window` is the number of recent tokens that it needs, 0 for none.

    Rows are float32 [n]: logits of the whole vocabulary, or only of the n distinct `tokens` [n] that a sparse drafter scores.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._biased = np.array(sorted(params.logit_bias), dtype=np.int64)
        self._bias = np.array([params.logit_bias[token] for token in sorted(params.logit_bias)], dtype=np.float32)
        self.window = params.penalty_window if params.penalises else 0

    @property
    def adjusts(self) -> bool:
        """Whether a bias or a penalty can change the likeliest token."""
        return bool(self.window or len(self._biased))

    def __call__(self, logits: Logits, recent: Sequence[int] = (), tokens: NDArray[np.integer] | None = None) -> Distribution:
        """Returns the distribution after the `recent` tokens. Raises NothingToDraw if every token is banned, or for a row with NaN."""
        ids, row, best = self._ranked(logits, recent, tokens)
        if self._params.temperature == 0:
            return Distribution.certain(best if ids is None else int(ids[best]))
        return Distribution.proportional(*self._weighted(ids, row, best))

    def choose(self, logits: Logits, recent: Sequence[int], noise: PlaceNoise, tokens: NDArray[np.integer] | None = None) -> int:
        """Returns the token that this position's noise chooses from the distribution. Raises NothingToDraw as `__call__` does."""
        ids, row, best = self._ranked(logits, recent, tokens)
        if self._params.temperature == 0:
            return best if ids is None else int(ids[best])
        if ids is None and not self._filters:
            return noise.choose_of_all(row, self._params.temperature)
        return noise.choose(*self._weighted(ids, row, best))

    def _ranked(self, logits: Logits, recent: Sequence[int], tokens: NDArray[np.integer] | None) -> tuple[Tokens | None, Logits, int]:
        """Returns ascending token ids (None: all), their logits after bias and penalties, and the index of the largest, which is finite."""
        ids, row = self._adjusted(logits, recent, tokens)
        best = int(row.argmax())
        if not math.isfinite(row[best]):
            raise NothingToDraw(
                f"no token can be drawn: the largest logit is {row[best]}; allow more tokens in logit_bias, or check the model"
            )
        return ids, row, best

    @property
    def _filters(self) -> bool:
        return (self._params.top_k, self._params.top_p, self._params.min_p) != (0, 1, 0)

    def _weighted(self, ids: Tokens | None, row: Logits, best: int) -> tuple[Tokens, Weights]:
        """Returns the tokens that the filters keep, ascending, and their weights; the likeliest token has weight 1."""
        kept = self._kept(row, float(row[best]))
        weights = (row if kept.size == row.size else row[kept]).astype(np.float64)
        weights -= row[best]
        with np.errstate(over="ignore"):  # dividing by a tiny temperature may give -inf, which exp accepts
            weights /= self._params.temperature
        np.exp(weights, out=weights)
        return kept if ids is None else ids[kept], weights

    def _adjusted(self, logits: Logits, recent: Sequence[int], tokens: NDArray[np.integer] | None) -> tuple[Tokens | None, Logits]:
        """Returns ascending token ids (None: all) and their logits after bias and penalties; a copy only if something changes."""
        ids: Tokens | None = None
        if tokens is not None:
            order = np.argsort(tokens)
            ids, logits = tokens[order].astype(np.int64), logits[order]
        if not self.adjusts:
            return ids, logits
        row = logits.copy()
        places, present = _places(ids, self._biased)
        row[places] += self._bias[present]
        if self.window:
            self._penalise(row, ids, recent)
        return ids, row

    def _penalise(self, row: Logits, ids: Tokens | None, recent: Sequence[int]) -> None:
        # The same as llama_sampler_penalties_apply in llama.cpp's src/llama-sampler.cpp, which also divides positive logits only.
        tokens, counts = np.unique(np.array(recent[-self.window :], dtype=np.int64), return_counts=True)
        places, present = _places(ids, tokens)
        values = row[places]
        penalty = np.float32(self._params.repetition_penalty)
        values = np.where(values > 0, values / penalty, values * penalty)
        row[places] = values - counts[present] * self._params.frequency_penalty - self._params.presence_penalty

    def _kept(self, row: Logits, best: float) -> Tokens:
        """Returns ascending indices of the tokens that top-k, top-p and min-p keep.

        top-p is a share of the probability of the top-k tokens. min-p depends on ratios only, so it does not matter which of both is first.
        """
        kept = _top_k(row, self._params.top_k)
        if self._params.top_p == 1 and self._params.min_p == 0:
            return kept
        weights = np.exp((row if kept.size == row.size else row[kept]).astype(np.float64) - best)
        if self._params.top_p < 1:
            inside = _nucleus(weights, self._params.top_p)
            kept, weights = kept[inside], weights[inside]
        return kept[weights >= self._params.min_p]  # the likeliest token's weight is exactly 1


def _top_k(row: Logits, k: int) -> Tokens:
    """Returns ascending indices of the k largest logits (0: all that are not banned). Of equal ones at the threshold, the first count."""
    if not 0 < k < row.size:
        return np.arange(row.size) if row.min() > -np.inf else np.flatnonzero(row > -np.inf)
    candidates = _above_bound(row, k)
    values = row[candidates]
    edge = np.partition(values, -k)[-k]
    above = candidates[values > edge]
    level = candidates[values == edge][: k - len(above)]
    return np.sort(np.concatenate([above, level]))


def _above_bound(row: Logits, k: int) -> Tokens:
    """Returns ascending indices of all logits that may be among the k largest: a small part of a large vocabulary.

    The k blocks with the largest maxima contain k logits that are at least the k-th largest maximum. So the k largest logits of the row are
    at least that too.
    """
    blocks = row.size // _BLOCK
    if blocks <= k:
        return np.arange(row.size)
    maxima = row[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    return np.flatnonzero(row >= np.partition(maxima, -k)[-k])


def _nucleus(weights: Weights, share: float) -> Tokens:
    """Returns ascending indices of the smallest set of largest weights whose sum is at least `share` of the total (arXiv 1904.09751)."""
    mass = share * float(weights.sum())
    candidates = _heaviest(weights, mass)
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weights[order]), mass)) + 1
    return np.sort(order[:count])


def _heaviest(weights: Weights, mass: float) -> Tokens:
    """Returns ascending indices of the largest weights, enough to sum to `mass`. They are far fewer than a vocabulary, and so fast to sort.

    Weights are at most 1. They are grouped by exponent and the first two bits of the mantissa, whose order is that of the weights.
    """
    keys = weights.view(np.int64) >> 50
    sums = np.cumsum(np.bincount(keys, weights)[::-1])
    bound = sums.size - 1 - int(np.searchsorted(sums, mass * (1 + _ROUNDING)))
    return np.flatnonzero(keys >= bound)


def _places(ids: Tokens | None, tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Returns the indices in a row of those `tokens` that are in it, and the indices of these in `tokens`."""
    if ids is None:
        return tokens, np.arange(len(tokens))
    places = np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)
    present = np.flatnonzero(ids[places] == tokens)
    return places[present], present


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object, minimum: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _require(fine: bool, name: str, value: object, rule: str) -> None:
    if not fine:
        raise RequestError(f"{name} is {value!r}; it must be {rule}")


# The model's own distribution: the default of a server, as of OpenAI's API.
MODEL_SAMPLING = SamplingParams()
_GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# The fields of SamplingParams that a bundle may set.
BUNDLE_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_sampling(held: GenerationDefaults | None, otherwise: SamplingParams) -> SamplingParams:
    """Returns the bundle's sampling settings; `otherwise` for those that it does not set. Raises RequestError for a value out of range."""
    named = {name: value for name in BUNDLE_NAMES if held is not None and (value := getattr(held, name)) is not None}
    if named.get("temperature", otherwise.temperature) == 0:
        named |= _GREEDY
    return replace(otherwise, **named)


def over_defaults(chosen: SamplingParams, named: Collection[str], defaults: SamplingParams) -> SamplingParams:
    """Returns `chosen`, but with the defaults' values for fields that are not `named`. A named temperature of 0 is greedy."""
    if "temperature" in named and chosen.temperature == 0:
        return chosen
    own = {each.name: getattr(chosen, each.name) for each in fields(chosen) if each.name in named or each.name not in BUNDLE_NAMES}
    return replace(defaults, **own)


def sampling_sentence(sampling: SamplingParams) -> str:
    """Returns the settings in words, for the user."""
    if sampling.temperature == 0:
        return "greedy"
    parts = [f"temperature {sampling.temperature:g}"]
    parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p != 1 else []
    parts += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
    return ", ".join(parts)
