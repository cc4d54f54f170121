"""Whether drafts, or other requests in a batch, can change the text: compares rows of logits computed alone and in a verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_devices.waiting import Waiting, silent_wait
from edge_runtime.calibration.measured import MeasuredValue, Notify
from edge_runtime.interfaces import SequenceBatch

# Attention over a longer text is summed in parts, and some kernels split one row into other parts than several rows. All sequences but the
# first have a short text: their rows share the first one's forwards, and opening a bundle must not take long.
_TEXT, _TEXT_BESIDE = 300, 40
_WIDTHS = (2, 4, 8, 13)
# How many rows of a verify are compared: the first ones. Each is also computed alone.
_COMPARED = 4


@dataclass(frozen=True, kw_only=True)
class RowEquality:
    """How many of the `compared` rows of a verify differ in their bits from the same row alone, and the largest difference of two logits.

    `stock_attention` says that the engine's own attention reads the K/V rows. Its sums depend on the batch, but in so few rows that this
    comparison may miss them.
    """

    compared: int
    different: int
    largest: float
    stock_attention: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.different <= self.compared or not self.largest >= 0:
            raise ValueError(f"{self.different} of {self.compared} rows differ, by {self.largest}")

    @property
    def exact(self) -> bool:
        """Whether every row has the same bits alone and in a verify. Then drafts do not change text that is greedy or has a seed."""
        return self.different == 0 and not self.stock_attention

    @property
    def verdict(self) -> str:
        """What the comparison means for a text, in a few words."""
        return "exact" if self.exact else "drafts may change the text"

    def sentence(self) -> str:
        """What the comparison means for a text, in one sentence."""
        if self.exact:
            return (
                f"drafts do not change the text here, greedy or with a seed: {self.compared} of {self.compared} tokens have the"
                " same logits, bit for bit, alone and in a step of several"
            )
        seldom = ", and the engine's own attention on this KV cache differs in few" if self.stock_attention else ""
        return (
            f"drafts may change the text here, greedy text where two tokens are almost equally likely and sampled text anywhere: the"
            f" logits of {self.different} of {self.compared} tokens differ between a step of one token and a step of several, by up to"
            f" {self.largest:.2g}{seldom}"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys."""
        return {
            "exact": self.exact,
            "verdict": self.verdict,
            "compared": self.compared,
            "different": self.different,
            "largest_difference": self.largest,
            "stock_attention": self.stock_attention,
        }


_CACHED = MeasuredValue(
    kind="rows", value_class=RowEquality, doing="checking whether drafts can change a text", times=1, disturbed_by_load=lambda _: False
)


def known_row_equality(
    fingerprint: str, batch: SequenceBatch, longest: int, notify: Notify, waiting: Waiting = silent_wait, *, stock_attention: bool = False
) -> RowEquality:
    """Returns the cached result for a context with this fingerprint; if there is none, compares, which empties the KV caches.

    Always compares if the fingerprint is empty. A verify has at most `longest` rows of each sequence. `stock_attention` is as in
    `RowEquality`.
    """
    if not fingerprint:
        return replace(compare_rows(batch, longest), stock_attention=stock_attention)
    key = f"{fingerprint} {len(batch.targets)} {longest}"
    known = _CACHED.known_or_measured(key, lambda *_: compare_rows(batch, longest), notify, waiting=waiting)
    return replace(known, stock_attention=stock_attention)


def compare_rows(batch: SequenceBatch, longest: int) -> RowEquality:
    """Compares rows computed alone with the same rows in a verify of 2 to `longest` rows per sequence.

    With several sequences, also compares with a verify of one row per sequence. The first sequence has a text of up to 300 tokens.
    Empties the KV caches.
    """
    widths = sorted({min(width, longest) for width in _WIDTHS} | ({1} if len(batch.targets) > 1 else set()))
    texts = [_text(number, target.context - longest - 1, longest) for number, target in enumerate(batch.targets)]
    differences: list[float] = []
    try:
        for target in batch.targets:
            target.rollback(0)
        alone = [_rows_alone(batch, number, *text) for number, text in enumerate(texts)]
        for width in widths:
            for target, (prompt, _) in zip(batch.targets, texts, strict=True):
                target.rollback(len(prompt))
            verified = batch.verify_all([(number, following[:width]) for number, (_, following) in enumerate(texts)])
            for rows, own_rows in zip(verified, alone, strict=True):
                differences += [float(np.abs(row - own).max()) for row, own in zip(rows, own_rows, strict=False)]
    finally:
        for target in batch.targets:
            target.rollback(0)
    return RowEquality(compared=len(differences), different=sum(difference != 0 for difference in differences), largest=max(differences))


def _text(number: int, room: int, longest: int) -> tuple[list[int], list[int]]:
    """Returns the tokens of a sequence's prompt, at most `room`, and the `longest` tokens that follow it."""
    length = max(1, min(_TEXT_BESIDE if number else _TEXT, room))
    tokens = [(number + index) % 100 + 4 for index in range(length + longest)]
    return tokens[:length], tokens[length:]


def _rows_alone(batch: SequenceBatch, number: int, prompt: Sequence[int], following: Sequence[int]) -> list[NDArray[np.float32]]:
    """Prefills a sequence whose cache is empty. Returns its first rows, each computed in its own forward."""
    batch.targets[number].prefill(prompt)
    return [batch.verify_all([(number, [token])])[0][0].copy() for token in following[:_COMPARED]]
