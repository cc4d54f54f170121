"""Compares sampled tokens of a bundle with the target's own distribution, which is computed anew without drafts: p values by rule.

    python scripts/checks/check_draws.py BUNDLE --backend llama --draws 200000 >draws.jsonl

Each request has a random prompt, a draft length of 1 to 6, a rule and one set of options. Its rows are then computed plainly, in forwards
of other widths, and three statistics are taken of each drawn token: its log probability (z of the sum), its place in the cumulative
distribution, likeliest first (chi-square over 64 cells), and whether it could come at all. The exit code is 1 if a token could not, or if
a p value is below 0.05 divided by the number of p values (Bonferroni).
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, cast

import click
import numpy as np
from numpy.typing import NDArray

from edge_devices.command_line import one_sentence_errors
from edge_runtime.backends.selection import BackendKind
from edge_runtime.decoding.acceptance import ACCEPTANCE_METHODS
from edge_runtime.decoding.sampling import Sampler, SamplingParams
from edge_runtime.session.generation import Generation
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

OPTIONS = {
    "temperature 1": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top-p 0.9": SamplingParams(top_p=0.9),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "penalties": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
}
CONTEXT, PROMPT_CHARACTERS, TOKENS = 512, 120, 160
LONGEST_DRAFT, CHUNK = 6, 12
CELLS = 64
ALPHA = 0.05


@dataclass
class Draws:
    """Sums over the tokens drawn by one rule with one set of options."""

    tokens: int = 0
    accepted: int = 0
    impossible: int = 0
    surplus: float = 0.0
    variance: float = 0.0
    cells: NDArray[np.int64] = field(default_factory=lambda: np.zeros(CELLS, np.int64))

    def add(self, probabilities: NDArray[np.float64], own: float, uniform: float) -> None:
        """Counts a token of probability `own`; `uniform` in [0, 1) is its place among those as likely."""
        logs = np.log(probabilities)
        mean = float(probabilities @ logs)
        self.tokens += 1
        self.surplus += math.log(own) - mean
        self.variance += float(probabilities @ (logs - mean) ** 2)
        before = float(probabilities[probabilities > own].sum()) + uniform * float(probabilities[probabilities == own].sum())
        self.cells[min(CELLS - 1, int(before * CELLS))] += 1

    def p_values(self) -> dict[str, float]:
        """Returns how likely statistics at least this far off are: of log probabilities (two-sided), and of places."""
        expected = self.tokens / CELLS
        places = float(((self.cells - expected) ** 2).sum()) / expected
        return {"log_probability": math.erfc(abs(self.z) / math.sqrt(2)), "places": chi_square_tail(places, CELLS - 1)}

    @property
    def z(self) -> float:
        """The sum of log probabilities over what is expected, in standard deviations; 0 where all of a row are as likely."""
        return self.surplus / math.sqrt(self.variance) if self.variance else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        p_values = {name: round(p, 4) for name, p in self.p_values().items()}
        return {"draws": self.tokens, "accepted": self.accepted, "impossible": self.impossible, "z": round(self.z, 3), "p": p_values}


def chi_square_tail(statistic: float, degrees: int) -> float:
    """Probability that chi-square exceeds `statistic` (Wilson and Hilferty, PNAS 17, 1931, p. 684)."""
    spread = 2 / (9 * degrees)
    return 0.5 * math.erfc(((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))


class Campaign:
    """Random requests of one session, drawn with a seed."""

    def __init__(self, session: Session, seed: int) -> None:
        self._session = session
        self._chance = random.Random(seed)
        self._texts = [path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:40]]

    def run(self, rule: str, options: str, draws: int) -> Draws:
        """Returns the sums of at least that many tokens."""
        sums = Draws()
        while sums.tokens < draws:
            sampling = SamplingParams(**{**OPTIONS[options].to_json(), "logit_bias": {}, "seed": self._chance.randrange(1 << 40)})
            length = self._chance.randint(1, LONGEST_DRAFT)
            request = self._session.generate(
                self._prompt(), max_tokens=TOKENS, draft_length=length, sampling=sampling, acceptance=rule, chunk_size=CONTEXT
            )
            request.text()
            sums.accepted += request.stats.accepted
            self._count(request, sums)
        return sums

    def _prompt(self) -> str:
        text = self._chance.choice(self._texts)
        start = self._chance.randrange(len(text) // 2)
        return text[start : start + self._chance.randint(8, PROMPT_CHARACTERS)]

    def _count(self, request: Generation, sums: Draws) -> None:
        sampler, before = Sampler(request.options.sampling), list(request.prompt)
        for token, row in zip(request.tokens, self._rows(before, request.tokens), strict=True):
            distribution = sampler(row, before)
            if own := distribution.of(token):
                sums.add(distribution.probabilities, own, self._chance.random())
            else:
                sums.impossible += 1
            before.append(token)

    def _rows(self, prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Yields the logits from which each token is drawn, computed without drafts."""
        target, inputs = self._session.target, [prompt[-1], *tokens[:-1]]
        with self._session.exclusive():
            target.rollback(0)
            target.prefill(prompt[:-1])
            for start in range(0, len(inputs), CHUNK):
                yield from target.verify(inputs[start : start + CHUNK]).copy()


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--backend", type=click.Choice(("llama", "onnx")), required=True)
@click.option("--draws", type=click.IntRange(min=1000), default=200_000, help="Tokens to draw with each rule and set of options.")
@click.option("--rule", "rules", type=click.Choice(ACCEPTANCE_METHODS), multiple=True, default=ACCEPTANCE_METHODS)
@click.option("--options", type=click.Choice(tuple(OPTIONS)), multiple=True, default=tuple(OPTIONS))
@click.option("--threads", type=click.IntRange(min=1), default=1)
@click.option("--seed", default=1)
@one_sentence_errors()
def main(bundle: Path, backend: str, draws: int, rules: tuple[str, ...], options: tuple[str, ...], threads: int, seed: int) -> None:
    """Draw tokens from BUNDLE by each rule with drafts, and compare them with the target's distribution; print a JSON line for each."""
    smallest, impossible = 1.0, 0
    with open_session(bundle, backend=cast(BackendKind, backend), context=CONTEXT, threads=threads) as session:
        campaign = Campaign(session, seed)
        for name, rule in product(options, rules):
            sums = campaign.run(rule, name, draws)
            click.echo(
                json.dumps({"bundle": bundle.name, "backend": backend, "rule": rule, "options": name, "seed": seed, **sums.to_json()})
            )
            smallest, impossible = min(smallest, *sums.p_values().values()), impossible + sums.impossible
    limit = ALPHA / (2 * len(rules) * len(options))
    if impossible or smallest < limit:
        raise click.ClickException(f"{impossible} tokens could not come, and the smallest p value is {smallest:.2g} (limit {limit:.2g})")


if __name__ == "__main__":
    main()
