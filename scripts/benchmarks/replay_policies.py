"""Replays draft-length policies on recorded drafts, to compare them on the same texts and with the costs of given machines.

    python scripts/benchmarks/replay_policies.py record BUNDLE -o drafts.jsonl --max-tokens 128
    python scripts/benchmarks/replay_policies.py replay drafts.jsonl --costs ~/.cache/edge-mtp/measured.json
    python scripts/benchmarks/replay_policies.py load BUNDLE -o load.jsonl --seconds 60
    python scripts/benchmarks/replay_policies.py replay drafts.jsonl --load load.jsonl
    python scripts/benchmarks/replay_policies.py first drafts.jsonl

`record` decodes plainly and drafts 12 tokens at every position. Greedy text does not depend on drafts, so the rounds of any policy can be
replayed on it exactly, without noise and without the models. `replay` prints the speed-up of each policy over plain decoding by domain,
beside every fixed length and an upper bound: the best rounds for one who knows in advance which drafts will be accepted.

`load` times drafts and verifies of random lengths while whatever runs on the machine runs. A replay on it takes for each round what a round
of as many drafts and rows took at that moment, so that policies are compared on the same load, which no two runs have.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from edge_bench.measure.request import DOMAINS, prepare, read_prompts, shipped_prompts
from edge_devices.command_line import one_sentence_errors
from edge_devices.files.typed_json import from_json, to_json
from edge_devices.machine.load import LoadWatch
from edge_runtime.backends.selection import BACKENDS, CARDS
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.calibration.first_use import COSTS, begin_text
from edge_runtime.decoding.acceptance import GreedyRule, VerifyResult, accept_greedy
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.cost_model import MAX_ROWS, CostCurve, MeasuredCosts
from edge_runtime.drafting.policies import DraftLengthPolicy, Fixed, PolicyOptions, RoundPlan, RoundResult, Timing, policy_kind
from edge_runtime.drafting.profit_policy import Profit
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Logits
from edge_runtime.planning.speed import computed_costs
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session


@dataclass(frozen=True)
class Place:
    """One position of a text: the drafter's confidence in each of its 12 drafts, and how many of them are accepted."""

    confidences: tuple[float, ...]
    accepted: int


@dataclass(frozen=True)
class Text:
    """The positions of the output of one request, in order."""

    domain: str
    places: tuple[Place, ...]


