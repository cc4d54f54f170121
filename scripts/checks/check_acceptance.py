"""Compares the acceptance of a bundle's drafters with that of the reference assistant on the same texts.

python scripts/checks/check_acceptance.py BUNDLE TARGET DRAFTER --prompts exporter/edge_export/reference_pair/prompts.code.json

The texts are greedy continuations of the prompts by the target, so a draft is accepted if it equals the text. The reference is transformers
in float32, with the sparse and with the dense head. It gets the same rows of the sliding window as llama.cpp's drafter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from edge_devices.command_line import one_sentence_errors
from edge_export.parity.reference import ReferenceRows, load_reference
from edge_runtime.errors import RequestError
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session

SPARSE, DENSE = "reference, sparse head", "reference, dense head"


@dataclass
class DrafterCounts:
    """Counts of one drafter. `equal` drafts equal those of the sparse reference in all tokens; `by_prompt` is the acceptance by prompt."""

    contexts: int = 0
    drafted: int = 0
    accepted: int = 0
    equal: int = 0
    by_prompt: list[float] = field(default_factory=list)

    def add(self, draft: Sequence[int], text: Sequence[int], reference: Sequence[int]) -> int:
        """Counts one draft; returns how many of its tokens are accepted."""
        accepted = next((i for i, pair in enumerate(zip(draft, text, strict=False)) if pair[0] != pair[1]), len(draft))
        self.contexts += 1
        self.drafted += len(draft)
        self.accepted += accepted
        self.equal += list(draft) == list(reference)
        return accepted

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        rate = self.accepted / self.drafted if self.drafted else None
        return {
            "contexts": self.contexts,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "acceptance_rate": rate,
            "equal_to_reference": self.equal / self.contexts if self.contexts else None,
        }


class Reference:
    """The two checkpoints, run by transformers."""

    def __init__(self, target: Path, drafter: Path, window: int) -> None:
        self._target, self._assistant = load_reference(target), load_reference(drafter)
        self._window = window

    def read(self, tokens: Sequence[int]) -> ReferenceRows:
        """Runs the target over a text and returns the rows that the assistant reads."""
        output = self._target(
            input_ids=torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True
        )
        return ReferenceRows(self._target.get_input_embeddings(), output.hidden_states[-1], dict(output.shared_kv_states), self._window - 1)

    def draft(self, rows: ReferenceRows, tokens: Sequence[int], position: int, length: int, *, sparse: bool) -> list[int]:
        """Returns the assistant's drafts after `tokens[position]`; all have that position."""
        self._assistant.config.use_ordered_embeddings = sparse
        last, hidden, shared = tokens[position], rows.hidden[:, position - 1 : position], rows.before(position)
        drafts: list[int] = []
        while len(drafts) < length:
            output = self._assistant(
                inputs_embeds=torch.cat([rows.embed(torch.tensor([[last]])), hidden], dim=-1),
                position_ids=torch.tensor([[position]]),
                shared_kv_states=shared,
                use_cache=False,
            )
            last, hidden = int(output.logits[0, -1].argmax()), output.last_hidden_state
            drafts.append(last)
        return drafts


def drafts_of(session: Session, tokens: Sequence[int], positions: Sequence[int], length: int) -> list[list[int]]:
    """Returns the drafts at each of `positions` of a text whose rows are in the cache."""
    target, drafter = session.target, session.drafter
    if drafter is None:
        raise RequestError("the session has no drafter; open it with one")
    target.rollback(0)
    drafts, done = [], 0
    for position in positions:
        target.prefill(tokens[done : position - 1])
        target.verify(tokens[position - 1 : position])
        done = position
        drafts.append(drafter.draft(tokens[position], length))
    return drafts


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("target", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("drafter", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--prompts", "files", type=click.Path(path_type=Path, exists=True), multiple=True, help="JSON lists of prompts.")
@click.option("--prompt", "single", multiple=True, help="A prompt; repeatable.")
@click.option("--tokens", default=80, help="Length of each text after its prompt.")
@click.option("--every", default=4, help="Tokens from one draft to the next.")
@click.option("--draft-length", default=3, help="Tokens of each draft.")
@click.option("--threads", type=int)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@torch.inference_mode()
@one_sentence_errors()
def main(
    bundle: Path,
    target: Path,
    drafter: Path,
    files: tuple[Path, ...],
    single: tuple[str, ...],
    tokens: int,
    every: int,
    draft_length: int,
    threads: int | None,
    as_json: bool,
) -> None:
    """Draft along texts of BUNDLE's target with its dense and split drafters and with the checkpoints TARGET and DRAFTER."""
    prompts = [prompt for file in files for prompt in json.loads(file.read_text())] + list(single)
    counts: dict[str, DrafterCounts] = {name: DrafterCounts() for name in (SPARSE, DENSE, "split", "dense")}
    with (
        open_session(bundle, threads=threads, drafter="dense") as dense,
        open_session(bundle, threads=threads, drafter="split") as split,
    ):
        layout = dense.bundle.manifest.cache_layout
        window = (layout.sliding.window if layout.sliding else None) or dense.target.context
        reference = Reference(target, drafter, window)
        for prompt in prompts:
            generation = dense.generate(prompt, max_tokens=tokens, draft_length=0)
            list(generation.rounds())
            text = [*generation.prompt, *generation.tokens]
            positions = range(len(generation.prompt), len(text) - draft_length, every)
            rows = reference.read(text)
            expected = [reference.draft(rows, text, p, draft_length, sparse=True) for p in positions]
            drafts = {
                SPARSE: expected,
                DENSE: [reference.draft(rows, text, p, draft_length, sparse=False) for p in positions],
                "split": drafts_of(split, text, positions, draft_length),
                "dense": drafts_of(dense, text, positions, draft_length),
            }
            for name, made in drafts.items():
                accepted = [counts[name].add(d, text[p + 1 :], w) for d, p, w in zip(made, positions, expected, strict=True)]
                counts[name].by_prompt.append(sum(accepted) / (len(accepted) * draft_length) if accepted else 0.0)
    if as_json:
        click.echo(json.dumps({"prompts": len(prompts), "draft_length": draft_length, **{n: c.to_json() for n, c in counts.items()}}))
        return
    Console().print(as_table(counts, len(prompts), draft_length))


def as_table(counts: dict[str, DrafterCounts], prompts: int, draft_length: int) -> Table:
    """Returns one row per drafter."""
    table = Table(title=f"{prompts} prompts, {counts[SPARSE].contexts} drafts of {draft_length}", title_justify="left")
    for column in ("drafter", "accepted", "drafted", "acceptance", "drafts equal to the sparse reference's", "prompts with its acceptance"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for name, count in counts.items():
        same = sum(a == b for a, b in zip(count.by_prompt, counts[SPARSE].by_prompt, strict=True))
        table.add_row(
            name,
            str(count.accepted),
            str(count.drafted),
            f"{count.accepted / count.drafted:.2%}",
            f"{count.equal / count.contexts:.2%}",
            f"{same} of {prompts}",
        )
    return table


if __name__ == "__main__":
    main()
