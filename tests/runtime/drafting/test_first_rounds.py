"""The first rounds on a machine where nothing was measured: drafts are tried, an unlucky one does not end them, and asking costs little."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from edge_export.checkpoint.sources import chat_pair, reference_pair, shipped_acceptance
from edge_runtime.calibration.measured import AcceptanceCache, exported_counts
from edge_runtime.drafting.acceptance_model import AcceptanceModel, PositionModel
from edge_runtime.drafting.cost_model import CostCurve, MeasuredCosts
from edge_runtime.drafting.policies import Fixed, RoundPlan, RoundResult, Timing
from edge_runtime.drafting.profit_policy import FIRST_WAIT, LONGEST_WAIT, Profit
from scripted import MANIFEST
from simulated_rounds import ExactCosts, played

# Milliseconds of a pair of under a millisecond, the chat pair on Zen 5, and of one of E2B's shapes.
SMALL = ExactCosts([0.24 + 0.02 * n for n in range(13)], 0.03)
LARGE = ExactCosts([50.0 + 3.5 * n for n in range(13)], 2.0)
# The chat pair as it was computed once: forwards without their fixed part, beside which drafts look dear.
TOO_CHEAP = MeasuredCosts(verify=tuple(0.03 + 0.004 * n for n in range(13)), step=0.06, overhead=0.1, timings=(0,) * 13)


def computed(truth: ExactCosts) -> CostCurve:
    """Provisional costs that are right."""
    verify = tuple(truth.verify(rows) for rows in range(1, 14))
    return CostCurve(MeasuredCosts(verify=verify, step=truth.draft(1), timings=(0,) * 13))


def play_round(policy: Profit, truth: ExactCosts, confidences: Sequence[float], *, right: bool) -> tuple[RoundPlan, int]:
    """Plays a round whose drafts are all right or all wrong; returns its plan and how many tokens were drafted."""
    plan, drafted = policy.plan(), 0
    while drafted < plan.draft_length:
        drafted += 1
        if plan.should_continue is not None and not plan.should_continue(confidences[drafted - 1]):
            break
    verified, padding = plan.to_verify(0 if plan.shadow else drafted)
    rows = 1 + verified + padding
    timing = Timing(length=100, steps=drafted, draft_seconds=truth.draft(drafted), rows=rows, verify_seconds=truth.verify(rows))
    left_out = None if verified == drafted else right
    policy.observe(RoundResult(verified, verified if right else 0, left_out, timing))
    return plan, drafted


@pytest.mark.parametrize("unlucky", [1, 2, 5])
def test_unlucky_first_rounds_do_not_end_drafting(unlucky: int) -> None:
    """As on the chat pair: forwards cost ten times what was computed, sure drafts failed first, and all later ones are right."""
    policy = Profit(CostCurve(TOO_CHEAP), AcceptanceModel(), longest=8)
    for _ in range(unlucky):
        play_round(policy, SMALL, [0.9] * 8, right=False)
    drafted = [play_round(policy, SMALL, [0.9] * 8, right=True)[1] for _ in range(40)]
    assert statistics.mean(drafted[20:]) > 4


def test_a_policy_that_stopped_drafting_asks_after_4_8_and_16_rounds() -> None:
    policy = Profit(SMALL, PositionModel(prior=0.01), stepwise=False)
    drafted = [play_round(policy, SMALL, [0.01] * 8, right=False)[1] for _ in range(200)]
    asked = [number for number, length in enumerate(drafted) if length]
    pauses = [after - before - 1 for before, after in zip([-1, *asked], asked, strict=False)]
    assert pauses[:4] == [FIRST_WAIT, 8, 16, 32]
    assert set(pauses[4:]) == {LONGEST_WAIT}


def test_another_request_is_asked_about_sooner() -> None:
    policy = Profit(SMALL, PositionModel(prior=0.01), stepwise=False)
    for _ in range(100):
        play_round(policy, SMALL, [0.01] * 8, right=False)
    policy.begin_request()
    assert any(play_round(policy, SMALL, [0.01] * 8, right=False)[1] for _ in range(FIRST_WAIT + 1))


@pytest.mark.parametrize("start", [TOO_CHEAP, MeasuredCosts(verify=(0.3,) * 13, step=0.01, timings=(0,) * 13)])
@pytest.mark.parametrize("confidence", [0.02, 0.5, 0.99])
def test_without_any_figures_the_first_round_tries_two_or_three(start: MeasuredCosts, confidence: float) -> None:
    """Whether drafts are computed to be dear or to cost nothing; an unsure draft is followed where none seemed to pay."""
    policy = Profit(CostCurve(start), AcceptanceModel(), longest=8)
    plan, _ = play_round(policy, SMALL, [confidence] * 8, right=False)
    assert not plan.shadow
    assert plan.draft_length in (2, 3)


def test_a_measured_acceptance_lets_the_first_round_draft_more() -> None:
    counts = AcceptanceModel()
    for _ in range(50):
        counts.observe([12] * 8, 8, 8)
    model = AcceptanceModel.from_json(counts.to_json())
    assert play_round(Profit(computed(SMALL), model, longest=8), SMALL, [0.999] * 8, right=True)[1] == 8


def test_what_a_request_taught_counts_in_the_first_round_of_the_next() -> None:
    """Costs and acceptance are computed anew between two requests, and not only every few rounds."""
    policy = Profit(ExactCosts([1.0 + 0.1 * n for n in range(13)], 0.05), PositionModel(prior=0.9), stepwise=False)
    lengths = [play_round(policy, SMALL, [0.9] * 12, right=False)[0].draft_length for _ in range(4)]
    assert lengths == sorted(lengths)
    policy.begin_request()
    assert policy.plan().draft_length < lengths[0]


def test_rounds_that_are_only_timed_wait_where_they_could_hardly_pay() -> None:
    """Where all drafts are right, a round without drafts brings a ninth of the tokens, and padded rows none: both are timed late."""
    policy, trials = Profit(computed(SMALL), AcceptanceModel(), longest=8, max_rows=12), list[int]()
    for number in range(2000):
        _, drafted = play_round(policy, SMALL, [0.999] * 8, right=True)
        if policy.last.mode == "trial" and (not drafted or policy.last.padding):
            trials.append(number)
    assert min(trials) > 30
    assert len(trials) >= 3 * 5, "they are timed in the end"


@pytest.mark.parametrize("pair", [chat_pair, reference_pair])
def test_the_acceptance_that_shipped_pairs_carry_reaches_the_policy(pair: Callable[[], tuple[Path, Path]]) -> None:
    """In place of what the export noted, which is nothing with --no-verify; without either the first draft is short."""
    counts = shipped_acceptance(pair()[1])
    assert exported_counts(MANIFEST, {"drafts": {"confidence": "noted"}}) == "noted"
    carried = exported_counts(replace(MANIFEST, acceptance=counts), None)
    drafted = [
        play_round(Profit(computed(SMALL), AcceptanceCache(["pair"], exported).model, longest=8), SMALL, [0.999] * 8, right=True)[1]
        for exported in (carried, None)
    ]
    assert drafted == [8, 3]


@pytest.mark.parametrize("truth", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("mean", [0.0, 0.1])
@pytest.mark.parametrize(("tokens", "loss"), [(30, 0.08), (200, 0.04)])
def test_where_drafts_bring_nothing_little_is_lost(truth: ExactCosts, mean: float, tokens: int, loss: float) -> None:
    """With nothing known but right computed costs; averaged over starts."""
    shares = []
    for seed in range(40):
        policy = Profit(computed(truth), AcceptanceModel(), longest=8)
        emitted, _, spent = played(truth, policy, lambda _: mean, tokens, seed)
        best = max(_fixed_rate(truth, length, mean, tokens, seed) for length in (0, 1))
        shares.append(emitted / spent / best)
    assert statistics.mean(shares) >= 1 - loss


def _fixed_rate(truth: ExactCosts, length: int, mean: float, tokens: int, seed: int) -> float:
    emitted, _, spent = played(truth, Fixed(length), lambda _: mean, tokens, seed)
    return emitted / spent
