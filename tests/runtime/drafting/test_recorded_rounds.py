"""The default policy on recorded drafts: beside other programs, and in the first answers of a small pair."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.cost_model import MAX_ROWS, CostCurve, MeasuredCosts
from edge_runtime.drafting.policies import DraftLengthPolicy, Fixed, PolicyOptions, policy_kind
from edge_runtime.drafting.profit_policy import Profit
from recorded_rounds import Place, RecordedLoad, Text, recorded_texts, replayed, speed_up


def kept(costs: MeasuredCosts, off: float, spread: float) -> MeasuredCosts:
    """What a probe may give on a busy machine: each figure wrong in its own way, drafts by a factor `off`."""
    dice = random.Random(5)
    verify = tuple(seconds * math.exp(dice.gauss(0, spread)) for seconds in costs.verify)
    return MeasuredCosts(verify=verify, step=costs.step * off, overhead=costs.overhead * off, timings=(1,) * MAX_ROWS)


@pytest.mark.parametrize("off", [None, 1.0, 20.0])
def test_on_a_busy_machine_profit_is_no_slower_than_rolling(off: float | None) -> None:
    """On the widened pair beside seven other programs, two cores for all, whatever was measured on such a machine before."""
    load, texts = RecordedLoad(), recorded_texts()
    rolling = speed_up(lambda: policy_kind("rolling").new(PolicyOptions(first=3, longest=8)), texts, load)
    before = None if off is None else kept(load.computed, off, 0.5)
    profit = speed_up(lambda: Profit(CostCurve(load.computed, before), AcceptanceModel(), longest=8), texts, load)
    assert rolling > 1.5
    assert profit > 0.95 * rolling


# A pair of under a millisecond: rounded timings of the chat pair on two cores of a Zen 5 (ONNX graphs, row kernels). A session may have
# computed these or other costs: without the fixed part of a forward, or of rows as dear as those of stock kernels.
SMALL_PAIR = MeasuredCosts(verify=tuple(0.24e-3 + 0.02e-3 * n for n in range(MAX_ROWS)), step=0.025e-3, overhead=0.03e-3)
FIRST_COSTS = {
    "right": SMALL_PAIR,
    "no fixed part": MeasuredCosts(verify=tuple(0.03e-3 + 0.004e-3 * n for n in range(MAX_ROWS)), step=0.06e-3, overhead=0.1e-3),
    "dear rows": MeasuredCosts(verify=tuple(0.24e-3 * (1 + 0.25 * n) for n in range(MAX_ROWS)), step=0.06e-3, overhead=0.1e-3),
}


def answers(unlucky: int) -> list[Text]:
    """20 answers of 30 tokens; the first `unlucky` places of the first one accept nothing."""
    dice, texts = random.Random(1), []
    for _ in range(20):
        sure = [tuple(round(dice.uniform(0.7, 1.0), 3) for _ in range(12)) for _ in range(30)]
        right = [next((n for n, chance in enumerate(place) if dice.random() > chance), 12) for place in sure]
        texts.append([Place(*each) for each in zip(sure, right, strict=True)])
    texts[0][:unlucky] = [replace(place, accepted=0) for place in texts[0][:unlucky]]
    return [Text("chat", tuple(places)) for places in texts]


def first_share(make: Callable[[], DraftLengthPolicy], texts: Sequence[Text]) -> float:
    """The speed of a new policy on the small pair, as a share of that of the best fixed length."""
    costs = CostCurve(SMALL_PAIR)

    def speed(policy: DraftLengthPolicy) -> float:
        return replayed(policy, texts, lambda _, steps, rows: (costs.draft(steps), costs.verify(rows)))["chat"]

    return speed(make()) / max(speed(Fixed(length)) for length in range(8))


@pytest.mark.parametrize("unlucky", [0, 1, 3, 6])
def test_first_answers_are_fast_on_a_small_pair_after_unlucky_starts_too(unlucky: int) -> None:
    """Whatever was computed; a policy that never drafts is far behind."""
    texts = answers(unlucky)
    for name, start in FIRST_COSTS.items():
        computed = replace(start, timings=(0,) * MAX_ROWS)
        assert first_share(lambda computed=computed: Profit(CostCurve(computed), AcceptanceModel(), longest=8), texts) > 0.9, name
    assert first_share(lambda: Fixed(0), texts) < 0.6
