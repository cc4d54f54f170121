"""Sampled sequences whose random numbers are drawn have the distribution of plain sampling: chi-square against enumeration.

test_exact_distributions.py proves each rule for every option and drafter, with choices in place of drawn numbers.

Every run is seeded, so a test passes always or never. A right rule gives p below 0.001 once in a thousand tests; the biased rules below
are seen at 1e-6 with the same counts.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from edge_runtime.decoding import acceptance_rules as rules
from edge_runtime.decoding.acceptance import VerifyResult
from edge_runtime.decoding.acceptance_rules import ACCEPTANCE_METHODS, BlockRule, MatchRule, RejectionRule
from edge_runtime.decoding.sampling import Sampler, SamplingParams
from edge_runtime.drafting.policies import RoundPlan, RoundResult
from stochastic import StochasticDrafter, StochasticTarget, chi_square_p, chi_square_tail, drafters, exact, random_rows, write

VOCABULARY, PROMPT, TOKENS, RUNS = 5, [1, 2], 4, 1500
LIKELY, BIASED = 1e-3, 1e-6
TARGET = random_rows(1, VOCABULARY)

PENALTIES = SamplingParams(frequency_penalty=0.6, presence_penalty=0.5, penalty_window=3)
ALL = SamplingParams(temperature=0.8, top_k=4, top_p=0.95, min_p=0.02, repetition_penalty=1.2, presence_penalty=-0.3, logit_bias={2: 1.0})
DRAFTERS = drafters(TARGET, VOCABULARY)


def count(drafter: str, params: SamplingParams, make_rule, *, seed: int, runs: int = RUNS, length: int = 2) -> Counter:
    target = StochasticTarget(TARGET)
    sampler, random = Sampler(params), np.random.default_rng(seed).random
    return Counter(
        write(target, DRAFTERS[drafter](target), PROMPT, make_rule(sampler, PROMPT, random), length=length, tokens=TOKENS)
        for _ in range(runs)
    )


def rule_class(method: str):
    return {"block": BlockRule, "rejection": RejectionRule, "match": MatchRule}[method]


@pytest.mark.parametrize("method", ACCEPTANCE_METHODS)
def test_drawn_sequences_have_the_distribution(method):
    assert chi_square_p(count("random", ALL, rule_class(method), seed=11), exact(TARGET, ALL, PROMPT, TOKENS)) > LIKELY


def draws_again_from_the_target(drafts, proposed, target, random):
    """Forgets to take the drafter's share away after a rejection."""
    for i, draft in enumerate(drafts):
        if random() * proposed[i].of(draft) >= target(i).of(draft):
            return VerifyResult(accepted=i, next_token=target(i).draw(random()))
    return VerifyResult(accepted=len(drafts), next_token=target(len(drafts)).draw(random()))


def accepts_what_is_likely(drafts, proposed, target, random):
    """Accepts with the target's probability alone, and resamples rightly."""
    for i, draft in enumerate(drafts):
        if random() >= target(i).of(draft):
            return VerifyResult(accepted=i, next_token=target(i).less(proposed[i]).draw(random()))
    return VerifyResult(accepted=len(drafts), next_token=target(len(drafts)).draw(random()))


@pytest.mark.parametrize("biased", [draws_again_from_the_target, accepts_what_is_likely])
def test_the_chi_square_sees_a_biased_rule(monkeypatch, biased):
    monkeypatch.setattr(rules, "accept_by_rejection", biased)
    observed = count("random", SamplingParams(), RejectionRule, seed=11)
    assert chi_square_p(observed, exact(TARGET, SamplingParams(), PROMPT, TOKENS)) < BIASED


class ForgetfulRule(RejectionRule):
    """Penalises by the past before the round only, not by the drafts before a position."""

    def _target(self, drafts, logits, position):
        return super()._target([], logits, position)


def test_the_chi_square_sees_penalties_at_the_wrong_place():
    observed = count("right", PENALTIES, ForgetfulRule, seed=11, length=3)
    assert chi_square_p(observed, exact(TARGET, PENALTIES, PROMPT, TOKENS)) < BIASED


def test_rejection_accepts_everything_from_a_drafter_that_is_the_target():
    target = StochasticTarget(TARGET)
    rule = RejectionRule(Sampler(ALL), PROMPT, np.random.default_rng(1).random)
    write(target, StochasticDrafter(target, TARGET), PROMPT, rule, length=4, tokens=50)
    assert len(target.rows) == 10  # 5 tokens a forward


def test_match_drafts_under_the_same_bias_and_penalties():
    """Greedy but for a ban and a penalty: a drafter that is the target is then always right, position by position."""
    params = SamplingParams(temperature=0, presence_penalty=1.5, penalty_window=3, logit_bias={2: -np.inf})
    target = StochasticTarget(TARGET)
    rule = MatchRule(Sampler(params), PROMPT, np.random.default_rng(1).random)
    write(target, StochasticDrafter(target, TARGET), PROMPT, rule, length=4, tokens=50)
    assert len(target.rows) == 10


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"), [(18.307, 10, 0.05), (29.588, 10, 0.001), (149.449, 100, 0.001), (77.929, 100, 0.95)]
)
def test_the_approximation_agrees_with_printed_tables(statistic, degrees, tail):
    """Critical values: NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.6.7.4."""
    assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=0.1)


class Choosy:
    """Verifies the first draft alone where the drafter is unsure of the last; `bold` does so even where all must be verified."""

    def __init__(self, *, bold: bool = False) -> None:
        self._bold = bold
        self.left_out = 0

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:
        self._may, self._sure = any_prefix or self._bold, []
        return RoundPlan(3, should_continue=self._record, to_verify=self._to_verify)

    def observe(self, result: RoundResult) -> None:
        """Learns nothing."""

    def _record(self, confidence: float) -> bool:
        self._sure.append(confidence)
        return True

    def _to_verify(self, drafted: int) -> tuple[int, int]:
        kept = 1 if drafted and self._may and self._sure[-1] < 0.6 else drafted
        self.left_out += drafted - kept
        return kept, 0


def choosy(method: str, *, bold: bool = False) -> tuple[float, int]:
    target, params = StochasticTarget(TARGET), SamplingParams()
    rule = rule_class(method)(Sampler(params), PROMPT, np.random.default_rng(17).random)
    policy = Choosy(bold=bold)
    drafter = StochasticDrafter(target, random_rows(5, VOCABULARY, spread=1.0))
    observed = Counter(write(target, drafter, PROMPT, rule, policy=policy, tokens=TOKENS) for _ in range(2 * RUNS))
    return chi_square_p(observed, exact(TARGET, params, PROMPT, TOKENS)), policy.left_out


@pytest.mark.parametrize("method", ACCEPTANCE_METHODS)
def test_leaving_drafts_unverified_keeps_the_distribution(method):
    likely, left_out = choosy(method)
    assert likely > LIKELY
    assert (left_out > 0) == (method == "match")


@pytest.mark.parametrize("method", ["block", "rejection"])
def test_the_chi_square_sees_why_rejection_must_verify_all_drafts(method, monkeypatch):
    """What a draft made the drafter think of the next one says what was drawn: to drop it then is to draw again."""
    monkeypatch.setattr(RejectionRule, "accept", forgiving(RejectionRule.accept))
    likely, left_out = choosy(method, bold=True)
    assert left_out > 0
    assert likely < BIASED


def forgiving(accept):
    """The rule without its refusal of missing drafts."""

    def judge(self, drafts, logits):
        del self._drawn[len(drafts) :]
        return accept(self, drafts, logits)

    return judge
