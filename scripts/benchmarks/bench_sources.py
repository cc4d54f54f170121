"""What drafts beside the drafter bring: forced text of schemas, and the memory of the text. Replayed on cost curves, without a clock.

    python scripts/benchmarks/bench_sources.py BUNDLE --schemas 200 --json sources.json

The models run, so tokens and drafts are real, but seconds are those of a cost curve: results do not depend on the machine or its load.

- schemas: random tool schemas; with the drafter and the memory, with forced text alone, and plain. All outputs must be equal.
- own text: greedy text after the shipped prompts; with all sources and with the drafter alone.
- traces: texts that the target is made to write: a file with changes after the file, and a tool's result quoted in an answer. A small model
  would not write them, and its drafter does not expect them either, so they show what the memory can bring, not what an edit will take.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from edge_bench.measure.prompts import DOMAINS, prepare, shipped_prompts
from edge_runtime.decoding.acceptance import LogitRows, VerifyResult, accept_by_match
from edge_runtime.decoding.acceptance_rules import GreedyRule
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.cost_model import CostCurve, MeasuredCosts
from edge_runtime.drafting.policies import Timing
from edge_runtime.drafting.profit_policy import Profit
from edge_runtime.drafting.sources import SourceOdds, Sources
from edge_runtime.drafting.text_memory import TEXT_PRIORS, TextMemory
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session
from edge_runtime.text.constraints import JsonSchema

# Milliseconds of a verify of 1, 2, ... rows. Measured: the widened pair on Zen 5; 1 to 4, 8 and 13 rows were measured, the others are
# interpolated. Flat: rows nearly free up to 8 (assumed).
CURVES = {
    "measured": (10.0, 15.2, 22.0, 17.4, 24.0, 27.5, 30.0, 21.5, 28.0, 31.0, 33.0, 35.0, 36.0),
    "flat": (8.0, 8.1, 8.2, 8.3, 8.4, 8.5, 8.6, 8.8, 9.3, 9.9, 10.8, 11.9, 13.0),
}
OVERHEAD, STEP = 0.35e-3, 0.16e-3
WORDS = ("name", "path", "query", "limit", "user", "city", "date", "unit", "count", "title", "order", "amount", "state", "kind", "email")


class FixedCosts(CostCurve):
    """A curve that real rounds do not correct."""

    def learn(self, timing: Timing) -> None:
        """Does nothing."""


def curve(name: str) -> FixedCosts:
    """Returns a cost curve by name."""
    return FixedCosts(MeasuredCosts(verify=tuple(ms / 1e3 for ms in CURVES[name]), step=STEP, overhead=OVERHEAD))


def random_schema(chance: random.Random, levels: int = 2) -> dict[str, Any]:
    """Returns an object schema as tools have them: a few typed properties, some nested."""

    def value(levels: int) -> dict[str, Any]:
        kind = chance.choice(
            ["string", "integer", "boolean", "enum", "array", "object"] if levels else ["string", "integer", "boolean", "enum"]
        )
        if kind == "enum":
            return {"enum": chance.sample(WORDS, chance.randint(2, 4))}
        if kind == "string":
            return {"type": "string", "maxLength": chance.choice([8, 16, 24])}
        if kind == "integer":
            return {"type": "integer", "minimum": 0, "maximum": chance.choice([9, 100, 9999])}
        if kind == "array":
            return {"type": "array", "items": value(0), "minItems": 1, "maxItems": 3}
        return random_schema(chance, levels - 1) if kind == "object" else {"type": kind}

    names = chance.sample(WORDS, chance.randint(2, 5))
    properties = {name: value(levels) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


@dataclass
class Run:
    """The tokens of a request and its costs on the curve."""

    tokens: list[int]
    seconds: float
    rounds: int
    accepted_from: dict[str, int]


class Pair:
    """A bundle whose sessions take their costs from a curve; `drafting` False leaves the drafter out."""

    def __init__(self, session: Session, name: str, *, drafting: bool = True) -> None:
        self.curve = curve(name)
        parts = replace(session._parts, costs=lambda: curve(name), acceptance_cache=None, drafter=session.drafter if drafting else None)
        self.session = Session(replace(parts, settings=session.settings, monitor=None))

    def run(self, prompt: str | Sequence[int], *, alone: bool = False, plain: bool = False, **options: Any) -> Run:
        """Runs a request; `alone` with the drafter alone, `plain` without drafts."""
        session, spent = self.session, [0.0, 0.0]
        policy = None if plain else session.profit(assisted="constraint" in options)
        drafting: dict[str, Any] = {"draft_length": 0} if plain else {"policy": policy} if alone else {}

        def count(_: object) -> None:
            spent[1] += 1
            spent[0] += self.curve.verify(1) if policy is None else policy.last.cost

        generation = session.generate(prompt, on_round=count, **options, **drafting)
        generation.text()
        return Run(generation.tokens, spent[0], int(spent[1]), dict(generation.stats.accepted_from))


class TraceRule(GreedyRule):
    """The target as if it wrote a given text."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text
        self._at = 0

    def accept(self, drafts: Sequence[int], logits: LogitRows) -> VerifyResult:  # noqa: ARG002
        """Accepts the drafts that the text begins with."""
        result = accept_by_match(drafts, lambda position: self._text[self._at + position])
        self._at += result.accepted + 1
        return result