class _Recorder(GreedyRule):
    """Drafts the full length at every position but accepts no draft, so that each token is a position. A rule and a policy."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self._confidences: list[float] = []

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:  # noqa: ARG002
        self._confidences = []
        return RoundPlan(MAX_DRAFT_LENGTH, should_continue=self._record)

    def observe(self, result: RoundResult) -> None: ...

    def _record(self, confidence: float) -> bool:
        self._confidences.append(confidence)
        return True

    def accept(self, drafts: Sequence[int], logits: Logits) -> VerifyResult:
        result = accept_greedy(drafts, logits)
        self.places.append(Place(tuple(self._confidences), result.accepted))
        return VerifyResult(accepted=0, next_token=drafts[0] if result.accepted else result.next_token)


def record_text(session: Session, ids: Sequence[int], max_tokens: int) -> tuple[Place, ...]:
    """Decodes plainly after a prompt; returns the positions."""
    recorder, target = _Recorder(), session.target
    target.rollback(0)
    target.prefill(list(ids[:-1]))
    stops = session.vocabulary.eog_tokens
    # The last positions of a text have no room for 12 drafts, so a longer text is decoded and its end left out.
    decoding = Decoding(
        target, ids[-1], recorder, max_tokens=max_tokens + MAX_DRAFT_LENGTH, rule=recorder, is_stop=lambda token: token in stops
    )
    for _ in decode(target, session.drafter, decoding):
        if len(recorder.places) == max_tokens:
            break
    return tuple(recorder.places)


class Sample(NamedTuple):
    """A round of a recorded load: when it began, seconds after the first one, and what its draft and its verify took."""

    clock: float
    steps: int
    draft_seconds: float
    rows: int
    verify_seconds: float


class Machine(Protocol):
    """What a round takes: seconds of a draft of `steps` tokens and of a verify of `rows` rows, `clock` seconds after the start."""

    def round(self, clock: float, steps: int, rows: int) -> tuple[float, float]: ...


@dataclass(frozen=True)
class QuietMachine:
    """Every round takes what it costs."""

    costs: CostCurve

    def round(self, clock: float, steps: int, rows: int) -> tuple[float, float]:  # noqa: ARG002
        return self.costs.draft(steps), self.costs.verify(rows)


class RecordedLoad:
    """Every round takes what the recorded one of its length took that was nearest in time; the record begins again at its end.

    `computed` are the costs that a session would have started with.
    """

    def __init__(self, computed: MeasuredCosts, samples: Sequence[Sample], words: str) -> None:
        self.computed, self.samples, self.words = computed, samples, words
        self._drafts = _by_clock([(sample.steps, sample.clock, sample.draft_seconds) for sample in samples])
        self._verifies = _by_clock([(sample.rows, sample.clock, sample.verify_seconds) for sample in samples])
        self.seconds = samples[-1].clock

    def round(self, clock: float, steps: int, rows: int) -> tuple[float, float]:
        clock %= self.seconds
        return _nearest(self._drafts[steps], clock) if steps else 0.0, _nearest(self._verifies[rows], clock)


def _by_clock(samples: Sequence[tuple[int, float, float]]) -> dict[int, tuple[list[float], list[float]]]:
    """Returns clocks and seconds by count."""
    kept: dict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for count, clock, seconds in samples:
        clocks, values = kept[count]
        clocks.append(clock)
        values.append(seconds)
    return kept


def _nearest(samples: tuple[list[float], list[float]], clock: float) -> float:
    clocks, values = samples
    after = bisect_left(clocks, clock)
    near = [place for place in (after - 1, after) if 0 <= place < len(clocks)]
    return values[min(near, key=lambda place: abs(clocks[place] - clock))]


@dataclass
class Replay:
    """Tokens and seconds of a policy's rounds on recorded texts; `by_domain` holds [tokens, seconds]."""

    machine: Machine
    by_domain: dict[str, list[float]]
    clock: float = 0.0

    @classmethod
    def of(cls, policy: DraftLengthPolicy, texts: Sequence[Text], machine: Machine, *, clock: float = 0.0) -> Replay:
        """Runs one policy over the texts in order, as one session would that begins `clock` seconds after the record did."""
        replay = cls(machine, defaultdict(lambda: [0.0, 0.0]), clock)
        for text in texts:
            emitted = 0
            while emitted < len(text.places):
                tokens, seconds = replay._round(policy, text.places[emitted], emitted, len(text.places) - emitted)
                emitted += tokens
                replay.clock += seconds
                replay.by_domain[text.domain][0] += tokens
                replay.by_domain[text.domain][1] += seconds
        return replay

    def _round(self, policy: DraftLengthPolicy, place: Place, length: int, left: int) -> tuple[int, float]:
        plan, drafted = policy.plan(), 0
        while drafted < min(plan.draft_length, left - 1):
            drafted += 1
            if plan.should_continue is not None and not plan.should_continue(place.confidences[drafted - 1]):
                break
        verified, padding = plan.to_verify(0 if plan.shadow else drafted)
        accepted = min(verified, place.accepted)
        left_out_right = place.accepted > verified if accepted == verified < drafted else None
        rows = 1 + verified + max(0, min(padding, left - 1 - verified))
        draft_seconds, verify_seconds = self.machine.round(self.clock, drafted, rows)
        timing = Timing(length=length, steps=drafted, draft_seconds=draft_seconds, rows=rows, verify_seconds=verify_seconds)
        policy.observe(RoundResult(verified, accepted, left_out_right, timing))
        return accepted + 1, draft_seconds + verify_seconds

    def rate(self, domain: str) -> float:
        """Returns tokens per second."""
        tokens, seconds = self.by_domain[domain]
        return tokens / seconds


