"""Sampling on the reference pair: with drafts the tokens come as often as without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edge_runtime.backends.llama.context import LlamaOptions
from edge_runtime.backends.llama.drafter import LlamaDrafter
from edge_runtime.backends.llama.pair import open_pair
from edge_runtime.backends.llama.target import LlamaTarget
from edge_runtime.decoding.acceptance_rules import ACCEPTANCE_METHODS, acceptance_rule
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.decoding.sampling import Sampler, SamplingParams
from edge_runtime.drafting.policies import Fixed
from stochastic import chi_square_p

PROMPT = "class Stack:\n    def push(self, item):\n        self."
# Nothing is cut off: at the edge of a top-k, kernels for one row and for several may disagree about which token is in.
SAMPLING = {"temperature": 0.7, "presence_penalty": 0.3, "penalty_window": 16}
BRANCHES = 6


@pytest.fixture(scope="module")
def pair(reference_pair: Any) -> Iterator[tuple[LlamaTarget, LlamaDrafter]]:
    target, drafter = open_pair(reference_pair.target, reference_pair.drafter, LlamaOptions(context=256, threads=1, batch=64))
    assert drafter is not None
    with target:
        yield target, drafter


def follow(target: LlamaTarget, tokens: list[int]) -> None:
    """Makes these the target's tokens. Of those it has it keeps all but the last, whose hidden row the drafter needs."""
    had = target.tokens[: len(tokens) - 1]
    kept = int(np.logical_and.accumulate(had == tokens[: len(had)]).sum())
    target.rollback(kept)
    target.prefill(tokens[kept:])


def write(
    target: LlamaTarget, drafter: LlamaDrafter, prompt: list[int], method: str, length: int, seed: int, tokens: int
) -> tuple[int, ...]:
    follow(target, prompt[:-1])
    rule = acceptance_rule(SamplingParams(seed=seed, **SAMPLING), method, prompt)  # type: ignore[arg-type]
    rounds = decode(target, drafter, Decoding(target, prompt[-1], Fixed(length), max_tokens=tokens, rule=rule))
    return tuple(token for single in rounds for token in single.tokens)


def test_what_the_drafter_offers_is_its_own_greedy_choice_and_a_finite_row(pair: tuple[LlamaTarget, LlamaDrafter]) -> None:
    target, drafter = pair
    prompt = target.vocabulary.encode(PROMPT)
    target.rollback(0)
    target.prefill(prompt[:-1])
    greedy = drafter.draft(prompt[-1], 5)
    shown: list[np.ndarray[Any, Any]] = []

    def sampler(logits: np.ndarray[Any, Any], tokens: object = None) -> int:
        assert tokens is None
        shown.append(logits.copy())
        return int(logits.argmax())

    assert drafter.draft(prompt[-1], 5, sampler) == greedy
    assert [row.shape for row in shown] == [(target.vocabulary.size,)] * 5
    assert all(np.isfinite(row).all() for row in shown)


def test_a_chosen_draft_leads_the_next_step(pair: tuple[LlamaTarget, LlamaDrafter]) -> None:
    target, drafter = pair
    prompt = target.vocabulary.encode(PROMPT)
    target.rollback(0)
    target.prefill(prompt[:-1])

    def second_rows(first: int) -> np.ndarray[Any, Any]:
        rows: list[np.ndarray[Any, Any]] = []

        def sampler(logits: np.ndarray[Any, Any], tokens: object = None) -> int:
            rows.append(logits.copy())
            return first

        assert drafter.draft(prompt[-1], 2, sampler) == [first, first]
        return rows[1]

    assert not np.array_equal(second_rows(300), second_rows(301))


@pytest.mark.slow(12)
@pytest.mark.parametrize("method", ACCEPTANCE_METHODS)
def test_with_drafts_tokens_come_as_often_as_without(pair: tuple[LlamaTarget, LlamaDrafter], method: str) -> None:
    """3 tokens, 1500 times, against the probabilities that one-row forwards give for the likely sequences; the others count as one."""
    target, drafter = pair
    prompt = target.vocabulary.encode(PROMPT)
    sampler = Sampler(SamplingParams(**SAMPLING))  # type: ignore[arg-type]
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for sequence, probability in expected.items():
            context = [*prompt, *sequence]
            follow(target, context[:-1])
            following = sampler(target.verify(context[-1:])[0], context)
            for place in np.argsort(following.probabilities)[-BRANCHES:]:
                longer[(*sequence, int(following.tokens[place]))] = probability * float(following.probabilities[place])
        expected = longer
    observed = Counter(write(target, drafter, prompt, method, 2, seed=seed, tokens=3) for seed in range(1500))
    assert chi_square_p(observed, expected) > 1e-3
    flatter = {sequence: share**0.5 for sequence, share in expected.items()}
    whole = sum(flatter.values()) / sum(expected.values())
    assert chi_square_p(observed, {sequence: share / whole for sequence, share in flatter.items()}) < 1e-6, "the test sees a difference"
