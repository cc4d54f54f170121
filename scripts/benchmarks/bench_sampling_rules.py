"""Times sampling by the rules *block* and *coupled* under the policy `profit`, by the whole program.

    python scripts/benchmarks/bench_sampling_rules.py measure BUNDLE... -o runs.jsonl --backend onnx --seconds 60
    python scripts/benchmarks/bench_sampling_rules.py report runs.jsonl

`measure` appends to its file, so that several quiet minutes add up. A case is one prompt, temperature, filter and seed. Each case runs
plain decoding and both rules, in random order. Only *coupled* writes the text that plain decoding writes; *block* writes others of the same
distribution. `report` prints the geometric means of the ratios of tokens per second, with 95 % intervals over cases.
"""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from edge_bench.measure.request import DOMAINS, prepare, shipped_prompts
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

PLAIN, BLOCK, COUPLED = SIDES = ("plain", "block", "coupled")
TEMPERATURES = (0.7, 1.0)
# Gemma's own, and none.
FILTERS: dict[str, dict[str, Any]] = {"none": {}, "top-k 64, top-p 0.95": {"top_k": 64, "top_p": 0.95}}


def cases(chance: random.Random, prompts: list[Any]) -> Iterator[tuple[Any, float, str]]:
    """Yields prompt, temperature and filter, every combination of the last two for each prompt."""
    while True:
        prompt = chance.choice(prompts)
        yield from ((prompt, temperature, name) for temperature in TEMPERATURES for name in FILTERS)


def timed(session: Session, side: str, ids: list[int], sampling: SamplingParams, tokens: int) -> dict[str, Any]:
    """Runs one request; returns its seconds of decoding, tokens, rounds and text."""
    options: dict[str, Any] = {"draft_length": 0} if side == PLAIN else {"acceptance": side}
    generation = session.generate(ids, max_tokens=tokens, sampling=sampling, **options)
    rounds = sum(1 for _ in generation.rounds())
    return {"seconds": generation.stats.decode_seconds, "rounds": rounds, "ids": generation.tokens}


def interval(ratios: Sequence[float]) -> str:
    """Returns the geometric mean and its 95 % interval by bootstrap."""
    logs, chance = np.log(ratios), np.random.default_rng(1)
    means = np.exp(np.sort([chance.choice(logs, len(logs)).mean() for _ in range(2000)]))
    return f"{np.exp(logs.mean()):.2f} [{means[50]:.2f}, {means[1949]:.2f}]"


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Time the rules, and print their ratios."""


@main.command()
@click.argument("bundles", type=click.Path(path_type=Path, exists=True, file_okay=False), nargs=-1, required=True)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--backend", type=click.Choice(["llama", "onnx"]), required=True)
@click.option("--seconds", default=60.0, help="No case of a bundle begins after so many seconds.")
@click.option("--tokens", default=64, help="Tokens of an answer.")
def measure(bundles: tuple[Path, ...], output: Path, backend: str, seconds: float, tokens: int) -> None:
    """Append timed cases of each of BUNDLES to OUTPUT. A bundle is named by its folder."""
    for bundle in bundles:
        with ExitStack() as opened, output.open("a", encoding="utf-8") as file:
            # A session each, so that none learns from the other's rounds.
            sessions = {side: opened.enter_context(open_session(bundle, backend=backend, measure=True)) for side in SIDES}
            prompts = prepare(shipped_prompts(DOMAINS, 12), sessions[PLAIN])
            chance = random.Random(f"{bundle.name} {time.time_ns()}")
            for side, session in sessions.items():  # to warm up
                timed(session, side, prompts[0].ids, SamplingParams(temperature=1.0, seed=1), tokens)
            end = time.monotonic() + seconds
            for prompt, temperature, name in cases(chance, prompts):
                if time.monotonic() > end:
                    break
                sampling = SamplingParams(temperature=temperature, seed=chance.randrange(1 << 30), **FILTERS[name])
                runs = {side: timed(sessions[side], side, prompt.ids, sampling, tokens) for side in chance.sample(SIDES, len(SIDES))}
                line = {"pair": bundle.name, "backend": backend, "temperature": temperature, "filter": name, "domain": prompt.domain}
                line["same"] = {side: runs[side]["ids"] == runs[PLAIN]["ids"] for side in (BLOCK, COUPLED)}
                line["runs"] = {side: {**run, "ids": len(run["ids"])} for side, run in runs.items()}
                file.write(json.dumps(line) + "\n")


@main.command()
@click.argument("runs", type=click.Path(path_type=Path, exists=True, dir_okay=False), nargs=-1, required=True)
def report(runs: tuple[Path, ...]) -> None:
    """Print a line for each pair, engine, temperature and filter."""
    lines = [json.loads(line) for path in runs for line in path.read_text(encoding="utf-8").splitlines()]
    groups: dict[tuple[str, str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["pair"], line["backend"], str(line["temperature"]), line["filter"]].append(line)
        groups[line["pair"], line["backend"], "all", "all"].append(line)
    table = Table(
        "pair",
        "engine",
        "temperature",
        "filters",
        "cases",
        "coupled / block",
        "coupled / plain",
        "block / plain",
        "tokens a round, block / coupled",
        "plain decoding's text, block / coupled",
    )
    for key, group in sorted(groups.items()):
        rates = [{side: run["ids"] / run["seconds"] for side, run in line["runs"].items()} for line in group]
        ratios = [interval([rate[up] / rate[down] for rate in rates]) for up, down in ((COUPLED, BLOCK), (COUPLED, PLAIN), (BLOCK, PLAIN))]
        a_round = [
            sum(line["runs"][side]["ids"] for line in group) / sum(line["runs"][side]["rounds"] for line in group)
            for side in (BLOCK, COUPLED)
        ]
        same = "{} / {}".format(*(sum(line["same"][side] for line in group) for side in (BLOCK, COUPLED)))
        table.add_row(*key, str(len(group)), *ratios, "{:.2f} / {:.2f}".format(*a_round), same)
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
