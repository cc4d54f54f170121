"""The model card, written from what the training run measured, so that no figure is typed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CARD = """\
# Reference pair

A small Gemma 4 target and its MTP drafter in the real checkpoint format, trained from the Python standard library's own text,
so that everything here can be tried, tested and measured without a download. It writes plausible Python and docstrings; it
knows nothing else. It is no language model to talk to.

| | target | drafter |
|--|--|--|
| class | `Gemma4ForCausalLM` (E2B family) | `Gemma4AssistantForCausalLM`, ordered embeddings |
| parameters | {target_parameters:,} | {drafter_parameters:,} |
| layers | 8: S,S,S,F,S,S,S,F; the last 4 reuse the K/V of layers 2 (sliding) and 3 (full) and are double wide | \
4: S,S,S,F on the target's K/V |
| hidden size | 256 | {drafter_hidden} |
| vocabulary | 4096, Gemma-style BPE with byte fallback | 4096 in {centroids} centroids, top {top} |
| steps, tokens seen | {target_steps:,} steps, {target_tokens:,} tokens | \
{drafter_steps:,} steps on {texts:,} texts of 256 tokens, four fifths written by the target |

## Measured

Held out: 3% of the standard library's files, chosen by the hash of their path, with their docstrings.

- Validation loss, nats per token: **{loss:.3f}** ({loss_code:.3f} on code, {loss_prose:.3f} on docstring prose), \
{held:,} held-out tokens in windows of 512.
- Acceptance of the reference assistant (transformers, float32, sparse head) on greedy text of {new} tokens after {prompts} held-out
  prompts of {prompt_length} tokens each; accepted / drafted, and the share of rounds that accepted each draft:

| draft length | code | by position | docstring prose | by position |
|--:|--:|--|--:|--|
{rows}

Greedy text of a model this small repeats itself, and repetition is easy to foresee: expect less of a drafter on text that does not.

## Command

    python scripts/pairs/train_reference_pair.py --output DIR --minutes {minutes:g} --write-minutes {write_minutes:g} \
--drafter-minutes {drafter_minutes:g}

Python {python}, torch {torch}, 2 CPU cores shared with other work, seed {seed}. The learning rates follow the clock, so a faster or idler
machine takes more steps and gets a better pair. Text: the standard library of CPython (PSF licence); weights: Apache-2.0.
"""


def _percent(values: list[float]) -> str:
    return " ".join(f"{v:.0%}" for v in values)


def write_card(folder: Path, setting: dict[str, Any]) -> None:
    """Writes README.md into `folder` from its *.measured.json files; `setting` has what only the evaluation knows."""
    target, drafter, acceptance = (
        json.loads((folder / f"{name}.measured.json").read_text()) for name in ("target", "drafter", "acceptance")
    )
    rows = [
        f"| {k} | {c['acceptance_rate']:.1%} | {_percent(c['by_position'])} | {p['acceptance_rate']:.1%} | {_percent(p['by_position'])} |"
        for k in (1, 2, 3, 4, 6)
        for c, p in [(acceptance["code"][f"draft_length_{k}"], acceptance["prose"][f"draft_length_{k}"])]
    ]
    recipe = drafter["recipe"]
    text = CARD.format(
        target_parameters=target["parameters"],
        drafter_parameters=drafter["parameters"],
        drafter_hidden=recipe["hidden_size"],
        centroids=recipe["num_centroids"],
        top=recipe["top_centroids"],
        target_steps=target["steps"],
        target_tokens=target["tokens_seen"],
        drafter_steps=drafter["steps"],
        texts=drafter["texts"],
        loss=target["validation_loss"],
        loss_code=target["validation_loss_code"],
        loss_prose=target["validation_loss_prose"],
        held=target["held_out_tokens"],
        rows="\n".join(rows),
        python=target["python"],
        torch=target["torch"],
        minutes=target["recipe"]["minutes"],
        drafter_minutes=recipe["minutes"],
        seed=recipe["seed"],
        **setting,
    )
    (folder / "README.md").write_text(text)
