"""The default policy on recorded drafts: beside other programs, and in the first answers of a small pair.

Greedy text does not depend on drafts, so the rounds of any policy can be replayed on the drafts at every position of it, beside a recorded
load: what no two runs of a policy would have alike. Both recordings in tests/data are of the widened pair, made by `replay_policies.py` of
commit 96aab0e5.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean

import pytest

from edge_devices.files.typed_json import from_json
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.cost_model import MAX_ROWS, CostCurve, MeasuredCosts
from edge_runtime.drafting.policies import DraftLengthPolicy, Fixed, PolicyOptions, RoundResult, Timing, policy_kind
from edge_runtime.drafting.profit_policy import Profit
from scripted import VOCABULARY, ScriptedDrafter, ScriptedTarget, next_token

DATA = Path(__file__).parents[2] / "data"
# Replays of a load begin at so many moments of it.
STARTS = 6
# Seconds of a draft of so many tokens and of a verify of so many rows, so many seconds after the start.
Machine = Callable[[float, int, int], tuple[float, float]]


@dataclass(frozen=True)
class Place:
    """One position of a text: the drafter's confidence in each of its drafts, and how many of them are accepted."""

    confidences: tuple[float, ...]
    accepted: int


@dataclass(frozen=True)
class Text:
    """The positions of the output of one request, in order."""

    domain: str
    places: tuple[Place, ...]


def recorded_texts() -> list[Text]:
    """The recorded drafts."""
    texts = []
    for line in (DATA / "recorded_drafts.jsonl").read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        places = zip(data["confidences"], data["accepted"], strict=True)
        texts.append(Text(data["domain"], tuple(Place(tuple(sure), accepted) for sure, accepted in places)))
    return texts


class RecordedLoad:
    """Every round takes what the recorded one of its length took that was nearest in time; the record begins again at its end.

    `computed` are the costs that a session would have started with.
    """

    def __init__(self) -> None:
        head, *lines = (DATA / "recorded_load.jsonl").read_text(encoding="utf-8").splitlines()
        self.computed = from_json(MeasuredCosts, json.loads(head)["computed"], "computed")
        self._drafts: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._verifies: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for line in lines:
            clock, steps, draft_seconds, rows, verify_seconds = json.loads(line)
            self._drafts[steps].append((clock, draft_seconds))
            self._verifies[rows].append((clock, verify_seconds))
        self.seconds: float = clock

    def __call__(self, clock: float, steps: int, rows: int) -> tuple[float, float]:
        clock %= self.seconds
        return nearest(self._drafts[steps], clock) if steps else 0.0, nearest(self._verifies[rows], clock)


def nearest(samples: Sequence[tuple[float, float]], clock: float) -> float:
    after = bisect_left(samples, (clock,))
    return min(samples[max(0, after - 1) : after + 1], key=lambda sample: abs(sample[0] - clock))[1]


def replayed(policy: DraftLengthPolicy, texts: Sequence[Text], machine: Machine, *, clock: float = 0.0) -> dict[str, float]:
    """Returns tokens per second by domain, as of one session that writes the texts in order, `clock` seconds after the record began."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for text in texts:
        emitted = 0
        while emitted < len(text.places):
            tokens, seconds = one_round(policy, text.places[emitted], emitted, len(text.places) - emitted, machine=machine, clock=clock)
            emitted, clock = emitted + tokens, clock + seconds
            spent[text.domain][0] += tokens
            spent[text.domain][1] += seconds
    return {domain: tokens / seconds for domain, (tokens, seconds) in spent.items()}


def one_round(policy: DraftLengthPolicy, place: Place, length: int, left: int, *, machine: Machine, clock: float) -> tuple[int, float]:
    plan, drafted = policy.plan(), 0
    while drafted < min(plan.draft_length, left - 1):
        drafted += 1
        if plan.should_continue is not None and not plan.should_continue(place.confidences[drafted - 1]):
            break
    verified, padding = plan.to_verify(0 if plan.shadow else drafted)
    accepted = min(verified, place.accepted)
    left_out_right = place.accepted > verified if accepted == verified < drafted else None
    rows = 1 + verified + max(0, min(padding, left - 1 - verified))
    draft_seconds, verify_seconds = machine(clock, drafted, rows)
    timing = Timing(length=length, steps=drafted, draft_seconds=draft_seconds, rows=rows, verify_seconds=verify_seconds)
    policy.observe(RoundResult(verified, accepted, left_out_right, timing))
    return accepted + 1, draft_seconds + verify_seconds


class Watched(Fixed):
    """A fixed length that keeps the results of its rounds, without their seconds."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.results: list[RoundResult] = []

    def observe(self, result: RoundResult) -> None:
        assert result.timing is not None
        self.results.append(result._replace(timing=result.timing._replace(draft_seconds=0.0, verify_seconds=0.0)))


@pytest.mark.parametrize("length", [0, 3, 7])
def test_rounds_of_a_fixed_length_come_out_as_in_the_loop(length: int) -> None:
    """A replay whose rounds differ from the loop's would say nothing about a session."""
    wrong = {4, 6, 7, 17, 30}  # the positions of wrong drafts: some rounds keep all drafts, some none.
    target, in_loop, in_replay = ScriptedTarget(), Watched(length), Watched(length)
    drafter = ScriptedDrafter(target, lambda context, _: (next_token(context) + (len(context) in wrong)) % VOCABULARY)
    rounds = list(decode(target, drafter, Decoding(target, 1, in_loop, max_tokens=40)))
    assert sum(len(item.tokens) for item in rounds) == 40
    # Before the text there is one token. The draft after `emitted` others has position `emitted + 1`.
    accepted = [next((n for n in range(12) if emitted + 1 + n in wrong), 12) for emitted in range(40)]
    text = Text("code", tuple(Place((1.0,) * 12, right) for right in accepted))
    assert replayed(in_replay, [text], lambda *_: (0.0, 1.0)) == {"code": 40 / len(rounds)}
    assert in_replay.results == in_loop.results


def speed_up(make: Callable[[], DraftLengthPolicy], texts: Sequence[Text], load: RecordedLoad) -> float:
    """Returns tokens per second over those of plain decoding: the geometric mean over domains and moments of the load."""
    ratios = []
    for clock in (number * load.seconds / STARTS for number in range(STARTS)):
        plain, drafting = (replayed(policy, texts, load, clock=clock) for policy in (Fixed(0), make()))
        ratios += [drafting[domain] / plain[domain] for domain in plain]
    return geometric_mean(ratios)


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
