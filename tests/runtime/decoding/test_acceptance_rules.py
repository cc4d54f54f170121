"""The rule of a request: which one options and method give, what it accepts, what a seed fixes; no round leaves anything to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edge_runtime.decoding.acceptance import ACCEPTANCE_METHODS, GREEDY, BlockRule, CoupledRule, accept_greedy, acceptance_rule
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.errors import BackendError, RequestError
from stochastic import CertainDrafter, StochasticDrafter, StochasticTarget, random_rows, write

SIZE, PROMPT = 6, [1, 2]
TARGET = random_rows(1, SIZE)
PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "penalty_window": 3}


def written(params: SamplingParams, method: str, *, drafter_seed: int | None = None, length: int = 3, tokens: int = 40) -> tuple[int, ...]:
    target = StochasticTarget(TARGET)
    drafter = None if drafter_seed is None else StochasticDrafter(target, random_rows(drafter_seed, SIZE))
    return write(target, drafter, PROMPT, acceptance_rule(params, method, PROMPT), length=length, tokens=tokens)


def test_an_unknown_method_is_named_with_those_there_are() -> None:
    with pytest.raises(RequestError, match="method 'lucky' is not known; choose one of coupled, block"):
        acceptance_rule(SamplingParams(temperature=0), "lucky", PROMPT)


@pytest.mark.parametrize("method", ACCEPTANCE_METHODS)
def test_temperature_zero_is_greedy_unless_something_changes_the_likeliest_token(method: str) -> None:
    assert acceptance_rule(SamplingParams(temperature=0, top_k=3), method, PROMPT) is GREEDY
    assert GREEDY.sampler is None
    assert type(acceptance_rule(SamplingParams(temperature=0.1), method, PROMPT)) is not type(GREEDY)
    biased = SamplingParams(temperature=0, logit_bias={4: -np.inf}, **PENALTIES)
    assert acceptance_rule(biased, method, PROMPT) is not GREEDY
    plain = written(biased, method)
    assert 4 not in plain
    assert {written(biased, method, drafter_seed=seed) for seed in (1, 2)} == {plain}


def test_without_a_method_a_seed_decides() -> None:
    assert type(acceptance_rule(SamplingParams(seed=0), None, PROMPT)) is CoupledRule
    assert type(acceptance_rule(SamplingParams(), None, PROMPT)) is BlockRule


@pytest.mark.parametrize("method", ACCEPTANCE_METHODS)
def test_a_seed_fixes_the_text_and_none_does_not(method: str) -> None:
    assert written(SamplingParams(seed=4), method, drafter_seed=2) == written(SamplingParams(seed=4), method, drafter_seed=2)
    assert len({written(SamplingParams(seed=seed), method, drafter_seed=2) for seed in (4, 5, None)}) == 3
    assert len({written(SamplingParams(), method, drafter_seed=2) for _ in range(2)}) == 2


FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": PENALTIES,
    "repetition": {"repetition_penalty": 1.7},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": 2},
    "top-p and min-p": {"top_p": 0.9, "min_p": 0.02},
    "bias": {"logit_bias": {0: 2.0, 4: -np.inf}},
    "greedy with penalties": {"temperature": 0, **PENALTIES},
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_seed_gives_the_same_text_with_any_drafts(name: str) -> None:
    params = SamplingParams(seed=9, **FILTERS[name])
    plain = written(params, "coupled")
    assert {written(params, "coupled", drafter_seed=seed, length=length) for seed in (1, 2) for length in (1, 2, 3, 5, 8, 12)} == {plain}


def test_a_text_that_is_continued_goes_on_as_it_would_have() -> None:
    """The place of a token counts from the beginning of the text, so a second turn has other noise than the first."""
    whole = written(SamplingParams(seed=3), "coupled")
    target = StochasticTarget(TARGET)
    past = [*PROMPT, *whole[:17]]
    assert write(target, None, past, acceptance_rule(SamplingParams(seed=3), "coupled", past), tokens=23) == whole[17:]


def test_shared_noise_accepts_more_than_independent_draws_would() -> None:
    """A drafter with the target's own distribution is always right; one with another distribution often enough."""
    target = StochasticTarget(TARGET)
    write(
        target, StochasticDrafter(target, TARGET), PROMPT, acceptance_rule(SamplingParams(seed=1), "coupled", PROMPT), length=3, tokens=40
    )
    assert len(target.rows) == 10


