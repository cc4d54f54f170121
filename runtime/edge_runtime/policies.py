"""How many tokens to draft next. A policy sees counts, never tokens or logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edge_runtime.bundle import MAX_DRAFT_LENGTH
from edge_runtime.errors import RequestError


class DraftLengthPolicy(Protocol):
    """Decides before each round; is told after it."""

    def draft_length(self) -> int:
        """Returns how many tokens to draft in the next round; 0 is plain decoding."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Learns what became of the last round's drafts."""


@dataclass(frozen=True)
class Fixed:
    """The same draft length every round. `Fixed(0)` is plain decoding on the same path."""

    length: int

    def __post_init__(self) -> None:
        if not 0 <= self.length <= MAX_DRAFT_LENGTH:
            raise RequestError(f"draft length {self.length} is outside 0..{MAX_DRAFT_LENGTH}; choose one inside")

    def draft_length(self) -> int:
        """Returns the fixed length."""
        return self.length

    def observe(self, drafted: int, accepted: int) -> None:
        """A fixed length learns nothing."""
