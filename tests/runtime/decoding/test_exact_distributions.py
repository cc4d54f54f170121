"""Whole sampled sequences with drafts have the exact distribution of plain sampling, to the twelfth place: by enumeration."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from edge_runtime.decoding.acceptance import ACCEPTANCE_METHODS, BlockRule, CoupledRule, accept_by_block, acceptance_rule
from edge_runtime.decoding.sampling import Sampler, SamplingParams
from edge_runtime.decoding.shared_noise import Distribution
from edge_runtime.drafting.policies import RoundPlan, RoundResult
from enumeration import Choices, distribution_of, enumerated_rule
from stochastic import StochasticDrafter, StochasticTarget, drafters, exact, largest_difference, random_rows, write

SIZE, PROMPT = 3, [1, 2]
TARGET = random_rows(1, SIZE)
EXACT = 1e-12
RULES = (BlockRule, CoupledRule)

OPTIONS = {
    "plain": SamplingParams(),
    "temperature 0.6": SamplingParams(temperature=0.6),
    "temperature 1.7": SamplingParams(temperature=1.7),
    "top-k": SamplingParams(top_k=2),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.2),
    "repetition penalty": SamplingParams(repetition_penalty=1.8),
    "penalties": SamplingParams(repetition_penalty=1.5, frequency_penalty=0.6, presence_penalty=0.5, penalty_window=2),
    "bias": SamplingParams(logit_bias={0: 1.5, 2: -np.inf}),
    "all": SamplingParams(temperature=0.8, top_p=0.95, min_p=0.02, repetition_penalty=1.2, presence_penalty=-0.3, logit_bias={2: 1.0}),
}


def overconfident(context):
    logits = np.zeros(SIZE, dtype=np.float32)
    logits[int(TARGET(context).argmin())] = 8.0
    return logits


class StoppingDrafter(StochasticDrafter):
    """Ends a draft after any token 0: how long a draft is depends on what was drawn."""

    def draft(self, last, draft_length, sampler=None, should_continue=None):
        drawn: list[int] = []
        return super().draft(last, draft_length, lambda *row: drawn.append(sampler(*row)) or drawn[-1], lambda _: drawn[-1] != 0)


class ExtendedDrafter(StochasticDrafter):
    """Appends a token that was not drawn, depending on what was."""

    def draft(self, last, draft_length, sampler=None, should_continue=None):
        drafts = super().draft(last, draft_length - 1, sampler)
        return [*drafts, (sum(drafts) + last) % SIZE]


DRAFTERS = {
    **drafters(TARGET, SIZE),
    "overconfident": lambda target: StochasticDrafter(target, overconfident),
    "stopping": lambda target: StoppingDrafter(target, random_rows(5, SIZE)),
    "extended": lambda target: ExtendedDrafter(target, random_rows(6, SIZE)),
}


def written(monkeypatch, rule, drafter, params, *, tokens, length):
    def run(choices: Choices) -> tuple[int, ...]:
        target = StochasticTarget(TARGET)
        opened = DRAFTERS[drafter](target) if drafter else None
        drawn = enumerated_rule(rule, Sampler(params), PROMPT, choices)
        return write(target, opened, PROMPT, drawn, length=length, tokens=tokens)

    return distribution_of(run, monkeypatch)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_keeps_the_distribution(name, rule, monkeypatch):
    result = written(monkeypatch, rule, "random", OPTIONS[name], length=2, tokens=3)
    assert largest_difference(result, exact(TARGET, OPTIONS[name], PROMPT, 3)) < EXACT


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_every_drafter_keeps_the_distribution(drafter, rule, monkeypatch):
    # A block of three drafts is judged as a whole; the coupled rule judges one by one, whose draws multiply.
    length = 3 if rule is BlockRule else 2
    result = written(monkeypatch, rule, drafter, OPTIONS["all"], length=length, tokens=length + 1)
    assert largest_difference(result, exact(TARGET, OPTIONS["all"], PROMPT, length + 1)) < EXACT


@pytest.mark.parametrize("method", ACCEPTANCE_METHODS)
def test_drawn_numbers_keep_the_distribution(method):
    """The enumeration has choices in place of numbers, and would not see that a number is used twice."""
    runs, params = 1500, OPTIONS["temperature 1.7"]
    target, rule = StochasticTarget(TARGET), functools.partial(acceptance_rule, method=method, past=PROMPT)
    drafter = DRAFTERS["random"](target)
    counts = Counter(write(target, drafter, PROMPT, rule(replace(params, seed=seed)), length=2, tokens=3) for seed in range(runs))
    expected = exact(TARGET, params, PROMPT, 3)
    assert {*counts} <= {*expected}
    # Chi-square of 26 degrees of freedom: above 60 in one of 6,000 seeds.
    assert sum((counts[outcome] - runs * share) ** 2 / (runs * share) for outcome, share in expected.items()) < 60


def test_the_enumeration_sees_a_wrong_rule(monkeypatch):
    """The residual of token-by-token rejection does not fit block verification."""
    excess = Distribution.excess
    monkeypatch.setattr(Distribution, "excess", lambda self, other, share=1.0: excess(self, other))
    result = written(monkeypatch, BlockRule, "random", OPTIONS["plain"], length=2, tokens=3)
    assert largest_difference(result, exact(TARGET, OPTIONS["plain"], PROMPT, 3)) > 1e-3


class Choosy:
    """Verifies the first draft alone where the drafter is unsure of the last; `bold` does so even where all must be verified."""

    def __init__(self, *, bold: bool = False) -> None:
        self._bold = bold
        self.left_out = 0

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:
        self._may, self._sure = any_prefix or self._bold, []
        return RoundPlan(3, should_continue=lambda confidence: self._sure.append(confidence) or True, to_verify=self._to_verify)

    def observe(self, result: RoundResult) -> None:
        """Learns nothing."""

    def _to_verify(self, drafted: int) -> tuple[int, int]:
        kept = 1 if drafted and self._may and self._sure[-1] < 0.8 else drafted
        self.left_out += drafted - kept
        return kept, 0


def difference_of(rule, policy, monkeypatch) -> float:
    """From plain sampling, of two tokens: three drafts are the fewest of which a policy can leave out what made it doubt."""
    row, prompt, params = random_rows(1, 2), [1, 0], OPTIONS["plain"]

    def run(choices: Choices) -> tuple[int, ...]:
        target = StochasticTarget(row)
        drawn = enumerated_rule(rule, Sampler(params), prompt, choices)
        return write(target, StochasticDrafter(target, random_rows(2, 2)), prompt, drawn, tokens=4, policy=policy)

    return largest_difference(distribution_of(run, monkeypatch), exact(row, params, prompt, 4))


@pytest.mark.parametrize("rule", RULES)
def test_leaving_drafts_unverified_keeps_the_distribution(rule, monkeypatch):
    policy = Choosy()
    assert difference_of(rule, policy, monkeypatch) < EXACT
    assert (policy.left_out > 0) == (rule is CoupledRule)


def test_the_enumeration_sees_why_all_drawn_drafts_must_be_verified(monkeypatch):
    """What a draft made the drafter think of the next one says what was drawn: to drop it then is to draw again."""
    accept, policy = BlockRule.accept, Choosy(bold=True)

    def forgiving(self, drafts, logits):
        del self._drawn[len(drafts) :]
        return accept(self, drafts, logits)

    monkeypatch.setattr(BlockRule, "accept", forgiving)
    assert difference_of(BlockRule, policy, monkeypatch) > 1e-3
    assert policy.left_out > 0


def accepted_on_average(monkeypatch, accept, p, q, length) -> float:
    """Expected accepted drafts of one round; `p` and `q` give the distributions after a context."""

    def run(choices: Choices) -> int:
        drafts: list[int] = []
        for _ in range(length):
            drafts.append(q(drafts).draw(choices.uniform()))
        proposed = [q(drafts[:i]) for i in range(length)]
        return accept(drafts, proposed, lambda i: p(drafts[:i]), choices.uniform).accepted

    return sum(accepted * share for accepted, share in distribution_of(run, monkeypatch).items())


def random_model(seed: int, sharpness: float):
    table: dict[tuple[int, ...], Distribution] = {}
    random = np.random.default_rng(seed)

    def after(context) -> Distribution:
        if tuple(context) not in table:
            table[tuple(context)] = Distribution.proportional(np.arange(SIZE), random.dirichlet(np.full(SIZE, sharpness)))
        return table[tuple(context)]

    return after


def test_a_likely_token_makes_up_for_an_unlikely_one(monkeypatch):
    """The example of the paper's figure 1: independent tokens, p = (1/3, 2/3), q = (2/3, 1/3)."""
    p, q = (Distribution(np.arange(2), np.array(row)) for row in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    models = (lambda _: p, lambda _: q, 2)
    # Judged one by one it would be 10 / 9.
    assert accepted_on_average(monkeypatch, accept_by_block, *models) == pytest.approx(11 / 9)


def test_a_draft_that_is_the_target_is_accepted_whole(monkeypatch):
    p = random_model(3, 0.7)
    assert accepted_on_average(monkeypatch, accept_by_block, p, p, 3) == pytest.approx(3)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_nothing_after_an_impossible_draft_is_read(place):
    drafts = [1] * place + [0] + [1] * 2

    def target(position: int) -> Distribution:
        assert position <= place
        return Distribution.certain(1)

    verdict = accept_by_block(drafts, [Distribution.certain(draft) for draft in drafts], target, lambda: 0.5)
    assert (verdict.accepted, verdict.next_token) == (place, 1)
