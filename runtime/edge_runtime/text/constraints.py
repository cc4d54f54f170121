"""Constraints on the output of a request: a JSON schema, a grammar, a regular expression, or tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

THOUGHTS_BEGIN, THOUGHTS_END = "<|channel>", "<channel|>"


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


@dataclass(frozen=True)
class AfterThoughts:
    """The model may think first: its thinking channel is free, and what follows satisfies `answer`.

    `opened` says that the prompt has opened the channel already. In a vocabulary without a thinking channel `answer` holds at once.
    """

    answer: JsonSchema | Gbnf | Regex | ToolCalls
    opened: bool = False


ConstraintSource = JsonSchema | Gbnf | Regex | ToolCalls | AfterThoughts
