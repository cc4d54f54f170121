"""The order of runs: all variants in turn on the same prompt, in reverse order the next time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edge_bench.measure.prompts import Prompt, long_prompt
from edge_bench.measure.variants import Variant

DOMAINS_PART, CONTEXTS_PART = "domains", "contexts"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A comparison: `variants` on `prompts`, `repeats` times, `tokens` tokens each. `part` as in `records.Run`."""

    part: str
    variants: tuple[Variant, ...]
    prompts: tuple[Prompt, ...]
    repeats: int
    tokens: int

    def requests(self) -> Iterator[tuple[int, Prompt, Variant]]:
        """Yields repeat, prompt, variant: A B C on one prompt, C B A on the next and in the next repeat, so that slow drift cancels out."""
        for repeat in range(self.repeats):
            for index, prompt in enumerate(self.prompts):
                for variant in self.variants if (repeat + index) % 2 == 0 else reversed(self.variants):
                    yield repeat, prompt, variant

    def warm_up(self, count: int) -> list[tuple[int, Prompt, Variant]]:
        """Returns `count` requests of each variant on the first prompt, whose figures are discarded."""
        return [(0, self.prompts[0], variant) for variant in self.variants for _ in range(count)]

    def __len__(self) -> int:
        return self.repeats * len(self.prompts) * len(self.variants)


def context_schedule(
    prompts: Sequence[Prompt], variants: Sequence[Variant], lengths: Sequence[int], *, repeats: int, tokens: int
) -> Schedule:
    """Returns a comparison on one prompt of each length in tokens, made by joining all prompts."""
    long = tuple(Prompt(domain=str(length), number=0, ids=long_prompt(prompts, length), text="") for length in lengths)
    return Schedule(part=CONTEXTS_PART, variants=tuple(variants), prompts=long, repeats=repeats, tokens=tokens)
