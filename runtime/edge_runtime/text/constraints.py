"""What a request may write: a JSON schema, a grammar or a regular expression, and the seam to what enforces it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class JsonSchema:
    """The text is JSON that this schema describes. `schema` is the schema itself or its JSON text."""

    schema: Mapping[str, Any] | bool | str


@dataclass(frozen=True)
class Gbnf:
    """The text is a sentence of this grammar, in llama.cpp's GBNF, whose first rule is named root.

    Rules without recursion become tokens of a lexer that takes the longest: `word ::= [a-z]+` leaves no letter to what follows it.
    """

    text: str


@dataclass(frozen=True)
class Regex:
    """The whole text matches this regular expression (syntax of Rust's regex, without look-around and back references)."""

    pattern: str


ConstraintSource = JsonSchema | Gbnf | Regex


class Constraint(Protocol):
    """Belongs to one request and follows what it emits. Looking ahead over drafts leaves no trace.

    A token that ends a generation is allowed exactly where the text is whole, and alone where nothing can follow it.
    """

    def allowed(self, ahead: Sequence[int]) -> NDArray[np.bool_]:
        """Returns which tokens may follow what was emitted and then `ahead`, bool [vocabulary]; a view that later calls leave alone."""

    def allows(self, ahead: Sequence[int], token: int) -> bool:
        """Whether `token` may follow `ahead`: as `allowed` says, for far less work."""

    def closed(self, ahead: Sequence[int]) -> bool:
        """Whether no text can follow `ahead`: drafts end there, and so does the request."""

    def valid(self, drafts: Sequence[int]) -> int:
        """Returns how many of `drafts`, from the first, may follow what was emitted."""

    def advance(self, token: int) -> bool:
        """Takes an emitted token; returns whether no text can follow it."""

    @property
    def complete(self) -> bool:
        """Whether what was emitted is complete: it could end here."""
