"""Scripted models with whole distributions, and the exact distribution of what they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edge_runtime.decoding.acceptance import AcceptanceRule
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.decoding.sampling import Sampler, SamplingParams
from edge_runtime.drafting.policies import DraftLengthPolicy, Fixed
from edge_runtime.interfaces import DraftSampler, Logits, ShouldContinue
from scripted import ScriptedTarget

Row = Callable[[Sequence[int]], Logits]


def random_rows(seed: int, vocabulary: int) -> Row:
    """Logits that depend on the last two tokens, the same for the same seed."""
    table = np.random.default_rng(seed).normal(0, 1.5, (vocabulary, vocabulary, vocabulary)).astype(np.float32)
    return lambda context: table[context[-2], context[-1]]


class StochasticTarget(ScriptedTarget):
    """A scripted target whose logits after a context are `row(context)`."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self._row = row

    def row(self, context: Sequence[int]) -> Logits:
        return self._row(context)


class StochasticDrafter:
    """Drafts from logits of its own; `support` gives the tokens a sparse head would compute, in any order."""

    def __init__(self, target: ScriptedTarget, row: Row, support: Callable[[Sequence[int]], list[int]] | None = None) -> None:
        self._target = target
        self._row = row
        self._support = support

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        context = [*self._target.cache, last]
        for _ in range(draft_length):
            logits, tokens = self._row(context).copy(), None
            if self._support:
                tokens = np.array(self._support(context), dtype=np.int32)
                logits = logits[tokens]
            sure = 1 / float(np.exp(logits - logits.max()).sum())
            best = int(logits.argmax()) if tokens is None else int(tokens[logits.argmax()])
            chosen = sampler(logits, tokens) if sampler else best
            logits.fill(np.nan)
            if chosen is None:
                break
            context.append(chosen)
            if should_continue is not None and not should_continue(sure):
                break
        return context[self._target.length + 1 :]

    def close(self) -> None:
        """Holds nothing."""


class CertainDrafter(StochasticDrafter):
    """Ignores `sampler`, as a lookup does: drafts its likeliest tokens."""

    def draft(
        self, last: int, draft_length: int, sampler: DraftSampler | None = None, should_continue: ShouldContinue | None = None
    ) -> list[int]:
        return super().draft(last, draft_length)


def drafters(row: Row, size: int) -> dict[str, Callable[[StochasticTarget], StochasticDrafter]]:
    """Drafters for a target of these rows, from always right to always wrong, sparse ones and one that samples nothing."""
    return {
        "right": lambda target: StochasticDrafter(target, row),
        "wrong": lambda target: StochasticDrafter(target, lambda context: -row(context)),
        "random": lambda target: StochasticDrafter(target, random_rows(2, size)),
        "sparse": lambda target: StochasticDrafter(target, random_rows(3, size), lambda c: [(c[-1] + 2) % size, (c[-1] + 1) % size]),
        "certain": lambda target: CertainDrafter(target, random_rows(4, size)),
    }


def write(
    target: StochasticTarget,
    drafter: StochasticDrafter | None,
    prompt: Sequence[int],
    rule: AcceptanceRule,
    *,
    length: int = 0,
    tokens: int,
    is_stop: Callable[[int], bool] = lambda _: False,
    policy: DraftLengthPolicy | None = None,
) -> tuple[int, ...]:
    """One request through the loop, on an empty cache; drafts of `length`, or of what a policy says."""
    target.rollback(0)
    target.prefill(prompt[:-1])
    emitted: list[int] = []
    for item in decode(
        target, drafter, Decoding(target, prompt[-1], policy or Fixed(length), max_tokens=tokens, rule=rule, is_stop=is_stop)
    ):
        emitted += item.tokens
        assert target.cache == [*prompt, *emitted][:-1]
    return tuple(emitted)


def exact(row: Row, params: SamplingParams, prompt: Sequence[int], tokens: int) -> dict[tuple[int, ...], float]:
    """Probability of each sequence that plain sampling can write, by enumeration."""
    sampler = Sampler(params)
    sequences: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        longer = {}
        for sequence, probability in sequences.items():
            context = [*prompt, *sequence]
            following = sampler(row(context), context)
            for token, share in zip(following.tokens.tolist(), following.probabilities.tolist(), strict=True):
                longer[(*sequence, token)] = probability * share
        sequences = longer
    return sequences


def largest_difference(item: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    return max(abs(item.get(outcome, 0.0) - other.get(outcome, 0.0)) for outcome in {*item, *other})
