"""Draft length by profit, against simulated machines and drafters whose truth is known, from the first round on."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_export.checkpoint.sources import chat_pair, reference_pair, shipped_acceptance
from edge_runtime.calibration.measured import AcceptanceCache, exported_counts
from edge_runtime.drafting.acceptance_model import AcceptanceModel, PositionModel
from edge_runtime.drafting.cost_model import CostCurve, MeasuredCosts
from edge_runtime.drafting.policies import Fixed, RoundPlan, RoundResult, Timing
from edge_runtime.drafting.profit_policy import ASK_LENGTH, FIRST_WAIT, LONGEST_WAIT, Profit
from scripted import MANIFEST
from simulated_rounds import CURVES, FLAT, LINEAR, NOT_REPACKED, REPACKED, STEEP, ExactCosts, played, rate

TOKENS, SEEDS = 300, 3


@cache
def static_rates(curve: str, step: float, acceptance: float) -> list[float]:
    """Rate of each fixed length, 0 first, in the long run: a round of n drafts emits 1 + p + ... + p^n tokens (Leviathan et al. 2023)."""
    verify = CURVES[curve]
    return [sum(acceptance**i for i in range(n + 1)) / (n * step + verify[n]) for n in range(13)]


@cache
def profit_rate(curve: str, step: float, acceptance: float) -> float:
    costs = ExactCosts(CURVES[curve], step)
    return statistics.mean(rate(costs, Profit(costs, AcceptanceModel()), lambda _: acceptance, TOKENS, seed) for seed in range(SEEDS))


GRID = [(curve, step, p) for curve in CURVES for step in (0.3, 1.0, 4.0) for p in (0.0, 0.3, 0.5, 0.7, 0.85, 0.95)]


def test_it_is_on_average_within_two_percent_of_the_best_fixed_length_and_nowhere_far_off() -> None:
    ratios = [profit_rate(*point) / max(static_rates(*point)) for point in GRID]
    assert statistics.geometric_mean(ratios) > 1.0
    assert min(ratios) > 0.95


def test_once_it_has_seen_200_tokens_it_regrets_next_to_nothing() -> None:
    def settled(curve: str, step: float, p: float) -> float:
        costs, rates = ExactCosts(CURVES[curve], step), []
        for seed in range(4):
            policy = Profit(costs, AcceptanceModel())
            rate(costs, policy, lambda _: p, 200, 100 + seed)
            rates.append(rate(costs, policy, lambda _: p, 600, seed))
        return statistics.mean(rates) / max(static_rates(curve, step, p))

    # Every second one, as on a chessboard: each curve, step and acceptance is met with half of the others.
    points = [point for number, point in enumerate(GRID) if (number + number // 6) % 2 == 0]
    ratios = [settled(*point) for point in points]
    assert statistics.geometric_mean(ratios) > 1.0
    assert sum(ratio > 0.98 for ratio in ratios) >= 0.95 * len(points)
    assert min(ratios) > 0.97


def test_it_is_never_slower_than_plain_decoding_by_more_than_two_percent_but_for_what_learning_takes() -> None:
    ratios = {point: profit_rate(*point) / static_rates(*point)[0] for point in GRID}
    assert min(ratios.values()) > 0.97, min(ratios, key=ratios.__getitem__)
    useless = [ratio for (_, _, p), ratio in ratios.items() if p == 0]
    assert min(useless) >= 0.98


@pytest.mark.parametrize(
    ("curve", "step", "p"), [("repacked", 4.0, 0.5), ("repacked", 4.0, 0.4), ("repacked", 1.0, 0.3), ("steep", 1.0, 0.5)]
)
def test_where_drafts_hardly_fail_to_pay_it_loses_two_percent_at_most_in_the_long_run(curve: str, step: float, p: float) -> None:
    costs = ExactCosts(CURVES[curve], step)
    rates = [rate(costs, Profit(costs, AcceptanceModel()), lambda _: p, 3000, seed) for seed in range(3)]
    assert statistics.mean(rates) / static_rates(curve, step, p)[0] >= 0.98


def test_drafts_that_look_bad_are_not_verified() -> None:
    """After three sure drafts a hopeless fourth: it costs a row and brings nothing. Where all must be verified, it is."""
    policy = Profit(ExactCosts(STEEP, 0.1), AcceptanceModel(), longest=4)

    def draft(*, any_prefix: bool) -> int:
        plan = policy.plan(any_prefix=any_prefix)
        for confidence in (0.999, 0.999, 0.999, 0.01):
            plan.should_continue(confidence)
        return plan.to_verify(4)[0]

    assert draft(any_prefix=True) == 3
    assert draft(any_prefix=False) == 4
    policy.observe(RoundResult(4, 3))
    assert (policy.last.drafted, policy.last.verified) == (4, 4)


def test_a_drafter_without_confidence_gets_shadow_drafts_too() -> None:
    """As with prompt lookup: after rejected drafts it asks seldom, and some accepted drafts make it draft again."""
    policy = Profit(ExactCosts(LINEAR, 1e-6), PositionModel(), stepwise=False)

    def play(rounds: int, *, right: bool) -> int:
        drafted = 0
        for _ in range(rounds):
            plan = policy.plan()
            length = 0 if plan.shadow else plan.draft_length
            verified, _ = plan.to_verify(length)
            policy.observe(RoundResult(verified, length if right else 0, right if plan.shadow else None))
            drafted += length
        return drafted

    play(60, right=False)
    assert play(20, right=False) <= ASK_LENGTH
    assert play(60, right=True) > 60


@pytest.mark.parametrize("curve", ["linear", "repacked"])
def test_it_finds_its_way_back_when_the_domain_changes(curve: str) -> None:
    costs = ExactCosts(CURVES[curve], 1.0)
    easy, hard = (max(static_rates(curve, 1.0, p)) for p in (0.85, 0.3))
    oracle = 2 / (1 / easy + 1 / hard)
    rates = [rate(costs, Profit(costs, AcceptanceModel()), lambda n: 0.85 if n // 150 % 2 == 0 else 0.3, 1200, s) for s in range(SEEDS)]
    assert statistics.mean(rates) > 0.95 * oracle


def test_the_cheap_batches_of_a_curve_are_found() -> None:
    """Four rows cost less than two or three on the repacked curve: so drafts of 3, or 2 and a row that is thrown away."""
    policy = Profit(ExactCosts(REPACKED, 0.3), PositionModel(prior=0.7), stepwise=False)
    plan = policy.plan()
    assert plan.draft_length == 3
    assert [plan.to_verify(n) for n in (2, 3)] == [(2, 1), (3, 0)]


def test_where_one_row_is_dear_even_plain_decoding_pads() -> None:
    policy = Profit(ExactCosts(NOT_REPACKED, 40.0), PositionModel(prior=0.05), stepwise=False)
    plan = policy.plan()
    assert plan.draft_length == 0
    assert plan.to_verify(0) == (0, 1)


def test_a_sure_drafter_is_followed_further_than_an_unsure_one() -> None:
    def drafted(confidence: float) -> int:
        policy = Profit(ExactCosts(LINEAR, 0.5), AcceptanceModel())
        plan = policy.plan()
        count = 1
        while plan.should_continue(confidence) and count < 12:
            count += 1
        return count

    assert drafted(0.999) > drafted(0.6) >= drafted(0.1) == 1


def test_where_drafts_are_useless_it_hardly_drafts() -> None:
    costs = ExactCosts(STEEP, 2.0)
    policy = Profit(costs, AcceptanceModel())
    modes = []
    for _ in range(500):
        plan = policy.plan()
        if plan.draft_length:
            plan.should_continue(0.02)
        policy.observe(RoundResult(0 if plan.shadow else plan.draft_length, 0, False if plan.shadow else None))
        modes.append(policy.last.mode)
    assert modes[-100:].count("draft") == 0
    assert {"shadow", "ask"} & set(modes)
    assert modes[-100:].count("shadow") + modes[-100:].count("ask") <= 4


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.001, 100), min_size=13, max_size=13),
    st.floats(1e-9, 50),
    st.integers(0, 12),
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=120),
    st.booleans(),
    st.booleans(),
)
def test_whatever_happens_lengths_and_rows_stay_legal(verify, step, longest, outcomes, stepwise, any_prefix) -> None:
    policy = Profit(ExactCosts(verify, step), AcceptanceModel() if stepwise else PositionModel(), longest=longest, stepwise=stepwise)
    for confidence, right in outcomes:
        plan = policy.plan(any_prefix=any_prefix)
        assert 0 <= plan.draft_length <= longest
        drafted = 0
        while drafted < plan.draft_length:
            drafted += 1
            if stepwise and not plan.should_continue(confidence):
                break
        if plan.shadow:
            assert plan.draft_length == 1
            drafted = 0
        verified, padding = plan.to_verify(drafted)
        assert 0 <= verified <= drafted
        assert verified == drafted or any_prefix
        assert verified + 1 <= verified + 1 + padding <= longest + 1
        policy.observe(RoundResult(verified, verified if right else 0, right if plan.shadow else None))
        assert policy.last is not None


def test_shadow_drafts_pay_the_fixed_overhead() -> None:
    """A drafter whose first token costs as much as a verify gets a shadow draft once in a hundred tokens."""
    costs = CostCurve(MeasuredCosts(verify=STEEP, step=1.0, overhead=19.0))
    policy = Profit(costs, AcceptanceModel())
    shadow_drafts = 0
    for _ in range(1000):
        plan = policy.plan()
        if plan.draft_length:
            plan.should_continue(0.02)
        shadow_drafts += plan.shadow
        verified = 0 if plan.shadow else plan.to_verify(plan.draft_length)[0]
        policy.observe(RoundResult(verified, 0, False if plan.shadow else None))
    assert 5 <= shadow_drafts <= 11


def test_requests_that_share_a_forward_draft_no_further_than_the_batch_of_all_pays() -> None:
    """On a steep curve drafts pay for one request, hardly for four: their rows make one batch."""

    def planned(costs: ExactCosts, requests: int) -> int:
        policy = Profit(costs, PositionModel(prior=0.7), stepwise=False)
        return policy.plan(requests).draft_length

    free_rows = ExactCosts((10.0,) * 13, 0.1)
    dear_beyond_eight = ExactCosts((10.0,) * 8 + tuple(10.0 + 10 * n for n in range(1, 6)), 0.1)
    assert min(planned(free_rows, 1), planned(free_rows, 4)) >= 4
    assert planned(dear_beyond_eight, 1) >= 4 > planned(dear_beyond_eight, 4) >= 1
    assert [planned(ExactCosts(STEEP, 4.0), n) for n in (1, 2, 4)][-1] == 0


@pytest.mark.parametrize("requests", [4, 8])
def test_requests_that_share_a_forward_lose_nothing_where_rows_are_arithmetic(requests: int) -> None:
    """A row costs as much as it can bring, and what was known before says less; timings scatter, so some number of rows looks cheap."""
    dice, rows_known = random.Random(1), tuple(15.0 + 3 * rows for rows in range(13))
    costs = CostCurve(MeasuredCosts(verify=rows_known, step=0.1, timings=(0,) * 13))
    policies = [Profit(costs, AcceptanceModel(), longest=8) for _ in range(requests)]
    plain, emitted, spent = 5.0 * requests, 0, 0.0
    for number in range(400):
        drafts = []
        for policy in policies:
            plan, confidences = policy.plan(requests), list[float]()
            while len(confidences) < plan.draft_length:
                confidences.append(dice.choice((0.5, 0.8, 0.97)))
                if plan.should_continue is None or not plan.should_continue(confidences[-1]):
                    break
            verified, padding = plan.to_verify(0 if plan.shadow else len(confidences))
            right = next((place for place, sure in enumerate(confidences) if dice.random() > sure), len(confidences))
            drafts.append((plan.shadow, verified, padding, right, len(confidences)))
        rows = sum(1 + verified + padding for _, verified, padding, _, _ in drafts)
        seconds = plain + 5.0 * (rows - requests)
        spent += seconds + 0.1 * sum(draft[-1] for draft in drafts)
        timing = Timing(100, sum(draft[-1] for draft in drafts), 0.1, rows, seconds * math.exp(dice.gauss(0, 0.2)), requests)
        for policy, (shadow, verified, _, right, _) in zip(policies, drafts, strict=True):
            shadow_right = bool(right) if shadow else None
            policy.observe(RoundResult(verified, min(verified, right), shadow_right, timing if policy is policies[0] else None))
            emitted += min(verified, right) + 1
        if number == 99:
            emitted, spent = 0, 0.0
    assert emitted / spent * plain / requests > 0.97


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9])
def test_trials_time_every_number_of_rows_and_lose_a_fiftieth(acceptance: float) -> None:
    """Costs that were computed as if rows were dear, or free, become those of the machine."""
    truth = ExactCosts(LINEAR, 1.0)
    for start in (STEEP, FLAT):
        costs = CostCurve(MeasuredCosts(verify=start, step=1.0, timings=(0,) * 13))
        policy = Profit(costs, AcceptanceModel(), longest=8)
        rate(truth, policy, lambda _: acceptance, 6000, 1)
        assert not costs.rows_to_time(9)
        off, before = (math.log(curve[8] / curve[0] * LINEAR[0] / LINEAR[8]) for curve in ([costs.verify(n) for n in range(1, 14)], start))
        assert 0 <= off / before < 0.7
        again = rate(truth, policy, lambda _: acceptance, 600, 2)
        settled = rate(truth, Profit(truth, AcceptanceModel(), longest=8), lambda _: acceptance, 600, 2)
        assert again > 0.95 * settled


def test_trials_stay_within_their_budget() -> None:
    class NeverSettled(ExactCosts):
        def rows_to_time(self, limit: int) -> list[int]:
            return [limit]

    dear = NeverSettled(STEEP, 1.0)
    policy, modes = Profit(dear, AcceptanceModel(), longest=8), list[str]()
    for _ in range(10_000):
        plan, drafted = policy.plan(), 0
        while drafted < plan.draft_length:
            drafted += 1
            if not plan.should_continue(0.02):
                break
        verified, padding = plan.to_verify(0 if plan.shadow else drafted)
        mode = policy.last.mode
        assert mode != "trial" or verified + 1 + padding == 9
        policy.observe(RoundResult(verified, 0, False if plan.shadow else None))
        modes.append(mode)
    lost = modes.count("trial") * (STEEP[8] + 8.0 - STEEP[0])
    assert 0 < lost <= 0.021 * (10_000 * STEEP[0] + lost)


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
