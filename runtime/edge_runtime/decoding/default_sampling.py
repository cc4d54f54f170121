"""How tokens are drawn where the user says nothing: as the target's generation_config.json does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

from edge_runtime.bundle.manifest import GenerationDefaults
from edge_runtime.decoding.sampling import SamplingParams

# Of a server: as OpenAI's API, the model's own distribution.
MODEL_SAMPLING = SamplingParams()
_GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# What a bundle may say, by the names of SamplingParams.
BUNDLE_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_sampling(found: GenerationDefaults | None, otherwise: SamplingParams) -> SamplingParams:
    """Returns the bundle's sampling; `otherwise` where it says nothing. Raises RequestError for a value out of range."""
    named = {name: value for name in BUNDLE_NAMES if found is not None and (value := getattr(found, name)) is not None}
    if named.get("temperature", otherwise.temperature) == 0:
        named |= _GREEDY
    return replace(otherwise, **named)


def over_defaults(chosen: SamplingParams, given: Collection[str], defaults: SamplingParams) -> SamplingParams:
    """Returns `chosen`, with the defaults' values of what was not `given`. A given temperature of 0 is greedy."""
    if "temperature" in given and chosen.temperature == 0:
        return chosen
    own = {each.name: getattr(chosen, each.name) for each in fields(chosen) if each.name in given or each.name not in BUNDLE_NAMES}
    return replace(defaults, **own)


def sampling_sentence(sampling: SamplingParams) -> str:
    """What the values are, for the user."""
    if sampling.temperature == 0:
        return "greedy"
    parts = [f"temperature {sampling.temperature:g}"]
    parts += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    parts += [f"top-p {sampling.top_p:g}"] if sampling.top_p != 1 else []
    parts += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
    return ", ".join(parts)
