"""What an export keeps of its model's answers: how far its distributions are from the reference's on text that no calibration reads.

The texts are files beside this module: `english` from Moby-Dick (chapters 23 and 35) and an address to the US Congress of 1962, both in
the public domain, `code` and `chat` from this project's own sources and documentation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_export.parity.reference import Rows, agrees, log_softmax
from edge_runtime.bundle.exported_quality import Quality
from edge_runtime.interfaces import Target

KINDS = ("english", "code", "chat")
# Tokens of each kind, so rows of all: 3 * 176 = 528.
TEXT_TOKENS = 176
# The first rows of a text follow on too little of it: any model guesses there.
SKIPPED_ROWS = 8
ROWS_PER_FORWARD = 8


def held_out_tokens(tokenizer: Any, context: int) -> dict[str, list[int]]:
    """The texts by kind as this tokenizer (of transformers) reads them, each of TEXT_TOKENS or as many as `context` holds."""
    begin: list[int] = tokenizer.encode("", add_special_tokens=True)
    tokens = {}
    for kind in KINDS:
        text = Path(__file__).with_name(f"{kind}.txt").read_text(encoding="utf-8")
        tokens[kind] = [*begin, *tokenizer.encode(text, add_special_tokens=False)][: min(TEXT_TOKENS, context)]
    return tokens


def export_logits(target: Target, tokens: list[int]) -> Rows:
    """The export's logits [len(tokens), vocabulary]; its cache is emptied first."""
    target.rollback(0)
    pieces = [tokens[at : at + ROWS_PER_FORWARD] for at in range(0, len(tokens), ROWS_PER_FORWARD)]
    return np.concatenate([np.array(target.verify(piece)) for piece in pieces])


def quality_of(reference: Rows, export: Rows, tokens: list[int]) -> Quality:
    """Compares logits [len(tokens), vocabulary], row by row so that no float64 copy of all rows is made. NaN or infinity gives infinity."""
    divergences, surprises, own_surprises, kept = [], [], [], []
    for row in range(SKIPPED_ROWS, len(tokens) - 1):
        expected, actual, following = log_softmax(reference[row]), log_softmax(export[row]), tokens[row + 1]
        divergences.append(float(np.sum(np.exp(expected) * (expected - actual))) if np.isfinite(actual).all() else math.inf)
        surprises.append(-actual[following])
        own_surprises.append(-expected[following])
        kept.append(agrees(reference[row], int(export[row].argmax())))
    return Quality(
        rows=len(divergences),
        mean_kl=float(np.mean(divergences)),
        perplexity=float(np.exp(np.mean(surprises))),
        reference_perplexity=float(np.exp(np.mean(own_surprises))),
        greedy_agreement=float(np.mean(kept)),
    )


def overall(kinds: Mapping[str, Quality]) -> Quality:
    """All kinds as one text: every row counts alike."""
    parts, rows = list(kinds.values()), sum(part.rows for part in kinds.values())

    def mean(values: list[float]) -> float:
        return sum(part.rows * value for part, value in zip(parts, values, strict=True)) / rows

    return Quality(
        rows=rows,
        mean_kl=mean([part.mean_kl for part in parts]),
        perplexity=math.exp(mean([math.log(part.perplexity) for part in parts])),
        reference_perplexity=math.exp(mean([math.log(part.reference_perplexity) for part in parts])),
        greedy_agreement=mean([part.greedy_agreement for part in parts]),
    )
