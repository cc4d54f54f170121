"""How well a bundle's quantization keeps its model's answers, as measured by its export, in figures and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edge_devices.errors import EdgeError
from edge_devices.files.user_cache import cache_folder, cache_put, entry_key, read_entries

# Above this mean KL, in nats, another word than the model's own is often the likeliest. Of real matrices (docs/results.md) 8 bits have
# 0.03, a calibrated mix of 4 to 8 bits 0.1.
DEGRADED_KL = 0.3
# Which bundles were mentioned.
CACHE_NAME = "mentioned.json"
# A manifest may hold any number: NaN, infinity, integers that no float holds.
_BEYOND = 1e300


@dataclass(frozen=True, kw_only=True)
class Quality:
    """A quantized model beside its reference over `rows`: mean KL(reference || quantized) in nats, both perplexities, and the share of
    rows whose likeliest token is the reference's own or ties with it."""

    rows: int
    mean_kl: float
    perplexity: float
    reference_perplexity: float
    greedy_agreement: float

    @property
    def words(self) -> str:
        """E.g. "keeps 81% of the model's first choices, perplexity 94 instead of 87 (mean KL 0.14)"."""
        return (
            f"keeps {self.greedy_agreement:.0%} of the model's first choices, perplexity {self.perplexity:.3g}"
            f" instead of {self.reference_perplexity:.3g} (mean KL {self.mean_kl:.3g})"
        )


def exported_quality(parity: object) -> Quality | None:
    """The quality in one format's part of the manifest's `parity`; None if it was not measured or a figure is invalid."""
    figures = parity.get("quality") if isinstance(parity, dict) else None
    if not isinstance(figures, dict):
        return None
    values: dict[str, Any] = {name: figures.get(name) for name in Quality.__dataclass_fields__}
    sound = all(type(value) in (int, float) and 0 <= value < _BEYOND for value in values.values())
    return Quality(**values) if sound else None


def first_time(facts: Sequence[str]) -> bool:
    """Whether a bundle of these facts is mentioned for the first time on this machine; always True without a cache."""
    try:
        path = cache_folder() / CACHE_NAME
    except EdgeError:  # a user without a home folder
        return True
    key = entry_key(facts)
    if key in read_entries(path):
        return False
    cache_put(path, key, True)
    return True


def degradation(parity: object, name: str) -> str | None:
    """A sentence about a bundle of this name that has lost much of its model's answers; None if it has not, or if that was not measured."""
    quality = exported_quality(parity)
    if quality is None or quality.mean_kl <= DEGRADED_KL:
        return None
    return f"{name} answers worse than its model: it {quality.words}; export it in a type of more bits, or calibrated."
