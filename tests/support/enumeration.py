"""The exact distribution of what a random procedure returns: runs it once for every sequence of its random choices.

The procedure takes its uniform numbers from `Choices.uniform` and draws from `Distribution.draw`, which `Choices.patch` replaces. A number
is never drawn: a comparison with it is a choice between two outcomes of known probability.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.decoding.acceptance import BlockRule, CoupledRule
from edge_runtime.decoding.sampling import Sampler
from edge_runtime.decoding.shared_noise import Distribution, SharedNoise

Outcome = TypeVar("Outcome", bound=Hashable)


class Choices:
    """The choices of one run: the first are given, the others take their first outcome."""

    def __init__(self, value: Sequence[int]) -> None:
        self._first = value
        self.choices: list[tuple[int, Sequence[float]]] = []

    def choose(self, probabilities: Sequence[float]) -> int:
        place = len(self.choices)
        index = self._first[place] if place < len(self._first) else next(i for i, share in enumerate(probabilities) if share > 0)
        self.choices.append((index, probabilities))
        return index

    def uniform(self) -> Any:
        return _Uniform(self, 1.0)

    @property
    def probability(self) -> float:
        product = 1.0
        for index, probabilities in self.choices:
            product *= probabilities[index]
        return product

    def following(self) -> list[int] | None:
        """The choices of the next run, in lexical order; None after the last."""
        for place in range(len(self.choices) - 1, -1, -1):
            index, probabilities = self.choices[place]
            if (more := next((i for i in range(index + 1, len(probabilities)) if probabilities[i] > 0), None)) is not None:
                return [*(earlier for earlier, _ in self.choices[:place]), more]
        return None


@dataclass(frozen=True)
class _Uniform:
    """A uniform number in [0, scale) that is not drawn."""

    choices: Choices
    scale: float

    def __mul__(self, factor: float) -> _Uniform:
        return _Uniform(self.choices, self.scale * float(factor))

    def __lt__(self, limit: float) -> bool:
        below = min(1.0, max(0.0, float(limit) / self.scale))
        return self.choices.choose([1 - below, below]) == 1

    def __ge__(self, limit: float) -> bool:
        return not self < limit


class EnumeratedNoise:
    """Shared noise whose choices are enumerated. The drafter's are other choices than the target's: no correlation may matter."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def at(self, place: int) -> Any:
        return self

    def choose(self, tokens: NDArray[np.int64], weights: NDArray[np.float64]) -> int:
        return int(tokens[self._choices.choose((weights / weights.sum()).tolist())])

    def choose_of_all(self, logits: NDArray[np.float32], temperature: float) -> int:
        return self.choose(np.arange(len(logits)), np.exp((logits.astype(np.float64) - logits.max()) / temperature))


def enumerated_rule(rule: type[BlockRule | CoupledRule], sampler: Sampler, past: Sequence[int], choices: Choices) -> Any:
    if issubclass(rule, CoupledRule):
        return rule(sampler, past, cast(SharedNoise, EnumeratedNoise(choices)), len(past))
    return rule(sampler, past, choices.uniform)


def distribution_of(run: Callable[[Choices], Outcome], monkeypatch: pytest.MonkeyPatch) -> dict[Outcome, float]:
    def draw(self: Distribution, uniform: _Uniform) -> int:
        return int(self.tokens[uniform.choices.choose(self.probabilities.tolist())])

    monkeypatch.setattr(Distribution, "draw", draw)
    result: dict[Outcome, float] = defaultdict(float)
    for choices, outcome in _runs(run):
        result[outcome] += choices.probability
    return result


def _runs(run: Callable[[Choices], Outcome]) -> Iterator[tuple[Choices, Outcome]]:
    value: list[int] | None = []
    while value is not None:
        choices = Choices(value)
        yield choices, run(choices)
        value = choices.following()
