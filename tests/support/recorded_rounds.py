"""Replays draft-length policies on recorded drafts, beside a recorded load: what no two runs of a policy would have alike.

Greedy text does not depend on drafts, so the rounds of any policy can be replayed on the drafts at every position of it. Both recordings
in tests/data are of the widened pair, made by `replay_policies.py` of commit 96aab0e5.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from edge_devices.files.typed_json import from_json
from edge_runtime.drafting.cost_model import MeasuredCosts
from edge_runtime.drafting.policies import DraftLengthPolicy, Fixed, RoundResult, Timing

DATA = Path(__file__).parents[1] / "data"
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
        return _nearest(self._drafts[steps], clock) if steps else 0.0, _nearest(self._verifies[rows], clock)


def _nearest(samples: Sequence[tuple[float, float]], clock: float) -> float:
    after = bisect_left(samples, (clock,))
    return min(samples[max(0, after - 1) : after + 1], key=lambda sample: abs(sample[0] - clock))[1]


def replayed(policy: DraftLengthPolicy, texts: Sequence[Text], machine: Machine, *, clock: float = 0.0) -> dict[str, float]:
    """Returns tokens per second by domain, as of one session that writes the texts in order, `clock` seconds after the record began."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for text in texts:
        emitted = 0
        while emitted < len(text.places):
            tokens, seconds = _round(policy, text.places[emitted], emitted, len(text.places) - emitted, machine=machine, clock=clock)
            emitted, clock = emitted + tokens, clock + seconds
            spent[text.domain][0] += tokens
            spent[text.domain][1] += seconds
    return {domain: tokens / seconds for domain, (tokens, seconds) in spent.items()}


def _round(policy: DraftLengthPolicy, place: Place, length: int, left: int, *, machine: Machine, clock: float) -> tuple[int, float]:
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


def speed_up(make: Callable[[], DraftLengthPolicy], texts: Sequence[Text], load: RecordedLoad) -> float:
    """Returns tokens per second over those of plain decoding: the geometric mean over domains and moments of the load."""
    ratios = []
    for clock in (number * load.seconds / STARTS for number in range(STARTS)):
        plain, drafting = (replayed(policy, texts, load, clock=clock) for policy in (Fixed(0), make()))
        ratios += [drafting[domain] / plain[domain] for domain in plain]
    return geometric_mean(ratios)
