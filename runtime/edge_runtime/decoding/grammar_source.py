"""What a constraint forces, as a source of drafts."""

from __future__ import annotations

from collections.abc import Sequence

from edge_runtime.drafting.sources import Guess
from edge_runtime.text.constraints import Constraint

NAME = "grammar"
# The last token of a forced text may merge with the free text after it.
_INNER, _LAST = f"{NAME} inner", f"{NAME} last"
GRAMMAR_PRIORS = {_INNER: 0.95, _LAST: 0.8}


class GrammarSource:
    """Implements `sources.Source`. The constraint is advanced by the request itself."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def guess(self, ahead: Sequence[int], most: int) -> Guess:
        """Returns the forced tokens."""
        if self._constraint.valid(ahead) < len(ahead):
            return Guess(NAME)
        tokens = self._constraint.forced(ahead)
        bins = [_INNER] * (len(tokens) - 1) + [_LAST] * bool(tokens)
        return Guess(NAME, tuple(tokens[:most]), tuple(bins[:most]))

    def add(self, tokens: Sequence[int]) -> None:
        """Does nothing: the constraint has the tokens."""
