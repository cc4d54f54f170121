"""Sources of drafts beside the drafter: calibrated by what is emitted, weighed by the policy, and named in the rounds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edge_runtime.decoding.acceptance import BlockRule
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.decoding.sampling import Sampler, SamplingParams
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.cost_model import MeasuredCosts
from edge_runtime.drafting.policies import RoundResult
from edge_runtime.drafting.profit_policy import Profit
from edge_runtime.drafting.sources import Guess, Proposals, SourceOdds
from enumeration import Choices, distribution_of
from scripted import ScriptedDrafter, ScriptedTarget, next_token, plain_greedy
from simulated_rounds import SettledCosts
from stochastic import StochasticDrafter, StochasticTarget, exact, largest_difference, random_rows

FLAT = MeasuredCosts(verify=tuple(10.0 + 0.1 * rows for rows in range(13)), step=0.2, overhead=0.4)
STEEP = MeasuredCosts(verify=tuple(10.0 * (1 + rows) for rows in range(13)), step=0.2, overhead=0.4)


class Oracle:
    """Guesses from the scripted text, rightly or not."""

    def __init__(self, prompt: Sequence[int], *, wrong: bool = False) -> None:
        self.text, self._wrong = list(prompt), wrong

    def guess(self, ahead: Sequence[int], maximum: int) -> Guess:
        text = [*self.text, *ahead]
        for _ in range(maximum):
            text.append((next_token(text) + self._wrong) % 17)
        tokens = tuple(text[len(self.text) + len(ahead) :])
        return Guess("oracle", tokens, ("sure",) * len(tokens))

    def add(self, tokens: Sequence[int]) -> None:
        self.text += tokens


def profit(costs: MeasuredCosts = FLAT, *, longest: int = 4) -> Profit:
    return Profit(SettledCosts(costs), AcceptanceModel(), longest=longest, max_rows=12, stepwise=False)


def run(proposals: Proposals, policy: Profit, *, drafter: bool = True, tokens: int = 60):
    target, prompt = ScriptedTarget(), [1, 2, 3]
    target.prefill(prompt[:-1])
    made = ScriptedDrafter(target, lambda context, position: next_token(context) if position < 2 else 0) if drafter else None
    rounds = list(decode(target, made, Decoding(target, prompt[-1], policy, max_tokens=tokens, proposals=proposals)))
    assert [token for item in rounds for token in item.tokens] == plain_greedy(prompt, tokens)
    return rounds


def test_a_source_that_is_right_drafts_by_itself_and_is_named():
    rounds = run(Proposals(Oracle([1, 2, 3]), SourceOdds({"sure": 0.9})), profit(longest=0), drafter=False)
    assert len(rounds) <= 8
    assert {name for item in rounds for name in item.sources} == {"oracle"}
    assert all(len(item.sources) == item.accepted for item in rounds)


def test_a_source_that_is_wrong_is_soon_left_alone():
    odds = SourceOdds({"sure": 0.9})
    rounds = run(Proposals(Oracle([1, 2, 3], wrong=True), odds), profit(STEEP, longest=0), drafter=False, tokens=200)
    assert odds.chance("sure") < 0.1
    assert sum(item.drafted for item in rounds[10:]) == 0


def test_it_is_calibrated_without_being_used():
    """Every guess is compared with what was emitted, so a source is tried as soon as it would pay."""
    odds = SourceOdds({"sure": 0.01})
    rounds = run(Proposals(Oracle([1, 2, 3]), odds), profit(STEEP, longest=0), drafter=False)
    assert odds.chance("sure") > 0.9
    assert rounds[0].drafted == 0


def test_the_drafters_drafts_are_extended():
    """Where the drafter is surer of its first tokens, the source goes on after them."""

    class After(Oracle):
        def guess(self, ahead, maximum):
            return super().guess(ahead, maximum) if ahead else Guess("oracle")

    rounds = run(Proposals(After([1, 2, 3]), SourceOdds({"sure": 0.9})), profit(longest=2))
    assert any(item.sources[:3] == ("drafter", "drafter", "oracle") for item in rounds)


def test_a_guess_costs_no_draft_step():
    policy = profit()
    policy.offer((0.9,) * 6)
    plan = policy.plan()
    assert (plan.offered > 0, plan.draft_length, policy.last.mode) == (True, 0, "offer")
    policy.observe(RoundResult(plan.offered, plan.offered))
    assert policy.last.cost == pytest.approx(FLAT.verify[plan.offered])


class Constant:
    """Guesses the same two tokens at all times."""

    def guess(self, ahead: Sequence[int], maximum: int) -> Guess:
        return Guess("constant", (1, 0)[:maximum], ("sure", "sure")[:maximum])

    def add(self, tokens: Sequence[int]) -> None:
        """Keeps nothing."""


@pytest.mark.parametrize("longest", [0, 1])
def test_sampled_output_keeps_its_distribution_exactly(longest, monkeypatch):
    """By enumeration: guesses instead of drafts (0), and after a sampled draft (1)."""
    row, params = random_rows(1, 3), SamplingParams(temperature=0.8, presence_penalty=0.3)

    def once(choices: Choices) -> tuple[int, ...]:
        target = StochasticTarget(row)
        rule = BlockRule(Sampler(params), [1, 2], choices.uniform)
        policy = Profit(SettledCosts(FLAT), AcceptanceModel(), longest=longest, max_rows=3)
        return written_with_sources(target, rule, policy)

    def written_with_sources(target, rule, policy):
        target.prefill([1])
        drafter = StochasticDrafter(target, random_rows(2, 3)) if longest else None
        emitted: list[int] = []
        proposals = Proposals(Constant(), SourceOdds({"sure": 0.6}))
        for item in decode(target, drafter, Decoding(target, 2, policy, max_tokens=3, rule=rule, proposals=proposals)):
            emitted += item.tokens
        return tuple(emitted)

    assert largest_difference(distribution_of(once, monkeypatch), exact(row, params, [1, 2], 3)) < 1e-12