def run_trace(session: Session, prompt: Sequence[int], text: Sequence[int], policy: Profit, odds: SourceOdds | None) -> Run:
    """Decodes `text` after `prompt` with the session's drafter; `odds` None: without the memory."""
    target = session.target
    target.rollback(0)
    target.prefill(list(prompt[:-1]))
    sources = None if odds is None else Sources([TextMemory(prompt)], odds)
    longest = len(text) - 16
    decoding = Decoding(target, prompt[-1], policy, max_tokens=longest, rule=TraceRule(text), sources=sources)
    run = Run([], 0.0, 0, defaultdict(int))
    for done in decode(target, session.drafter, decoding):
        run.tokens += done.tokens
        run.rounds += 1
        run.seconds += policy.last.cost
        for source in done.sources:
            run.accepted_from[source] += 1
    return run


def edited(source: str, chance: random.Random) -> str:
    """Returns a text with one name changed everywhere and a few lines added or left out."""
    words = [word for word in dict.fromkeys(source.replace("(", " ").replace(")", " ").split()) if word.isidentifier() and len(word) > 3]
    old = chance.choice(words) if words else ""
    lines = source.replace(old, old + "_new").splitlines() if old else source.splitlines()
    for _ in range(max(1, len(lines) // 20)):
        place = chance.randrange(len(lines))
        if chance.random() < 0.5:
            lines.insert(place, " " * (len(lines[place]) - len(lines[place].lstrip())) + "# checked")
        else:
            del lines[place]
    return "\n".join(lines)


def edits(session: Session, files: Sequence[Path], chance: random.Random) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (prompt, text) of an edit: the file and a request; the file with changes."""
    for path in files:
        source = "\n".join(path.read_text(encoding="utf-8").splitlines()[20:80]) + "\n"
        prompt = session.vocabulary.encode(f"{source}\n# The same file, with changes:\n")
        yield prompt, session.vocabulary.encode(edited(source, chance), add_bos=False)


def quotes(session: Session, chance: random.Random, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (prompt, text) of an agent's turn: a tool's JSON result, and an answer that quotes parts of it between other words."""
    for _ in range(count):
        rows = [{name: f"{chance.choice(WORDS)}-{chance.randrange(10**6)}" for name in WORDS[:5]} for _ in range(8)]
        prompt = session.vocabulary.encode("# result:\n" + "\n".join(json.dumps(row) for row in rows) + "\n# answer:\n")
        parts = []
        for row in chance.sample(rows, 4):
            parts.append(f"The {chance.choice(WORDS)} of the {chance.choice(('first', 'last', 'best'))} one is {json.dumps(row)}, as")
            parts.append(f"its {chance.choice(WORDS)} of {chance.randrange(100)} shows: {chance.choice(list(row.values()))}.\n")
        yield prompt, session.vocabulary.encode(" ".join(parts), add_bos=False)


def interval(ratios: Sequence[float]) -> str:
    """Returns the geometric mean and its 95% interval by bootstrap."""
    logs, random_ = np.log(ratios), np.random.default_rng(1)
    means = np.exp(np.sort([random_.choice(logs, len(logs)).mean() for _ in range(2000)]))
    return f"{np.exp(logs.mean()):.2f} [{means[50]:.2f}, {means[1949]:.2f}]"


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--schemas", default=200)
@click.option(
    "--files", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Python files to edit.  [default: this library]"
)
@click.option("--texts", default=12, help="Prompts per domain, edits and answers.")
@click.option("--curve", "curves", type=click.Choice(list(CURVES)), multiple=True, default=list(CURVES), help="Repeatable.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all ratios here.")
def main(bundle: Path, schemas: int, files: Path | None, texts: int, curves: tuple[str, ...], json_path: Path | None) -> None:
    """Compare the sources of drafts on BUNDLE."""
    table = Table(
        "curve", "text", "all over plain", "all over drafter alone", "forced text over plain", "tokens a forward", "accepted from"
    )
    results: dict[str, dict[str, list[float]]] = {}
    with open_session(bundle, threads=1) as session:
        for name in curves:
            for text, rows in texts_of(session, name, schemas, files, texts).items():
                ratios: dict[str, list[float]] = defaultdict(list)
                accepted: dict[str, int] = defaultdict(int)
                tokens = rounds = 0
                if not rows:
                    continue
                for row in track(rows, text, console=Console(stderr=True)):
                    runs = row()
                    ratios["plain"].append(runs["plain"] / runs["all"].seconds)
                    if "alone" in runs:
                        ratios["alone"].append(runs["alone"].seconds / runs["all"].seconds)
                    if "forced" in runs:
                        ratios["forced"].append(runs["plain"] / runs["forced"].seconds)
                    tokens, rounds = tokens + len(runs["all"].tokens), rounds + runs["all"].rounds
                    for source, count in runs["all"].accepted_from.items():
                        accepted[source] += count
                shares = ", ".join(f"{source} {count / tokens:.0%}" for source, count in sorted(accepted.items()))
                cells = [interval(ratios[kind]) if ratios[kind] else "-" for kind in ("plain", "alone", "forced")]
                table.add_row(name, text, *cells, f"{tokens / rounds:.2f}", shares)
                results[f"{name} {text}"] = dict(ratios)
    Console(width=160).print(table)
    if json_path:
        json_path.write_text(json.dumps(results, indent=1), encoding="utf-8")


def texts_of(session: Session, name: str, schemas: int, files: Path | None, texts: int) -> dict[str, list[Callable[[], dict[str, Any]]]]:
    """Returns the runs of each kind of text on a curve, to be made in turn."""
    chance = random.Random(7)
    pair, both, bare = Pair(session, name), Pair(session, name), Pair(session, name, drafting=False)
    plain = CURVES[name][0] / 1e3

    def constrained(schema: dict[str, Any]) -> dict[str, Any]:
        options = {"constraint": JsonSchema(schema), "max_tokens": 160}
        prompt = f"def call_{chance.choice(WORDS)}(tool):\n    return "
        runs: dict[str, Any] = {
            "all": both.run(prompt, **options),
            "forced": bare.run(prompt, **options),
        }
        expected = pair.run(prompt, plain=True, **options).tokens
        if any(run.tokens != expected for run in runs.values()):
            click.echo(f"outputs differ for {json.dumps(schema)}", err=True)
        return runs | {"plain": len(expected) * plain}

    def written(ids: Sequence[int]) -> dict[str, Any]:
        runs = {"all": both.run(ids, max_tokens=128), "alone": pair.run(ids, alone=True, max_tokens=128)}
        if runs["all"].tokens != runs["alone"].tokens:
            click.echo("outputs differ", err=True)
        return runs | {"plain": len(runs["all"].tokens) * plain}

    def traced(prompt: list[int], text: list[int]) -> dict[str, Any]:
        runs = {
            "all": run_trace(session, prompt, text, policies[0], odds),
            "alone": run_trace(session, prompt, text, policies[1], None),
        }
        return runs | {"plain": len(runs["all"].tokens) * plain}

    policies = [Profit(curve(name), AcceptanceModel(), longest=8, max_rows=12) for _ in range(2)]
    odds = SourceOdds(TEXT_PRIORS)
    folder = files or Path(__file__).parent.parent.parent / "devices" / "edge_devices" / "machine"
    sources = [path for path in sorted(folder.glob("*.py")) if len(path.read_text(encoding="utf-8").splitlines()) > 60][:texts]
    rows: dict[str, list[Callable[[], dict[str, Any]]]] = {}
    rows["schemas"] = [partial(constrained, random_schema(chance)) for _ in range(schemas)]
    for prompt in prepare(shipped_prompts(DOMAINS, texts), session):
        rows.setdefault(f"own text: {prompt.domain}", []).append(partial(written, prompt.ids))
    rows["traces: edits"] = [partial(traced, *case) for case in edits(session, sources, chance)]
    rows["traces: tool results"] = [partial(traced, *case) for case in quotes(session, chance, texts)]
    return rows


if __name__ == "__main__":
    main()
