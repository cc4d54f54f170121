"""Compares block verification with rejection sampling on the same drafts, by the expected number of tokens; nothing is timed.

    python scripts/benchmarks/bench_sampling.py BUNDLE --draft-length 3

Sampled texts differ too much to compare acceptance otherwise. Speeds: bench_methods.py measure --part sampled.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from edge_devices.command_line import one_sentence_errors
from edge_runtime.decoding.acceptance import VerifyResult
from edge_runtime.decoding.acceptance_rules import BlockRule
from edge_runtime.decoding.distribution import Distribution
from edge_runtime.decoding.loop import Decoding, decode
from edge_runtime.decoding.sampling import Sampler, SamplingParams
from edge_runtime.drafting.policies import Fixed
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

PROMPTS = ("def fibonacci(n):\n", "class Stack:\n", "import os\n\n\ndef walk(folder):\n", "# Reads a CSV file\n")


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


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--temperature", "temperatures", type=click.FloatRange(min=0, min_open=True), multiple=True, default=(0.3, 0.7, 1.0))
@click.option("--draft-length", "length", type=click.IntRange(1, 12), default=3)
@click.option("--max-tokens", "tokens", type=click.IntRange(min=1), default=128)
@click.option("--repeats", type=click.IntRange(min=1), default=3)
@click.option("--top-k", type=int, default=0)
@click.option("--top-p", type=float, default=1.0)
@one_sentence_errors()
def main(bundle: Path, **options: Any) -> None:
    """Compare both rules on BUNDLE."""
    with open_session(bundle, notify=lambda text: click.echo(text, err=True)) as session:
        click.echo(compare_expected(session, **options))


if __name__ == "__main__":
    main()
