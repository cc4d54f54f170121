"""The quality of an exported model: how far its distributions differ from a reference model's, on held-out text.

No calibration reads the held-out texts, which are in the folder `held_out` next to this module. `english` is from Moby-Dick (chapters 23
and 35) and an address to the US Congress of 1962, both in the public domain; `code` and `chat` are from this project's own sources and
documentation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_devices.errors import errors_as
from edge_runtime.bundle.bundle import Quality
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Logits, Target

KINDS = ("english", "code", "chat")
# The first rows of a text are not compared, because with so little context any model guesses.
SKIPPED_ROWS = 8
ROWS_PER_FORWARD = 8
# A token counts as the reference's own choice if its logit is this close to the largest one, in standard deviations of the row.
TIE = 0.02


def held_out_text(kind: str) -> str:
    """Returns the held-out text of this kind, 6 to 13 kB."""
    return (Path(__file__).with_name("held_out") / f"{kind}.txt").read_text(encoding="utf-8")


def text_rows(target: Target, tokens: Sequence[int], at_once: int = ROWS_PER_FORWARD) -> Iterator[Logits]:
    """Yields the target's logits of `tokens` in pieces of `at_once` rows [n, vocabulary]; empties its cache first."""
    target.rollback(0)
    for at in range(0, len(tokens), at_once):
        yield target.verify(tokens[at : at + at_once])


def agrees(reference: Logits, token: int) -> bool:
    """Whether `token` is the greedy choice of the reference's logits [vocabulary], or within TIE of it."""
    return bool(reference.max() - reference[token] <= TIE * reference.std())


def log_softmax(row: Logits) -> NDArray[np.float64]:
    """Returns the log-probabilities [vocabulary] of a row of logits, in float64."""
    shifted = row.astype(np.float64) - row.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def divergence_of(expected: NDArray[np.float64], actual: NDArray[np.float64]) -> float:
    """Returns KL(expected || actual) of log-probabilities [vocabulary], in nats; infinity if an actual one is NaN or infinite."""
    return float(np.sum(np.exp(expected) * (expected - actual))) if np.isfinite(actual).all() else float("inf")


@dataclass(frozen=True, kw_only=True)
class RowFigures:
    """Figures for each compared row of a text.

    `kl` is KL(reference || export). `surprise` and `reference_surprise` are the negative log-probabilities that export and reference give
    to the next token; all three are in nats. `agrees`: whether the export's likeliest token is the reference's own choice.
    """

    kl: tuple[float, ...]
    surprise: tuple[float, ...]
    reference_surprise: tuple[float, ...]
    agrees: tuple[bool, ...]

    @property
    def quality(self) -> Quality:
        """The means over the rows."""
        return Quality(
            rows=len(self.kl),
            mean_kl=float(np.mean(self.kl)),
            perplexity=float(np.exp(np.mean(self.surprise))),
            reference_perplexity=float(np.exp(np.mean(self.reference_surprise))),
            greedy_agreement=float(np.mean(self.agrees)),
        )

    @property
    def kl_error(self) -> float:
        """The standard error of the mean KL, if rows were independent."""
        return float(np.std(self.kl) / np.sqrt(len(self.kl)))


def row_figures(reference: Logits, export: Iterable[Logits], tokens: Sequence[int], first: int = SKIPPED_ROWS) -> RowFigures:
    """Compares the rows from row `first` to the last but one: no token follows the last. There must be at least one such row.

    `reference` is [len(tokens), vocabulary], `export` the same in pieces of rows. Rows are compared one by one, so that no float64 copy of
    all rows is needed.
    """
    rows: list[tuple[float, float, float, bool]] = []
    for row, own in enumerate(each for piece in export for each in piece):
        if first <= row < len(tokens) - 1:
            theirs, following = np.asarray(reference[row]), tokens[row + 1]
            expected, actual = log_softmax(theirs), log_softmax(own)
            kept = agrees(theirs, int(own.argmax()))
            rows.append((divergence_of(expected, actual), -float(actual[following]), -float(expected[following]), kept))
    kl, surprise, reference_surprise, agreed = zip(*rows, strict=True)
    return RowFigures(kl=kl, surprise=surprise, reference_surprise=reference_surprise, agrees=agreed)


def joined(kinds: Mapping[str, RowFigures]) -> RowFigures:
    """Joins the figures of all kinds of text; every row has the same weight."""
    parts = kinds.values()
    return RowFigures(
        kl=tuple(value for part in parts for value in part.kl),
        surprise=tuple(value for part in parts for value in part.surprise),
        reference_surprise=tuple(value for part in parts for value in part.reference_surprise),
        agrees=tuple(value for part in parts for value in part.agrees),
    )


@dataclass(frozen=True, kw_only=True)
class ReferenceText:
    """A text's tokens, and the reference's logits of it [len(tokens), vocabulary], which are memory-mapped."""

    tokens: tuple[int, ...]
    logits: Logits


def write_reference(folder: Path, kind: str, tokens: Sequence[int], rows: Iterable[Logits]) -> None:
    """Writes a text and its logits, given in pieces of rows, for `read_reference`. Raises RequestError if the disk is full."""
    advice = "choose another temporary folder with TMPDIR, or fewer tokens"
    with errors_as(RequestError, f"the reference's logits cannot be kept in {folder}", advice):
        with (folder / f"{kind}.f32").open("wb") as file:
            for piece in rows:
                file.write(np.asarray(piece, np.float32).tobytes())
        (folder / f"{kind}.json").write_text(json.dumps(list(tokens)))


def read_reference(folder: Path, kind: str) -> ReferenceText:
    """Opens a text that `write_reference` wrote."""
    tokens = json.loads((folder / f"{kind}.json").read_text())
    logits = np.memmap(folder / f"{kind}.f32", np.float32, "r")
    return ReferenceText(tokens=tuple(tokens), logits=logits.reshape(len(tokens), -1))
