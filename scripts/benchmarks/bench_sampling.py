"""Measures the acceptance methods for sampled drafts: acceptance, tokens per round, speed-up over plain sampling.

    python scripts/benchmarks/bench_sampling.py BUNDLE --draft-length 3 --json sampling.json

Every repeat runs plain sampling and each method in turn with the same seed. Run it on a quiet machine and quote the ratios.
With --expected nothing is timed: the drafts of the default method are judged by both rules, by the expected number of tokens. Sampled
texts differ too much to compare acceptance otherwise. The default method is `DEFAULT_ACCEPTANCE` in
edge_runtime/decoding/acceptance_rules.py.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from edge_devices.command_line import one_sentence_errors
from edge_runtime.decoding.acceptance import VerifyResult
from edge_runtime.decoding.acceptance_rules import ACCEPTANCE_METHODS, DEFAULT_ACCEPTANCE, BlockRule
from edge_runtime.decoding.distribution import Distribution
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.decoding.sampling import Sampler, SamplingParams
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


class PairedRule(BlockRule):
    """Keeps the expected tokens of each round by block verification and by rejection sampling, on the same drafts."""

    def __init__(self, sampler: Sampler, past: Sequence[int], random: Callable[[], float]) -> None:
        super().__init__(sampler, past, random)
        self.expected: list[tuple[float, float]] = []

    def _verdict(self, drafts: Sequence[int], proposed: Sequence[Distribution], target: Callable[[int], Distribution]) -> VerifyResult:
        rows = [target(position) for position in range(len(drafts) + 1)]
        self.expected.append((expected_by_block(drafts, proposed, rows), expected_by_rejection(drafts, proposed, rows)))
        return super()._verdict(drafts, proposed, rows.__getitem__)


def expected_by_rejection(drafts: Sequence[int], proposed: Sequence[Distribution], rows: Sequence[Distribution]) -> float:
    """Returns the expected tokens of a round, given its drafts."""
    ratios = [min(1.0, row.of(draft) / proposal.of(draft)) for draft, proposal, row in zip(drafts, proposed, rows, strict=False)]
    return 1.0 + sum(math.prod(ratios[: i + 1]) for i in range(len(ratios)))


def expected_by_block(drafts: Sequence[int], proposed: Sequence[Distribution], rows: Sequence[Distribution]) -> float:
    """Returns the expected tokens of a round, given its drafts (arXiv 2403.10444, algorithm 2)."""
    share, passes = 1.0, []
    for i, draft in enumerate(drafts):
        share = min(1.0, share * rows[i].of(draft) / proposed[i].of(draft))
        left = float(rows[i + 1].excess(proposed[i + 1], share).sum()) if i + 1 < len(drafts) else 0.0
        passes.append(share if i + 1 == len(drafts) or share == 1.0 else left / (left + 1 - share))
    total, none_longer = 1.0, 1.0
    for accepted in range(len(passes), 0, -1):
        total += accepted * none_longer * passes[accepted - 1]
        none_longer *= 1 - passes[accepted - 1]
    return total


def compare_expected(
    session: Session, temperatures: Sequence[float], length: int, tokens: int, repeats: int, top_k: int, top_p: float
) -> str:
    """Returns the expected tokens of a round by both rules at each temperature, with the ratio's 95% interval over texts."""
    lines = []
    for temperature in temperatures:
        texts = []
        for repeat in range(repeats):
            for prompt in PROMPTS:
                ids = session.vocabulary.encode(prompt)
                sampler = Sampler(SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
                rule = PairedRule(sampler, ids, np.random.default_rng(repeat).random)
                session.target.rollback(0)
                session.target.prefill(ids[:-1])
                for _ in decode(
                    session.target, session.drafter, Decoding(session.target, ids[-1], Fixed(length), max_tokens=tokens, rule=rule)
                ):
                    pass
                texts.append(np.mean(rule.expected[:-length], axis=0))
        block, rejection = np.mean(texts, axis=0)
        ratios = [block / rejection for block, rejection in texts]
        spread = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
        lines.append(
            f"temperature {temperature}, drafts of {length}: block {block:.3f}, rejection {rejection:.3f} tokens a round,"
            f" ratio {statistics.mean(ratios):.4f} +- {spread:.4f}, least of a text {min(ratios):.4f}"
        )
    return "\n".join(lines)


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
    """Returns all samples: the methods in turn for each repeat, prompt and temperature; every other repeat in reverse order."""
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
@click.option("--expected", is_flag=True, help="Compare block verification and rejection sampling on the same drafts; no timing.")
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
    expected: bool,
    json_path: Path | None,
) -> None:
    """Compare the acceptance methods on BUNDLE."""
    with open_session(bundle, threads=threads, notify=lambda text: click.echo(text, err=True)) as session:
        if expected:
            click.echo(compare_expected(session, temperatures, draft_length, max_tokens, repeats, top_k, top_p))
            return
        samples = measure(session, temperatures, draft_length, max_tokens, repeats, top_k, top_p)
    if json_path:
        json_path.write_text(json.dumps([asdict(s) for s in samples], indent=1), encoding="utf-8")
    click.echo(report(samples, temperatures))


if __name__ == "__main__":
    main()
