"""`edge-run --explain`: what the policy expected of each round, what it decided, and what came of it; a line each."""

from __future__ import annotations

from collections.abc import Callable

from edge_runtime.decoding.loop import Round
from edge_runtime.drafting.profit_policy import Decision

# Name and width of each column.
COLUMNS = (
    ("round", 5),
    ("mode", 6),
    ("drafted", 7),
    ("verified", 8),
    ("rows", 4),
    ("accepted", 8),
    ("expected", 8),
    ("emitted", 7),
    ("cost", 9),
    ("took ms", 8),
    ("gain", 6),
    ("sure", 0),
)
UNITS = {"time": "ms", "energy": "mJ"}
NONE = "-"


class Explain:
    """Hears rounds and says one line about each, the column names before the first.

    `decided` returns the decision behind the newest round, None where the policy keeps none; its costs are in seconds or, where the
    `objective` is energy, in joules.
    """

    def __init__(self, decided: Callable[[], Decision | None], objective: str, say: Callable[[str], None]) -> None:
        self._decided, self._unit, self._say = decided, UNITS[objective], say
        self._rounds = 0

    def __call__(self, done: Round) -> None:
        """Says the line of a round that is over."""
        if not self._rounds:
            self._say(_line([f"{name} {self._unit}" if name == "cost" else name for name, _ in COLUMNS]))
        self._rounds += 1
        self._say(_line(_cells(self._rounds, done, self._decided())))


def _cells(number: int, done: Round, decision: Decision | None) -> list[str]:
    took = f"{(done.draft_seconds + done.verify_seconds) * 1000:.2f}"
    got = [str(done.accepted) if done.drafted else NONE, str(len(done.tokens))]
    if decision is None:
        mode = "draft" if done.drafted else "plain"
        return [str(number), mode, NONE, str(done.drafted), str(done.drafted + 1), got[0], NONE, got[1], NONE, took, NONE, NONE]
    return [
        str(number),
        decision.mode,
        str(decision.drafted),
        str(decision.verified),
        str(decision.verified + decision.padding + 1),
        got[0],
        f"{decision.expected:.2f}",
        got[1],
        f"{decision.cost * 1000:.2f}",
        took,
        f"{decision.best_rate / decision.plain_rate:.2f}",
        " ".join(f"{confidence:.2f}" for confidence in decision.confidences) or NONE,
    ]


def _line(cells: list[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))
