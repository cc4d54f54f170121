"""Replays draft-length policies on recorded drafts, to compare them on the same texts and with the costs of given machines.

    python scripts/benchmarks/replay_policies.py record BUNDLE -o drafts.jsonl --max-tokens 128
    python scripts/benchmarks/replay_policies.py replay drafts.jsonl --costs ~/.cache/edge-mtp/measured.json

`record` decodes plainly and drafts 12 tokens at every position. Greedy text does not depend on drafts, so the rounds of any policy can be
replayed on it exactly, without noise and without the models. `replay` prints the speed-up of each policy over plain decoding by domain,
beside every fixed length and an upper bound: the best rounds for one who knows in advance which drafts will be accepted.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

from edge_bench.measure.prompts import DOMAINS, prepare, read_prompts, shipped_prompts
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.calibration.cost_probe import COSTS
from edge_runtime.decoding.acceptance import VerifyResult, accept_greedy
from edge_runtime.decoding.acceptance_rules import GreedyRule
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.cost_model import CostCurve, MeasuredCosts
from edge_runtime.drafting.policies import DraftLengthPolicy, Fixed, RoundPlan, RoundResult
from edge_runtime.drafting.profit_policy import Profit
from edge_runtime.interfaces import Logits
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


@dataclass
class Replay:
    """Tokens and seconds of a policy's rounds on recorded texts; `by_domain` holds [tokens, seconds]."""

    costs: CostCurve
    by_domain: dict[str, list[float]]

    @classmethod
    def of(cls, policy: DraftLengthPolicy, texts: Sequence[Text], costs: CostCurve) -> Replay:
        """Runs one policy over the texts in order, as one session would."""
        replay = cls(costs, defaultdict(lambda: [0.0, 0.0]))
        for text in texts:
            emitted = 0
            while emitted < len(text.places):
                tokens, seconds = replay._round(policy, text.places[emitted], len(text.places) - emitted)
                emitted += tokens
                replay.by_domain[text.domain][0] += tokens
                replay.by_domain[text.domain][1] += seconds
        return replay

    def _round(self, policy: DraftLengthPolicy, place: Place, left: int) -> tuple[int, float]:
        plan, drafted = policy.plan(), 0
        while drafted < min(plan.draft_length, left - 1):
            drafted += 1
            if plan.should_continue is not None and not plan.should_continue(place.confidences[drafted - 1]):
                break
        seconds = self.costs.draft(drafted)
        shadow_accepted = place.accepted > 0 if plan.shadow and drafted else None
        verified, padding = plan.to_verify(0 if plan.shadow else drafted)
        accepted = min(verified, place.accepted)
        seconds += self.costs.verify(1 + verified + max(0, min(padding, left - 1 - verified)))
        policy.observe(RoundResult(verified, accepted, shadow_accepted))
        return accepted + 1, seconds

    def rate(self, domain: str) -> float:
        """Returns tokens per second."""
        tokens, seconds = self.by_domain[domain]
        return tokens / seconds


def clairvoyant(text: Text, costs: CostCurve) -> float:
    """Returns the least seconds in which rounds of any length can emit a text, by dynamic programming over its positions."""
    least = [0.0] * (len(text.places) + 1)
    for place in range(len(text.places) - 1, -1, -1):
        accepted = text.places[place].accepted
        least[place] = min(costs.draft(k) + costs.verify(k + 1) + least[min(place + k + 1, len(text.places))] for k in range(accepted + 1))
    return least[0]


def read_texts(path: Path) -> list[Text]:
    """Reads a file that `record` wrote."""
    texts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        places = zip(data["confidences"], data["accepted"], strict=True)
        texts.append(Text(data["domain"], tuple(Place(tuple(sure), accepted) for sure, accepted in places)))
    return texts


def show(title: str, texts: Sequence[Text], measured: MeasuredCosts, longest: int) -> None:
    """Prints the table of one machine: speed-up over plain decoding by policy and domain."""
    policies: dict[str, Callable[[], DraftLengthPolicy]] = {f"fixed {n}": partial(Fixed, n) for n in range(1, longest + 1)}
    policies["profit"] = lambda: Profit(CostCurve(measured), AcceptanceModel(), longest=longest)
    domains = list(dict.fromkeys(text.domain for text in texts))
    plain = 1 / measured.verify[0]
    table = Table("policy", *domains, "all", title=title)
    rates = {name: Replay.of(make(), texts, CostCurve(measured)) for name, make in policies.items()}
    rows = {name: [replay.rate(domain) / plain for domain in domains] for name, replay in rates.items()}
    known = {domain: [text for text in texts if text.domain == domain] for domain in domains}
    rows["clairvoyant"] = [
        sum(len(text.places) for text in of_it) / sum(clairvoyant(text, CostCurve(measured)) for text in of_it) / plain
        for of_it in known.values()
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
@click.option("--most", default=20, help="Prompts per domain.")
def record(bundle: Path, output: Path, own: tuple[Path, ...], max_tokens: int, most: int) -> None:
    """Write the drafts at every position of BUNDLE's greedy texts."""
    prompts = [prompt for path in own for prompt in read_prompts(path, most)] or shipped_prompts(DOMAINS, most)
    with open_session(bundle) as session, output.open("w", encoding="utf-8") as file:
        for prompt in track(prepare(prompts, session), console=Console(stderr=True)):
            places = record_text(session, prompt.ids, max_tokens)
            line = {
                "domain": prompt.domain,
                "accepted": [place.accepted for place in places],
                "confidences": [[round(sure, 4) for sure in place.confidences] for place in places],
            }
            file.write(json.dumps(line) + "\n")


@main.command()
@click.argument("recorded", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--costs", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True, help="The measured.json of a cache folder."
)
@click.option("--longest", default=MAX_DRAFT_LENGTH)
def replay(recorded: Path, costs: Path, longest: int) -> None:
    """Print the speed-up of each policy over plain decoding on RECORDED drafts, for every machine in a measured.json."""
    for key, measured in COSTS.kept(costs):
        show(key, read_texts(recorded), measured, longest)


if __name__ == "__main__":
    main()
