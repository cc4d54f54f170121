"""Measures the two acceptance methods for sampled drafts, rejection and match: acceptance, tokens per round, speed-up over plain sampling.

    python scripts/benchmarks/bench_sampling.py BUNDLE --draft-length 3 --json sampling.json

Every repeat runs plain sampling, rejection and match in turn with the same seed. Run it on a quiet machine and quote the ratios.
The default method is `DEFAULT_ACCEPTANCE` in edge_runtime/decoding/acceptance_rules.py.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from edge_devices.command_line import one_sentence_errors
from edge_runtime.decoding.acceptance_rules import ACCEPTANCE_METHODS, DEFAULT_ACCEPTANCE
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.drafting.policies import Fixed
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

PROMPTS = ("def fibonacci(n):\n", "class Stack:\n", "import os\n\n\ndef walk(folder):\n", "# Reads a CSV file\n")
PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One timed request."""

    method: str
    temperature: float
    repeat: int
    prompt: int
    tokens: int
    rounds: int
    drafted: int
    accepted: int
    seconds: float


def run(session: Session, prompt: str, method: str, sampling: SamplingParams, length: int, tokens: int) -> dict[str, float]:
    """Runs one request and returns its counts; `method` is an acceptance method or `PLAIN`."""
    generation = session.generate(
        prompt,
        max_tokens=tokens,
        policy=Fixed(0 if method == PLAIN else length),
        sampling=sampling,
        acceptance=DEFAULT_ACCEPTANCE if method == PLAIN else method,
    )
    for _ in generation.rounds():
        pass
    stats = generation.stats
    return {
        "tokens": stats.tokens,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "seconds": stats.decode_seconds,
    }


def measure(
    session: Session, temperatures: Sequence[float], length: int, tokens: int, repeats: int, top_k: int, top_p: float
) -> list[Sample]:
    """Returns all samples: the three methods in turn for each repeat, prompt and temperature; every other repeat in reverse order."""
    samples = []
    runs = [(r, p, t) for r in range(repeats) for p in range(len(PROMPTS)) for t in temperatures]
    with click.progressbar(runs, label="measuring", file=sys.stderr) as bar:
        for repeat, prompt, temperature in bar:
            sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=1000 * repeat + prompt)
            methods = (PLAIN, *ACCEPTANCE_METHODS)
            for method in methods if repeat % 2 == 0 else reversed(methods):
                figures = run(session, PROMPTS[prompt], method, sampling, length, tokens)
                samples.append(Sample(method=method, temperature=temperature, repeat=repeat, prompt=prompt, **figures))  # type: ignore[arg-type]
    return samples


def speed_ups(samples: Sequence[Sample], method: str, temperature: float) -> list[float]:
    """Returns tokens per second divided by those of plain sampling, for each repeat and prompt."""
    speed = {(s.method, s.repeat, s.prompt): s.tokens / s.seconds for s in samples if s.temperature == temperature}
    return [speed[method, r, p] / speed[PLAIN, r, p] for other, r, p in speed if other == PLAIN]


def report(samples: Sequence[Sample], temperatures: Sequence[float]) -> str:
    """Returns a table with one line per temperature and method."""
    lines = [f"{'temperature':>11} {'method':>10} {'acceptance':>10} {'tokens/round':>12} {'tok/s':>8} {'speed-up (min..max)':>22}"]
    for temperature in temperatures:
        for method in (PLAIN, *ACCEPTANCE_METHODS):
            ours = [s for s in samples if s.method == method and s.temperature == temperature]
            drafted, tokens = sum(s.drafted for s in ours), sum(s.tokens for s in ours)
            acceptance = f"{sum(s.accepted for s in ours) / drafted:.1%}" if drafted else "-"
            ratios = speed_ups(samples, method, temperature)
            lines.append(
                f"{temperature:>11} {method:>10} {acceptance:>10} {tokens / sum(s.rounds for s in ours):>12.2f}"
                f" {statistics.median(s.tokens / s.seconds for s in ours):>8.1f}"
                f" {statistics.median(ratios):>8.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
            )
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--temperature", "temperatures", type=click.FloatRange(min=0, min_open=True), multiple=True, default=(0.3, 0.7, 1.0))
@click.option("--draft-length", type=click.IntRange(1, 12), default=3)
@click.option("--max-tokens", type=click.IntRange(min=1), default=128)
@click.option("--repeats", type=click.IntRange(min=1), default=3)
@click.option("--top-k", type=int, default=0)
@click.option("--top-p", type=float, default=1.0)
@click.option("--threads", type=click.IntRange(min=1))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write all samples here.")
@one_sentence_errors()
def main(
    bundle: Path,
    temperatures: tuple[float, ...],
    draft_length: int,
    max_tokens: int,
    repeats: int,
    top_k: int,
    top_p: float,
    threads: int | None,
    json_path: Path | None,
) -> None:
    """Compare the acceptance methods rejection and match on BUNDLE."""
    with open_session(bundle, threads=threads, notify=lambda text: click.echo(text, err=True)) as session:
        samples = measure(session, temperatures, draft_length, max_tokens, repeats, top_k, top_p)
    if json_path:
        json_path.write_text(json.dumps([asdict(s) for s in samples], indent=1), encoding="utf-8")
    click.echo(report(samples, temperatures))


if __name__ == "__main__":
    main()