def clairvoyant(text: Text, costs: CostCurve) -> float:
    """Returns the least seconds in which rounds of any length can emit a text, by dynamic programming over its positions."""
    best = [0.0] * (len(text.places) + 1)
    for place in range(len(text.places) - 1, -1, -1):
        accepted = text.places[place].accepted
        best[place] = min(costs.draft(k) + costs.verify(k + 1) + best[min(place + k + 1, len(text.places))] for k in range(accepted + 1))
    return best[0]


def read_texts(path: Path) -> list[Text]:
    """Reads a file that `record` wrote. Raises RequestError for anything else."""
    texts = []
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            data = json.loads(line)
            places = zip(data["confidences"], data["accepted"], strict=True)
            texts.append(Text(data["domain"], tuple(Place(tuple(sure), accepted) for sure, accepted in places)))
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} is no recording ({error!r}); make one with the command record") from error
    return texts


# Replays of a load begin at so many moments of it.
STARTS = 6


def policies_from(start: MeasuredCosts, longest: int) -> dict[str, Callable[[], DraftLengthPolicy]]:
    """Returns the policies to compare by name; `profit` begins with the costs `start`."""
    options = PolicyOptions(first=min(3, longest), longest=longest)
    policies: dict[str, Callable[[], DraftLengthPolicy]] = {f"fixed {n}": partial(Fixed, n) for n in range(1, longest + 1)}
    policies["rolling"] = partial(policy_kind("rolling").new, options)
    policies["profit"] = lambda: Profit(CostCurve(start), AcceptanceModel(), longest=longest)
    return policies


def speed_ups(make: Callable[[], DraftLengthPolicy], texts: Sequence[Text], machine: Machine, clocks: Sequence[float]) -> dict[str, float]:
    """Returns tokens per second of a policy over those of plain decoding by domain, the geometric mean of replays from each clock on."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for clock in clocks:
        plain, replay = (Replay.of(policy, texts, machine, clock=clock) for policy in (Fixed(0), make()))
        for domain in replay.by_domain:
            ratios[domain].append(replay.rate(domain) / plain.rate(domain))
    return {domain: statistics.geometric_mean(of_it) for domain, of_it in ratios.items()}


def show(title: str, texts: Sequence[Text], start: MeasuredCosts, longest: int, load: RecordedLoad | None = None) -> None:
    """Prints the table of one machine, or of one load: speed-up over plain decoding by policy and domain."""
    domains = list(dict.fromkeys(text.domain for text in texts))
    table = Table("policy", *domains, "all", title=title)
    machine, clocks = (
        (QuietMachine(CostCurve(start)), [0.0]) if load is None else (load, [n * load.seconds / STARTS for n in range(STARTS)])
    )
    rows = {}
    for name, make in policies_from(start, longest).items():
        by_domain = speed_ups(make, texts, machine, clocks)
        rows[name] = [by_domain[domain] for domain in domains]
    if load is None:
        known = [[text for text in texts if text.domain == domain] for domain in domains]
        rows["clairvoyant"] = [
            sum(len(text.places) for text in of_it) * start.verify[0] / sum(clairvoyant(text, CostCurve(start)) for text in of_it)
            for of_it in known
        ]
    for name, ratios in rows.items():
        table.add_row(name, *(f"{ratio:.3f}" for ratio in ratios), f"{statistics.geometric_mean(ratios):.3f}")
    Console().print(table)


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Record drafts along texts, and replay draft-length policies on them."""


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option(
    "--prompts", "own", type=click.Path(path_type=Path, exists=True, dir_okay=False), multiple=True, help="Instead of the shipped ones."
)
@click.option("--max-tokens", default=64, help="Tokens per prompt.")
@click.option("--most", "count", default=20, help="Prompts per domain.")
def record(bundle: Path, output: Path, own: tuple[Path, ...], max_tokens: int, count: int) -> None:
    """Write the drafts at every position of BUNDLE's greedy texts."""
    prompts = [prompt for path in own for prompt in read_prompts(path, count)] or shipped_prompts(DOMAINS, count)
    with open_session(bundle) as session, output.open("w", encoding="utf-8") as file:
        for prompt in track(prepare(prompts, session), console=Console(stderr=True)):
            places = record_text(session, prompt.ids, max_tokens)
            line = {
                "domain": prompt.domain,
                "accepted": [place.accepted for place in places],
                "confidences": [[round(sure, 4) for sure in place.confidences] for place in places],
            }
            file.write(json.dumps(line) + "\n")


