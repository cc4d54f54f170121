"""Runs requests of a benchmark on edge-mtp, with the time of each phase, and their order: all variants in turn on the same prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from edge_bench.measure.prompts import Prompt, long_prompt
from edge_bench.measure.records import Run
from edge_bench.measure.variants import FIXED, PLAIN, Variant
from edge_runtime.decoding.loop import Round
from edge_runtime.drafting.policies import Fixed
from edge_runtime.session.generation import Generation
from edge_runtime.session.session import Session

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


class Runner(Protocol):
    """A program that decodes: edge-mtp or another one."""

    def run(self, variant: Variant, prompt: Prompt, tokens: int, *, part: str = DOMAINS_PART, repeat: int = 0) -> Run:
        """Greedily decodes at most `tokens` tokens after a prompt; `part` and `repeat` are the run's place, as in `records.Run`."""


class EdgeRunner:
    """Runs variants on one opened pair. Each policy gets its own session, as if opened with that policy."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._sessions: dict[str, Session] = {}

    def run(self, variant: Variant, prompt: Prompt, tokens: int, *, part: str = DOMAINS_PART, repeat: int = 0) -> Run:
        """Decodes. The safety net has its default for policies and is off for plain decoding and fixed lengths."""
        rounds: list[Round] = []
        generation = start(self._session(variant), variant, prompt.ids, tokens, rounds.append)
        seconds, round_seconds = 0.0, []
        for _ in generation.rounds():
            round_seconds.append(generation.stats.decode_seconds - seconds)
            seconds = generation.stats.decode_seconds
        stats = generation.stats
        return Run(
            part=part,
            domain=prompt.domain,
            prompt=prompt.number,
            repeat=repeat,
            variant=variant,
            prompt_tokens=stats.prompt_tokens,
            tokens=stats.tokens,
            seconds=stats.decode_seconds,
            drafted=stats.drafted,
            accepted=stats.accepted,
            drafted_at=tuple(stats.drafted_at),
            accepted_at=tuple(stats.accepted_at),
            round_seconds=tuple(round_seconds),
            round_tokens=tuple(len(each.tokens) for each in rounds),
            round_drafted=tuple(each.drafted for each in rounds),
            round_accepted=tuple(each.accepted for each in rounds),
            round_draft_seconds=tuple(each.draft_seconds for each in rounds),
            round_verify_seconds=tuple(each.verify_seconds for each in rounds),
            prefill_seconds=stats.prefill_seconds,
            first_token_seconds=stats.first_token_seconds,
            draft_seconds=stats.draft_seconds,
            verify_seconds=stats.verify_seconds,
            output=digest(generation.tokens),
            accepted_from=dict(stats.accepted_from),
        )

    def _session(self, variant: Variant) -> Session:
        if variant.policy not in self._sessions:
            self._sessions[variant.policy] = session_for(self.session, variant)
        return self._sessions[variant.policy]


def session_for(session: Session, variant: Variant) -> Session:
    """Returns a session on the same pair as if it had been opened with the variant's policy."""
    return session.with_policy(FIXED if variant.policy == PLAIN else variant.policy)


def start(
    session: Session, variant: Variant, ids: Sequence[int], tokens: int, on_round: Callable[[Round], None] | None = None
) -> Generation:
    """Starts a greedy request of the variant, on a session whose settings have the variant's policy."""
    length = 0 if variant.policy == PLAIN else variant.length
    policy = None if length is None else Fixed(length)
    return session.generate(ids, max_tokens=tokens, policy=policy, on_round=on_round)


def digest(tokens: Sequence[int]) -> str:
    """Returns a short digest of the tokens."""
    return hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]
