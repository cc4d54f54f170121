"""Sources of drafts beside the drafter: what they guess, how they are calibrated and weighed, and that the output stays what it is."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.decoding.acceptance import BlockRule
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.decoding.sampling import Sampler, SamplingParams
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.cost_model import MeasuredCosts
from edge_runtime.drafting.policies import RoundResult
from edge_runtime.drafting.profit_policy import Profit
from edge_runtime.drafting.sources import SHORTEST_MATCH, Guess, LookupDrafter, Proposals, SourceOdds, SuffixAutomaton, TextMemory
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


def longest_by_search(text: list[int], ahead: list[int]) -> int:
    """The longest end of the text and `ahead` that occurs in the text before."""
    whole = text + ahead
    last = len(text) if ahead else len(text) - 1
    result = 0
    for length in range(1, len(whole)):
        if any(text[end - length : end] == whole[-length:] for end in range(length, last + 1)):
            result = length
    return result


@pytest.mark.parametrize("letters", [1, 2, 3, 6])
def test_the_longest_repeat_is_that_of_a_search(letters):
    chance = random.Random(letters)
    for _ in range(12):
        automaton, text = SuffixAutomaton(), []
        for _ in range(25):
            text.append(chance.randrange(letters))
            automaton.append(text[-1])
            ahead = [chance.randrange(letters) for _ in range(chance.randrange(4))]
            length, end = automaton.longest_repeat(ahead)
            assert length == longest_by_search(text, ahead)
            assert (text[end - length : end] == [*text, *ahead][-length:]) if length else True


def test_what_followed_is_guessed_to_follow_again():
    memory = TextMemory([1, 2, 3, 4, 5, 6, 9, 2, 3])
    assert memory.guess((), 3).tokens == (4, 5, 6)
    assert memory.guess((4, 5), 2).tokens == (6, 9)
    assert memory.guess((7,), 3).tokens == ()


def test_emitted_tokens_are_remembered_and_longer_matches_are_other_evidence():
    memory = TextMemory([1, 2, 3, 4, 5, 6, 7])
    memory.add([8, 1, 2])
    short = memory.guess((), 1).bins
    memory.add([3, 4, 5, 6])
    assert memory.guess((), 1).tokens == (7,)
    assert memory.guess((), 1).bins != short


def test_a_predicted_text_is_guessed_after_the_prompt_and_found_in_parts():
    memory = TextMemory([1, 2, 3], predicted=[7, 8, 9, 5])
    first = memory.guess((), 6)
    assert first.tokens == (7, 8, 9, 5), "a copy ends with the predicted text"
    memory.add([6, 8, 9])
    assert memory.guess((), 2).tokens == (5,)


TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def draft(text: list[int], length: int) -> list[int]:
    target = ScriptedTarget()
    target.prefill(text[:-1])
    return LookupDrafter(target).draft(text[-1], length)


def slow_draft(text: list[int], length: int) -> list[int]:
    """The definition: the longest match, the latest of those, copied on and on."""
    for size in range(len(text) - 1, SHORTEST_MATCH - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[len(text) - size :]:
                grown = list(text)
                for place in range(start + size, start + size + length):
                    grown.append(grown[place])
                return grown[len(text) :]
    return []


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, length=st.integers(1, 12))
def test_drafts_are_those_of_the_definition(text, length):
    assert draft(text, length) == slow_draft(text, length)