# Tokens of each draft that counts are made of, as the export makes them (edge_export.parity.comparison).
COUNTED = 4


def counted(texts: Sequence[Text]) -> dict[str, Any]:
    """Returns the counts of an acceptance model after rounds of COUNTED drafts along recorded texts."""
    model = AcceptanceModel()
    for text in texts:
        at = 0
        while at < len(text.places):
            place = text.places[at]
            accepted = min(place.accepted, COUNTED)
            model.observe([model.bin_of(sure, n) for n, sure in enumerate(place.confidences[:COUNTED])], COUNTED, accepted)
            at += accepted + 1
    return model.to_json()


@main.command()
@click.argument("recorded", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@one_sentence_errors()
def counts(recorded: Path, output: Path) -> None:
    """Write how often drafts of each confidence are accepted on RECORDED texts: drafts.measured.json of a shipped pair."""
    rounded = json.loads(json.dumps(counted(read_texts(recorded))), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    output.write_text(json.dumps(rounded) + "\n", encoding="utf-8")


def record_load(session: Session, seconds: float) -> list[Sample]:
    """Times rounds of random lengths, as many of each, for so long; the draft asks for the confidence of each token, as `profit` does."""
    target, drafter, token = session.target, session.drafter, max(session.vocabulary.bos, 0)
    longest, samples, dice = session.settings.longest_draft, list[Sample](), random.Random(0)
    with session.exclusive():
        begin_text(target, token, longest)
        begin = time.perf_counter()
        while not samples or time.perf_counter() - begin < seconds:
            for steps in dice.sample(range(longest + 1), longest + 1):
                if target.length + longest >= target.context:
                    begin_text(target, token, longest)
                start = time.perf_counter()
                drafted = drafter.draft(token, steps, should_continue=lambda _: True) if drafter and steps else []
                middle = time.perf_counter()
                target.verify([token] * (steps + 1))
                end = time.perf_counter()
                target.rollback(target.length - steps)
                samples.append(Sample(start - begin, len(drafted), middle - start, steps + 1, end - middle))
    return samples


def read_load(path: Path) -> RecordedLoad:
    """Reads a file that `load` wrote."""
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    facts = json.loads(head)
    return RecordedLoad(
        from_json(MeasuredCosts, facts["computed"], "computed"), [Sample(*json.loads(line)) for line in lines], facts["load"]
    )


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--seconds", default=60.0)
@click.option("--backend", type=click.Choice(BACKENDS))
def load(bundle: Path, output: Path, seconds: float, backend: str | None) -> None:
    """Write what drafts and verifies of BUNDLE take beside whatever runs on this machine."""
    with open_session(bundle, backend=backend) as session:
        watch = LoadWatch()
        samples = record_load(session, seconds)
        manifest, kind = session.bundle.manifest, session.backend
        computed = computed_costs(manifest, CARDS[kind].format, session.drafter_kind, session.row_kernels)
    facts = {"backend": kind, "row_kernels": session.row_kernels, "load": watch.load().words(), "computed": to_json(computed)}
    lines = [
        json.dumps(facts),
        *(json.dumps([float(f"{value:.5g}") if isinstance(value, float) else value for value in sample]) for sample in samples),
    ]
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")


@main.command()
@click.argument("recorded", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--costs", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The measured.json of a cache folder.")
@click.option(
    "--load", "loads", type=click.Path(path_type=Path, exists=True, dir_okay=False), multiple=True, help="A file of the command load."
)
@click.option("--longest", default=MAX_DRAFT_LENGTH)
@one_sentence_errors()
def replay(recorded: Path, costs: Path | None, loads: tuple[Path, ...], longest: int) -> None:
    """Print the speed-up of each policy over plain decoding on RECORDED drafts: for every machine in a measured.json, on every load."""
    texts = read_texts(recorded)
    longest = min([longest, *(len(place.confidences) for text in texts for place in text.places)])
    for key, measured in COSTS.kept(costs) if costs is not None else ():
        show(key, texts, measured, longest)
    for path in loads:
        load = read_load(path)
        show(f"{path.name}: {load.words}", texts, load.computed, longest, load)


# A pair of under a millisecond: rounded timings of the chat pair on two cores of a Zen 5 (ONNX graphs, row kernels). A session may have
# computed these or other costs: without the fixed part of a forward, or of rows as dear as those of stock kernels.
SMALL_PAIR = MeasuredCosts(verify=tuple(0.24e-3 + 0.02e-3 * n for n in range(MAX_ROWS)), step=0.025e-3, overhead=0.03e-3)
FIRST_COSTS = {
    "right": SMALL_PAIR,
    "no fixed part": MeasuredCosts(verify=tuple(0.03e-3 + 0.004e-3 * n for n in range(MAX_ROWS)), step=0.06e-3, overhead=0.1e-3),
    "dear rows": MeasuredCosts(verify=tuple(0.24e-3 * (1 + 0.25 * n) for n in range(MAX_ROWS)), step=0.06e-3, overhead=0.1e-3),
}
# How many of the first places accept no draft.
UNLUCKY = (0, 1, 3, 6)
LONGEST_FIXED = 7


def first_answers(texts: Sequence[Text], tokens: int, unlucky: int) -> list[Text]:
    """Returns the first `tokens` places of each text; the first `unlucky` places of the first text accept nothing."""
    answers = [Text(text.domain, text.places[:tokens]) for text in texts]
    wrong = tuple(Place(place.confidences, 0) for place in answers[0].places[:unlucky])
    return [Text(answers[0].domain, wrong + answers[0].places[unlucky:]), *answers[1:]]


def first_share(make: Callable[[], DraftLengthPolicy], answers: Sequence[Text]) -> float:
    """Returns the speed of a new policy on the small pair, as a share of that of the best fixed length."""

    def seconds(policy: DraftLengthPolicy) -> float:
        by_domain = Replay.of(policy, answers, QuietMachine(CostCurve(SMALL_PAIR))).by_domain
        return sum(spent for _, spent in by_domain.values())

    return min(seconds(Fixed(length)) for length in range(LONGEST_FIXED + 1)) / seconds(make())


def new_profit(start: MeasuredCosts) -> Profit:
    """Returns the policy of a machine that knows nothing but computed costs."""
    return Profit(CostCurve(replace(start, timings=(0,) * MAX_ROWS)), AcceptanceModel(), longest=8)


@main.command()
@click.argument("recorded", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--answers", "count", default=20)
@click.option("--tokens", default=30, help="Tokens of an answer.")
@one_sentence_errors()
def first(recorded: Path, count: int, tokens: int) -> None:
    """Print the share of the best fixed length's speed in the first answers of a pair of under a millisecond, after unlucky starts too."""
    texts = read_texts(recorded)[:count]
    table = Table("computed costs", *(f"{unlucky} unlucky rounds" for unlucky in UNLUCKY))
    for name, start in FIRST_COSTS.items():
        shares = (first_share(partial(new_profit, start), first_answers(texts, tokens, unlucky)) for unlucky in UNLUCKY)
        table.add_row(name, *(f"{share:.3f}" for share in shares))
    Console().print(table)


if __name__ == "__main__":
    main()
