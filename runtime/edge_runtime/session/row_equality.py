"""Whether drafts can change greedy text: rows of logits computed alone beside the same rows of a verify, on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_devices.waiting import Waiting, silent_wait
from edge_runtime.calibration.measured import MeasuredValue, Notify
from edge_runtime.interfaces import Target

# Attention over a longer text is added up in parts, by some kernels in other parts for one row than for several.
_TEXT, _ALONE = 300, 4
_WIDTHS = (2, 4, 8, 13)


@dataclass(frozen=True, kw_only=True)
class RowEquality:
    """Of `compared` rows of verifies, how many have not the bits of the same row alone, and the largest difference of two logits."""

    compared: int
    different: int
    largest: float

    def __post_init__(self) -> None:
        if not 0 <= self.different <= self.compared or not self.largest >= 0:
            raise ValueError(f"{self.different} of {self.compared} rows differ, by {self.largest}")

    @property
    def exact(self) -> bool:
        """Whether drafts leave greedy text as it is: every row has the same bits alone and in a verify."""
        return self.different == 0

    def sentence(self) -> str:
        """What it means for a text."""
        if self.exact:
            return (
                f"drafts leave greedy text as it is here: {self.compared} of {self.compared} rows have the same bits alone and in a verify"
            )
        return (
            f"drafts may change near ties here: {self.different} of {self.compared} rows differ alone and in a verify,"
            f" by up to {self.largest:.2g}"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys."""
        return {"exact": self.exact, "compared": self.compared, "different": self.different, "largest_difference": self.largest}


_KNOWN = MeasuredValue(
    kind="rows", value_class=RowEquality, doing="comparing rows alone and in a verify", times=1, disturbed_by_load=lambda _: False
)


def known_row_equality(fingerprint: str, target: Target, longest: int, notify: Notify, waiting: Waiting = silent_wait) -> RowEquality:
    """Returns what is kept for a session's fingerprint, else compares, which empties the cache. A verify has at most `longest` rows."""
    return _KNOWN.known_or_measured(fingerprint, lambda *_: compare_rows(target, longest), notify, waiting=waiting)


def compare_rows(target: Target, longest: int) -> RowEquality:
    """Compares rows behind a text of up to 300 tokens in verifies of 2 to `longest` rows; empties the cache."""
    widths = [min(width, longest) for width in _WIDTHS if width <= longest] or [longest]
    length = max(1, min(_TEXT, target.context - longest - 1))
    tokens = [token % 100 + 4 for token in range(length + longest)]
    try:
        target.rollback(0)
        target.prefill(tokens[:length])
        alone = [target.verify(tokens[length + row : length + row + 1])[0].copy() for row in range(min(_ALONE, longest))]
        differences = []
        for width in widths:
            target.rollback(length)
            rows = target.verify(tokens[length : length + width])
            differences += [float(np.abs(row - own).max()) for row, own in zip(rows, alone, strict=False)]
    finally:
        target.rollback(0)
    return RowEquality(compared=len(differences), different=sum(difference != 0 for difference in differences), largest=max(differences))
