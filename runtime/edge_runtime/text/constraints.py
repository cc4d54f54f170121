"""Constraints on the output of a request: a JSON schema, a grammar or a regular expression, and the interface that enforces them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class JsonSchema:
    """The text is JSON that is valid for this schema. `schema` is the schema itself or its JSON text."""

    schema: Mapping[str, Any] | bool | str


@dataclass(frozen=True)
class Gbnf:
    """The text is a sentence of this grammar, in llama.cpp's GBNF, whose first rule is named root.

    Rules without recursion become tokens of a lexer that takes the longest: `word ::= [a-z]+` leaves no letter to what follows it.
    """

    text: str


@dataclass(frozen=True)
class Regex:
    """The complete text matches this regular expression (syntax of Rust's regex, without look-around and back references)."""

    pattern: str


@dataclass(frozen=True)
class ToolCalls:
    """The output is a call of one of the functions, each with the JSON schema of its parameters, in Gemma 4's notation.

    With `several` it is one call or more; with an `answer` it may be JSON of that schema instead.
    """

    functions: tuple[tuple[str, Mapping[str, Any] | None], ...]
    several: bool = False
    answer: JsonSchema | None = None


ConstraintSource = JsonSchema | Gbnf | Regex | ToolCalls


class Constraint(Protocol):
    """The constraint of one request, in the state after its emitted tokens. Queries about drafts (`ahead`) do not change the state.

    A token that ends a generation is allowed exactly where the text is complete, and only such a token where no text can follow.
    """

    def allowed(self, ahead: Sequence[int]) -> NDArray[np.bool_]:
        """Returns which tokens may follow the emitted tokens and `ahead`, bool [vocabulary]; later calls do not change the array."""

    def allows(self, ahead: Sequence[int], token: int) -> bool:
        """Whether `token` may follow `ahead`: the same as in `allowed`, but much faster."""

    def closed(self, ahead: Sequence[int]) -> bool:
        """Whether no text can follow `ahead`: drafts end there, and so does the request."""

    def valid(self, drafts: Sequence[int]) -> int:
        """Returns how many of `drafts`, from the first, may follow the emitted tokens."""

    def forced(self, ahead: Sequence[int]) -> list[int]:
        """Returns the tokens expected after `ahead` because the constraint leaves no choice but blanks; a guess, to be verified."""

    def advance(self, token: int) -> bool:
        """Adds an emitted token; returns whether no text can follow it."""

    @property
    def complete(self) -> bool:
        """Whether the emitted text is complete, so that it could end here."""
