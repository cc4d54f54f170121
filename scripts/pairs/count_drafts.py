"""Counts how often drafts of each confidence are accepted: drafts.measured.json of a shipped pair, of its exported bundle.

    python scripts/pairs/count_drafts.py my-bundle -o exporter/edge_export/reference_pair/drafts.measured.json

An export counts the same on one text, and the shipped pairs are exported without that.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from edge_bench.measure.request import DOMAINS, prepare, read_prompts, shipped_prompts
from edge_devices.command_line import one_sentence_errors
from edge_runtime.drafting.acceptance_model import AcceptanceModel
from edge_runtime.drafting.policies import RoundPlan, RoundResult
from edge_runtime.session.open import open_session

# Tokens of each draft, as an export takes them (edge_export.parity.comparison).
LENGTH = 4


class Counting:
    """A policy of one draft length whose rounds are counted."""

    def __init__(self) -> None:
        self.model = AcceptanceModel()
        self._bins: list[int] = []

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:  # noqa: ARG002
        """Drafts LENGTH tokens and keeps the drafter's confidence in each."""
        self._bins = []
        return RoundPlan(LENGTH, should_continue=self._keep)

    def observe(self, result: RoundResult) -> None:
        """Counts a round."""
        self.model.observe(self._bins, result.verified, result.accepted)

    def _keep(self, confidence: float) -> bool:
        self._bins.append(self.model.bin_of(confidence, len(self._bins)))
        return True


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--prompts", "own", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Instead of those that ship.")
@click.option("--most", default=20, help="Prompts of each domain.")
@click.option("--max-tokens", default=64, help="Tokens that follow a prompt.")
@one_sentence_errors()
def main(bundle: Path, output: Path, own: Path | None, most: int, max_tokens: int) -> None:
    """Write how often drafts of each confidence are accepted in BUNDLE's greedy texts."""
    counting = Counting()
    with open_session(bundle) as session:
        for prompt in prepare(read_prompts(own, most) if own else shipped_prompts(DOMAINS, most), session):
            session.generate(prompt.ids, max_tokens=max_tokens, policy=counting).text()
    counts = json.dumps(counting.model.to_json())
    rounded = json.loads(counts, parse_float=lambda digits: float(f"{float(digits):.4g}"))
    output.write_text(json.dumps(rounded) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