def test_which_drafts_may_be_left_unverified() -> None:
    """Where a draft was drawn, leaving it out because of a later one would change the distribution."""
    assert GREEDY.any_prefix
    assert {m: acceptance_rule(SamplingParams(), m, PROMPT).any_prefix for m in ACCEPTANCE_METHODS} == {
        "coupled": True,
        "block": False,
    }


def test_the_drafter_chooses_what_the_target_would_after_the_same_tokens() -> None:
    row = np.array([0.9, 1.0, 2.0, 3.0, 0.5, 0.0], np.float32)
    choose = acceptance_rule(SamplingParams(presence_penalty=4.0, temperature=0.001), "coupled", PROMPT).sampler
    assert choose is not None
    assert [choose(row) for _ in range(3)] == [3, 0, 4]  # 1 and 2 are in the prompt, 3 and 0 were drafted


@pytest.mark.parametrize("method", ACCEPTANCE_METHODS)
def test_a_round_leaves_no_drafts_to_the_next(method: str) -> None:
    rule = acceptance_rule(SamplingParams(presence_penalty=4.0, seed=1), method, PROMPT)
    row = np.array([[0.0, 1.0, 2.0, 9.0, 0.0, 0.0]] * 3, np.float32)
    for _ in range(3):
        assert rule.sampler is not None
        drafts = [rule.sampler(row[0]) for _ in range(2)]
        assert None not in drafts
        rule.accept(drafts, row)  # type: ignore[arg-type]
    assert rule.accept([], row).accepted == 0


def test_a_drafter_that_hides_what_it_drew_is_refused() -> None:
    for hide in (lambda drafts: [], lambda drafts: drafts[::-1], lambda drafts: drafts[1:], lambda drafts: drafts[:-1]):
        rule = acceptance_rule(SamplingParams(temperature=0.01, presence_penalty=1.0, seed=1), "block", PROMPT)
        assert rule.sampler is not None
        first = rule.sampler(np.array([0.0, 1.0, 2.0, 9.0, 0.0, 0.0], np.float32))
        second = rule.sampler(np.array([9.0, 1.0, 2.0, 0.0, 0.0, 0.0], np.float32))
        assert (first, second) == (3, 0)
        with pytest.raises(BackendError, match=r"the drafter drew \[3, 0\] but returned"):
            rule.accept(hide([3, 0]), np.zeros((3, SIZE), np.float32))


def test_drafts_that_were_not_drawn_are_certain() -> None:
    """A certain draft stands with the target's own probability, whatever comes after it."""
    target = StochasticTarget(TARGET)
    drafter = CertainDrafter(target, TARGET)
    rule = acceptance_rule(SamplingParams(temperature=0.05, seed=2), "block", PROMPT)
    assert len(write(target, drafter, PROMPT, rule, length=3, tokens=40)) == 40
    assert len(target.rows) < 30, "a target this sure accepts its own likeliest tokens"


def rows(*choices: int) -> np.ndarray:
    logits = np.full((len(choices), 5), -1.0, dtype=np.float32)
    logits[np.arange(len(choices)), choices] = 2.0
    return logits


@pytest.mark.parametrize(
    ("drafts", "choices", "accepted", "following"),
    [([], [3], 0, 3), ([1], [1, 4], 1, 4), ([1], [2, 4], 0, 2), ([1, 2, 3], [1, 2, 3, 0], 3, 0), ([1, 2, 3], [1, 0, 3, 4], 1, 0)],
)
def test_longest_prefix_and_the_targets_own_token(drafts, choices, accepted, following):
    verdict = accept_greedy(drafts, rows(*choices))
    assert (verdict.accepted, verdict.next_token) == (accepted, following)


@pytest.mark.parametrize(
    ("row", "wrong"), [([0.0, float("nan"), 1.0], "hold NaN"), ([0.0, 0.0, 0.0], "are all 0.0"), ([2.0, 2.0], "are all 2.0")]
)
def test_logits_of_a_broken_model_are_refused(row: list[float], wrong: str) -> None:
    with pytest.raises(BackendError, match=wrong):
        accept_greedy([], np.array([row], np.float32))


@pytest.mark.parametrize("row", [[3.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
def test_rows_that_only_look_alike_are_no_error(row: list[float]) -> None:
    assert accept_greedy([], np.array([row], np.float32)).next_token == 0
