"""What a constraint forces, with the blanks that the text is written with."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")

from edge_runtime.text.constraints import Gbnf, JsonSchema, Regex
from edge_runtime.text.forced_text import BlankStyle, JsonText
from edge_runtime.text.grammar import Grammars
from tables import byte_vocabulary

VOCABULARY = byte_vocabulary(b'{"', b'":', b'", "', b"\n  ", b"abc", "é".encode())
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["one", "other"]}, "on": {"type": "boolean"}},
    "required": ["name", "kind", "on"],
    "additionalProperties": False,
}
VALUES = {"name": "é: {a", "kind": "other", "on": True}
STYLES: dict[str, dict[str, Any]] = {
    "spaced": {},
    "dense": {"separators": (",", ":")},
    "indented": {"indent": 2},
}


def rounds(grammars: Grammars, source: Any, text: str) -> tuple[int, int]:
    """Writes `text` with the forced tokens as drafts; returns rounds and drafts that were wrong."""
    constraint, left, count, wrong = grammars.constrain(source), VOCABULARY.encode(text), 0, 0
    while left:
        count += 1
        guess = constraint.forced(())
        right = next((i for i, (item, other) in enumerate(zip(guess, left, strict=False)) if item != other), min(len(guess), len(left)))
        wrong += right < min(len(guess), len(left))
        for token in left[: right + 1]:
            constraint.advance(token)
        del left[: right + 1]
    return count, wrong


@pytest.mark.parametrize("style", STYLES)
def test_a_text_in_a_known_style_takes_few_rounds(style):
    grammars, text = Grammars(VOCABULARY, VOCABULARY.size), json.dumps(VALUES, ensure_ascii=False, **STYLES[style])
    first, _ = rounds(grammars, JsonSchema(SCHEMA), text)
    second, wrong = rounds(grammars, JsonSchema(SCHEMA), text)
    free = len(VALUES["name"].encode()) + 1 + 2  # the name and its end, a letter of the enum, one of the truth value
    assert second <= free + 3 < len(text.encode()) / 2
    assert second <= first
    assert wrong == 0


def test_forced_text_after_drafts_leaves_no_trace():
    constraint = Grammars(VOCABULARY, VOCABULARY.size).constrain(JsonSchema(SCHEMA))
    before = constraint.forced(())
    ahead = VOCABULARY.encode('{"name": "a"')
    assert VOCABULARY.text(constraint.forced(ahead)).startswith(', "kind": "o')
    assert constraint.forced(()) == before
    assert constraint.valid(ahead) == len(ahead)


@pytest.mark.parametrize(
    ("source", "text", "forced"), [(Regex("ab(c|d)xyz"), "abc", b"xyz"), (Gbnf('root ::= "a" ("bcd" | "ef")'), "ab", b"cd")]
)
def test_other_constraints_force_text_too(source, text, forced):
    constraint = Grammars(VOCABULARY, VOCABULARY.size).constrain(source)
    for token in VOCABULARY.encode(text):
        constraint.advance(token)
    assert b"".join(VOCABULARY.piece(token) for token in constraint.forced(())) == forced


def test_nothing_is_forced_after_the_end():
    constraint = Grammars(VOCABULARY, VOCABULARY.size).constrain(Regex("a"))
    constraint.advance(*VOCABULARY.encode("a"))
    assert constraint.forced(()) == []


def test_a_schema_with_its_own_layout_is_followed():
    layout = SCHEMA | {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
    _, wrong = rounds(Grammars(VOCABULARY, VOCABULARY.size), JsonSchema(layout), json.dumps(VALUES, ensure_ascii=False))
    assert wrong == 0


@pytest.mark.parametrize("style", STYLES)
def test_blanks_are_taken_off_and_put_back(style):
    data = {"a": [1, {"b": 'x: {"y"}, \\"'}], "c": [], "d": None}
    text, dense = json.dumps(data, **STYLES[style]).encode(), json.dumps(data, separators=(",", ":")).encode()
    known = BlankStyle()
    assert JsonText(known).feed(text) == dense
    fresh = JsonText(known)
    assert fresh.with_blanks(dense, fresh.position) == text


def test_an_unknown_depth_takes_the_blanks_of_the_nearest():
    style = BlankStyle()
    style.learn((b",", b"v", 1), b"\n  ")
    assert style.expected((b",", b"v", 2)) == b"\n  "
    assert style.expected((b":", b"v", 2)) == b" "
