"""Times what the memory of the text brings beside the drafter, by the whole program.

    python scripts/benchmarks/bench_text_memory.py measure BUNDLE -o runs.jsonl --seconds 80
    python scripts/benchmarks/bench_text_memory.py report runs.jsonl

`measure` appends to the file, so that several quiet minutes add up; cases are numbered and go on where the file ends. Each case runs its
sides in turn, in random order. All sides must write the same text. Traces are texts that
the target is made to write: a file with changes after the file, and a tool's result quoted in an answer. A small model would not write
them, and its drafter does not expect them either, so they show what the memory can bring, not what an edit will take. `report` prints
geometric means of the ratios with 95% intervals over cases.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from edge_bench.measure.request import DOMAINS, prepare, shipped_prompts
from edge_runtime.decoding.acceptance import GreedyRule, LogitRows, VerifyResult, accept_by_match
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.drafting.policies import Fixed
from edge_runtime.drafting.sources import TEXT_PRIORS, Proposals, SourceOdds, TextMemory
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

PLAIN, ALONE = "plain", "drafter alone"
WORDS = ("name", "path", "query", "limit", "user", "city", "date", "unit", "count", "title", "order", "amount", "state", "kind", "email")
# Seconds and tokens of a side, and what it wrote.
Timed = tuple[float, list[int]]
Case = tuple[str, dict[str, Callable[[], Timed]]]


class Pair:
    """Sessions on one bundle, each with a policy of its own: `both` drafts with everything, `alone` with the drafter."""

    def __init__(self, opened: Session, tokens: int) -> None:
        parts = replace(opened._parts, settings=opened.settings, monitor=None, acceptance_cache=None)
        self.both, self.alone = Session(parts), Session(parts)
        self.policies = {name: self.both._new_profit(parts.costs) for name in (ALONE, "memory")} if parts.costs else {}
        self.odds = SourceOdds(TEXT_PRIORS)
        self.tokens = tokens

    def run(self, session: Session, prompt: Any, **options: Any) -> Timed:
        """Runs a request."""
        generation = session.generate(prompt, max_tokens=options.pop("max_tokens", self.tokens), **options)
        for _ in generation.rounds():
            pass
        return generation.stats.decode_seconds, generation.tokens

    def trace(self, prompt: list[int], text: list[int], name: str) -> Timed:
        """Decodes `text` after `prompt`, plainly, with the drafter or with the memory too."""
        target, policy = self.both.target, self.policies.get(name)
        target.rollback(0)
        target.prefill(prompt[:-1])
        begin = time.perf_counter()
        proposals = Proposals(TextMemory(prompt), self.odds) if name == "memory" else None
        decoding = Decoding(
            target,
            prompt[-1],
            policy or Fixed(0),
            max_tokens=min(len(text) - 16, 3 * self.tokens),
            rule=TraceRule(text),
            proposals=proposals,
        )
        tokens = [token for each in decode(target, self.both.drafter, decoding) for token in each.tokens]
        return time.perf_counter() - begin, tokens


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


def memory(pair: Pair, chance: random.Random) -> Iterator[Case]:
    """Yields edits and quotes as traces, and greedy continuations of the shipped prompts."""
    folder = Path(__file__).parent.parent.parent / "devices" / "edge_devices" / "machine"
    files = [path for path in sorted(folder.glob("*.py")) if len(path.read_text(encoding="utf-8").splitlines()) > 60]
    prompts = prepare(shipped_prompts(DOMAINS, 12), pair.both)
    while True:
        traces = [("edits", *next(edits(pair.both, [chance.choice(files)], chance))), ("quotes", *next(quotes(pair.both, chance, 1)))]
        for name, prompt, text in traces:
            sides = (PLAIN, ALONE, "memory")
            yield name, {side: lambda p=prompt, t=text, s=side: pair.trace(p, t, s) for side in sides}
        for domain in ("prose", "code"):
            chosen = chance.choice([prompt for prompt in prompts if prompt.domain == domain])
            yield (
                f"own text: {domain}",
                {
                    PLAIN: lambda p=chosen.ids: pair.run(pair.alone, p, draft_length=0),
                    ALONE: lambda p=chosen.ids: pair.run(pair.alone, p, policy=pair.alone.profit()),
                    "memory": lambda p=chosen.ids: pair.run(pair.both, p),
                },
            )


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Time the methods, and print their ratios."""


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--label", default="", help="Which kernels run, for the table.")
@click.option("--seconds", default=80.0, help="No case begins after so many seconds.")
@click.option("--cases", default=10**6, help="At most so many cases.")
@click.option("--tokens", default=48, help="Tokens of a continuation.")
@click.option("--threads", type=int)
def measure(bundle: Path, output: Path, label: str, seconds: float, cases: int, tokens: int, threads: int | None) -> None:
    """Append timed cases to OUTPUT."""
    end = time.monotonic() + seconds
    known = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()] if output.exists() else []
    number = 1 + max((each["case"] for each in known), default=0)
    chance = random.Random(number)
    with open_session(bundle, threads=threads, check="none") as opened, output.open("a", encoding="utf-8") as file:
        drawn = memory(Pair(opened, tokens), chance)
        next(iter(next(drawn)[1].values()))()  # to warm up
        while time.monotonic() < end and cases > 0:
            name, sides = next(drawn)
            runs = {side: sides[side]() for side in chance.sample(list(sides), len(sides))}
            texts = {tuple(text) for _, text in runs.values()}
            for side, (took, text) in runs.items():
                line = {"case": number, "label": label, "name": name, "side": side, "equal": len(texts) == 1}
                file.write(json.dumps(line | {"tokens": len(text), "seconds": took}) + "\n")
            number, cases = number + 1, cases - 1


@main.command()
@click.argument("runs", type=click.Path(path_type=Path, exists=True, dir_okay=False), nargs=-1)
def report(runs: tuple[Path, ...]) -> None:
    """Print the ratios over plain decoding, and over the drafter alone where it ran."""
    lines = [json.loads(line) | {"file": str(path)} for path in runs for line in path.read_text(encoding="utf-8").splitlines()]
    cases: dict[tuple[str, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        cases[line["file"], line["case"]][line["side"]] = line
    ratios: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    equal: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for sides in cases.values():
        rates = {side: line["tokens"] / line["seconds"] for side, line in sides.items()}
        first = next(iter(sides.values()))
        equal[first["label"], first["name"]].append(first["equal"])
        for side, rate in rates.items():
            for against in (PLAIN, ALONE):
                if against in rates and side != against:
                    ratios[first["label"], first["name"], side, against].append(rate / rates[against])
    table = Table("kernels", "text", "side", "over", "ratio", "cases", "same text")
    for (label, name, side, against), values in sorted(ratios.items()):
        same = equal.get((label, name), [])
        table.add_row(label, name, side, against, interval(values), str(len(values)), f"{sum(same)}" if same else "-")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
