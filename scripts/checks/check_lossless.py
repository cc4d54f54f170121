"""Counts the prompts whose greedy output with drafts equals plain greedy decoding, and reports every divergence.

python scripts/checks/check_lossless.py BUNDLE --prompts exporter/edge_export/reference_pair/prompts.code.json --tokens 200
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from edge_devices.command_line import one_sentence_errors
from edge_runtime.drafting.policies import Fixed
from edge_runtime.session.open import open_session
from edge_runtime.session.trials.lossless import LosslessReport, check_lossless


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--prompts", "files", type=click.Path(path_type=Path, exists=True), required=True, multiple=True, help="JSON lists of prompts."
)
@click.option("--count", default=10, help="Prompts to take from each file.")
@click.option("--tokens", default=200, help="Tokens per prompt.")
@click.option("--draft-length", default=3)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@one_sentence_errors()
def main(bundle: Path, files: tuple[Path, ...], count: int, tokens: int, draft_length: int, as_json: bool) -> None:
    """Compare BUNDLE's output with and without drafts on many prompts."""
    reports: list[LosslessReport] = []
    with open_session(bundle, notify=lambda text: click.echo(text, err=True)) as session:
        for prompt in (p for file in files for p in json.loads(file.read_text())[:count]):
            generation = session.generate(prompt, max_tokens=tokens, policy=Fixed(draft_length))
            generation.text()
            reports.append(check_lossless(session, generation))
    equal = sum(r.equal for r in reports)
    if as_json:
        click.echo(json.dumps({"prompts": len(reports), "equal": equal, "reports": [r.to_json() for r in reports]}))
        return
    for i, report in enumerate(reports):
        if not report.equal:
            click.echo(f"prompt {i}: {report.sentence()}")
    click.echo(f"{equal} of {len(reports)} outputs of up to {tokens} tokens are equal at draft length {draft_length}")


if __name__ == "__main__":
    main()
