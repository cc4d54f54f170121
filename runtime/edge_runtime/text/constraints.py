"""Constraints on the output of a request (a JSON schema, a grammar, a regular expression or tool calls), and their limits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from edge_runtime.errors import RequestError

THOUGHTS_BEGIN, THOUGHTS_END = "<|channel>", "<channel|>"


@dataclass(frozen=True)
class JsonSchema:
    """The text is JSON that this schema accepts. `schema` is the schema itself or its JSON text."""

    schema: Mapping[str, Any] | bool | str


@dataclass(frozen=True)
class Gbnf:
    """The text matches this grammar in llama.cpp's GBNF, whose start rule is named root.

    Rules without recursion become tokens of a lexer, which takes the longest match: no letter can follow `word ::= [a-z]+`.
    """

    text: str


@dataclass(frozen=True)
class Regex:
    """The complete text matches this regular expression (the syntax of Rust's regex, without look-around and back references)."""

    pattern: str


@dataclass(frozen=True)
class ToolCalls:
    """The output is a call of one of the functions, in Gemma 4's notation. Each function has the JSON schema of its parameters.

    With `several`, the output is one or more calls. With `answer`, it may be JSON of that schema instead.
    """

    functions: tuple[tuple[str, Mapping[str, Any] | None], ...]
    several: bool = False
    answer: JsonSchema | None = None


@dataclass(frozen=True)
class AfterThoughts:
    """The model may think first: its thinking channel is unconstrained, and what follows satisfies `answer`.

    `opened` says that the prompt has already opened the channel. If the vocabulary has no thinking channel, `answer` applies at once.
    """

    answer: JsonSchema | Gbnf | Regex | ToolCalls
    opened: bool = False


ConstraintSource = JsonSchema | Gbnf | Regex | ToolCalls | AfterThoughts


# Limits for grammars from outside. They are needed because llguidance recurses on the machine's stack and does not limit everything.
#
# Measured with llguidance 1.9.1: on a stack of 8 MiB, a chain of 1200 schemas ends the process. `multipleOf` 1000003 takes 5 seconds and
# 276 MiB, because its automaton has a state for each remainder.

MAX_SCHEMA_BYTES = 1 << 20
MAX_SCHEMA_LEVELS = 4000
MAX_REMAINDERS = 10_000
MAX_GRAMMAR_BYTES = 64 << 10
MAX_GRAMMAR_RULES = 500

_UNICODE_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def read_schema(schema: Mapping[str, Any] | bool | str) -> dict[str, Any] | bool:
    """Returns the parsed JSON schema. Raises RequestError if it is invalid or too large to compile."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        check_size("the JSON schema", text, MAX_SCHEMA_BYTES)
        parsed = json.loads(text)
        if not isinstance(parsed, dict | bool):
            raise RequestError(f"the JSON schema is a {type(parsed).__name__}; give an object, or true for any JSON")
        levels = _levels(parsed)
        remainders = math.prod({_remainders(value) for value in _values(parsed, "multipleOf")})
    except RecursionError:
        raise RequestError("the JSON schema is nested too deeply; flatten it") from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}") from None
    if levels > MAX_SCHEMA_LEVELS:
        raise RequestError(f"the JSON schema has {levels} levels, with references followed; at most {MAX_SCHEMA_LEVELS} are allowed")
    if remainders > MAX_REMAINDERS:
        raise RequestError(
            f"the multipleOf values of the JSON schema have {remainders} remainders together; at most {MAX_REMAINDERS} are allowed"
        )
    return parsed


def read_grammar(text: str) -> str:
    r"""Returns the GBNF with \u escapes replaced by characters. Raises RequestError if it is too large to compile."""
    check_size("the grammar", text)
    rules = text.count("::=")
    if rules > MAX_GRAMMAR_RULES:
        raise RequestError(f"the grammar has {rules} rules; at most {MAX_GRAMMAR_RULES} are allowed")
    return _UNICODE_ESCAPE.sub(_character, text)


def check_size(what: str, text: str, limit: int = MAX_GRAMMAR_BYTES) -> None:
    """Raises RequestError for a text of more than `limit` bytes; `what` names it."""
    size = len(text.encode("utf-8", "replace"))
    if size > limit:
        raise RequestError(f"{what} has {size} bytes; at most {limit} are allowed")


def _levels(schema: object) -> int:
    """Returns an upper bound on the schema's depth with each reference followed once: the sum of its depth and all targets' depths."""
    depths: dict[int, int] = {}
    targets = {ref for ref in _values(schema, "$ref") if isinstance(ref, str)}
    return _depth(schema, depths) + sum(_depth(_target(schema, ref), depths) for ref in targets)


def _target(schema: object, ref: str) -> object:
    """Returns the target of a reference within the document; the document itself if it is not a plain path."""
    value = schema
    if not ref.startswith("#/"):
        return schema
    for name in ref[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(value, dict) or name not in value:
            return schema
        value = value[name]
    return value


def _depth(value: object, known: dict[int, int]) -> int:
    if id(value) not in known:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        known[id(value)] = 1 + max((_depth(part, known) for part in parts), default=0)
    return known[id(value)]


def _values(value: object, name: str) -> Iterator[Any]:
    """Yields the values of the key `name` in all objects."""
    if isinstance(value, dict):
        if name in value:
            yield value[name]
        for part in value.values():
            yield from _values(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from _values(part, name)


def _remainders(multiple: object) -> int:
    """Returns the number of states of an automaton for multiples of a number: its digits without decimal point and final zeros."""
    if not isinstance(multiple, int | float) or isinstance(multiple, bool) or not math.isfinite(multiple):
        return 1
    digits = Decimal(str(multiple)).normalize().as_tuple().digits
    return max(1, int("".join(map(str, digits))))


def _character(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2]
    if code is None:
        return escape[0]
    number = int(code, 16)
    if number < 128:
        return f"\\x{number:02x}"
    try:
        chr(number).encode()
    except (ValueError, OverflowError):
        raise RequestError(f"{escape[0]} in the grammar is not a character; write one between U+0000 and U+10FFFF") from None
    return chr(number)
