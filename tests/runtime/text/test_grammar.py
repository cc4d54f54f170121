"""Constraints: what they allow at each state, that looking ahead leaves no trace, and what hostile grammars cost."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import resource
import socket
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
jsonschema = pytest.importorskip("jsonschema", reason="needs edge-mtp[dev]")

from chat_words import ChatWords
from edge_devices import fork_host
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.text import matcher
from edge_runtime.text.constraints import MAX_GRAMMAR_RULES, MAX_SCHEMA_LEVELS, ConstraintSource, Gbnf, JsonSchema, Regex, ToolCalls
from edge_runtime.text.grammar import Constraint, Grammars
from edge_runtime.text.tool_grammar import tool_call_grammar
from scripted import LetterVocabulary
from tables import byte_vocabulary

VOCABULARY = byte_vocabulary(
    b"a", b"aa", b'{"', b'":', b'"}', b'", "', b"abc", b"true", b"12", b"  ", b", ", b"]}", "é".encode(), b'":"', b"<|call>"
)
GRAMMARS = Grammars(VOCABULARY, VOCABULARY.size)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 150}, "maxItems": 3},
        "kind": {"enum": ["one", "two", None]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}
ARITHMETIC = Gbnf('root ::= term ([-+*/] term){0,4}\nterm ::= number | "(" root ")"\nnumber ::= [0-9]{1,3}\n')
SOURCES: dict[str, ConstraintSource] = {
    "regex": Regex(r"(a|b[c-e]{2}|é)+(12|\.)?"),
    "gbnf": ARITHMETIC,
    "schema": JsonSchema(SCHEMA),
}


def walk(constraint: Constraint, seed: int, longest: int = 400) -> list[int]:
    """Emits random tokens that the constraint allows until it is closed; the end is taken where it is offered, every third time."""
    chance, tokens = random.Random(seed), []
    while len(tokens) < longest:
        choices = np.flatnonzero(constraint.allowed(())).tolist()
        words = [token for token in choices if token not in VOCABULARY.eog_tokens]
        end = len(words) < len(choices) and (not words or chance.random() < 0.3)
        tokens.append(chance.choice(sorted(VOCABULARY.eog_tokens)) if end else chance.choice(words))
        if constraint.advance(tokens[-1]):
            break
    return tokens


def is_valid(name: str, text: str) -> bool:
    if name == "regex":
        return re.fullmatch(SOURCES[name].pattern, text) is not None  # type: ignore[union-attr]
    if name == "gbnf":
        return re.fullmatch(r"[-+*/()0-9]+", text) is not None and isinstance(eval(re.sub(r"\b0+(\d)", r"\1", text).replace("/", "+")), int)
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.mark.parametrize("name", SOURCES)
def test_whatever_is_allowed_to_the_end_is_valid(name):
    ended = 0
    for seed in range(30):
        constraint = GRAMMARS.constrain(SOURCES[name])
        tokens = walk(constraint, seed)
        if constraint.complete:
            ended += 1
            assert is_valid(name, VOCABULARY.text(tokens)), VOCABULARY.text(tokens)
    assert ended > 15


@pytest.mark.parametrize("name", SOURCES)
def test_one_token_is_allowed_where_the_mask_says_so(name):
    """`allows` and `valid` ask the library another question than the mask does; at every state of some walks they agree."""
    for seed in range(2):
        walked, asked, checked = (GRAMMARS.constrain(SOURCES[name]) for _ in range(3))
        for token in walk(walked, seed, 60):
            mask = checked.allowed(())
            assert [asked.allows((), t) for t in range(VOCABULARY.size)] == mask.tolist()
            assert [asked.valid([t]) for t in range(VOCABULARY.size)] == mask.astype(int).tolist()
            assert asked.advance(token) == checked.advance(token)


@pytest.mark.parametrize("name", SOURCES)
def test_looking_ahead_leaves_no_trace(name):
    chance = random.Random(5)
    for seed in range(5):
        tokens = walk(GRAMMARS.constrain(SOURCES[name]), seed, 40)
        looked, plain = GRAMMARS.constrain(SOURCES[name]), GRAMMARS.constrain(SOURCES[name])
        for place, token in enumerate(tokens):
            other = [token]
            while other and looked.valid(other) == len(other) and len(other) < 5 and not looked.closed(other):
                other.append(int(chance.choice(np.flatnonzero(looked.allowed(other)))))
            right = tokens[place : place + chance.randrange(4)]
            for ahead in (right, right[:1], other[:3]):
                if looked.valid(ahead) == len(ahead):
                    looked.allowed(ahead)
            assert np.array_equal(looked.allowed(()), plain.allowed(()))
            assert looked.complete == plain.complete
            assert looked.advance(token) == plain.advance(token)


def test_the_end_is_allowed_exactly_where_the_text_is_whole():
    constraint = GRAMMARS.constrain(Regex("aab?"))
    ends = []
    for letter in "aab":
        ends.append((constraint.complete, constraint.allowed(())[[0, 1]].tolist(), constraint.closed(())))
        closed = constraint.advance(VOCABULARY.encode(letter)[0])
    assert ends == [(False, [False] * 2, False), (False, [False] * 2, False), (True, [True] * 2, False)]
    assert closed
    assert constraint.complete
    assert np.flatnonzero(constraint.allowed(())).tolist() == [0, 1]


def test_an_end_among_the_drafts_closes_what_follows():
    constraint = GRAMMARS.constrain(Regex("a+"))
    a = VOCABULARY.encode("a")[0]
    assert constraint.valid([a, a, 0, a]) == 3
    assert constraint.closed([a, 0])
    assert np.flatnonzero(constraint.allowed([a, 0])).tolist() == [0, 1]
    assert not constraint.advance(a)
    assert constraint.advance(1)
    assert constraint.complete


def test_all_spellings_of_a_text_are_allowed():
    constraint = GRAMMARS.constrain(Regex("aaa"))
    assert {VOCABULARY.piece(int(t)) for t in np.flatnonzero(constraint.allowed(()))} == {b"a", b"aa"}
    assert np.flatnonzero(constraint.allowed(())).size == 3  # one of them is there twice


def test_a_control_token_is_no_text_even_where_it_is_shown():
    constraint = GRAMMARS.constrain(Regex("[^x]+"))
    assert constraint.valid(VOCABULARY.encode("<|call>")) == 7
    assert not constraint.allows((), VOCABULARY.pieces.index(b"<|call>"))


def test_characters_of_several_bytes_may_be_spelled_by_bytes():
    constraint = GRAMMARS.constrain(Regex("é"))
    first, second = VOCABULARY.pieces.index(b"\xc3"), VOCABULARY.pieces.index(b"\xa9")
    assert constraint.valid([first, second]) == 2
    assert constraint.valid([VOCABULARY.pieces.index("é".encode())]) == 1


def test_blanks_between_json_parts_are_bounded():
    constraint = GRAMMARS.constrain(JsonSchema({"type": "array"}))
    assert constraint.valid(VOCABULARY.encode("[ 1")) == 3
    assert constraint.valid(VOCABULARY.encode("[  1")) == 2
    assert constraint.valid(VOCABULARY.encode("[\n    1")) == 7
    assert constraint.valid(VOCABULARY.encode("[" + "\n" * 9)) == 3
    own = GRAMMARS.constrain(JsonSchema({"type": "array", "x-guidance": {"whitespace_flexible": False}}))
    assert own.valid(VOCABULARY.encode("[1,2]")) == 5
    assert own.valid(VOCABULARY.encode("[ 1")) == 1


def test_one_of_several_schemas_is_any_of_them():
    tagged = [{"properties": {"kind": {"const": kind}, "size": {"type": "integer"}}, "required": ["size"]} for kind in "ab"]
    constraint = GRAMMARS.constrain(JsonSchema({"type": "array", "items": {"oneOf": tagged}}))
    assert constraint.valid(VOCABULARY.encode('[{"kind":"b","size":1}]')) == len('[{"kind":"b","size":1}]')
    assert constraint.valid(VOCABULARY.encode('[{"kind":"c"')) == len('[{"kind":"')


def test_a_format_that_nobody_knows_is_ignored():
    schema = {"properties": {"format": {"type": "string", "format": "password"}}}
    assert GRAMMARS.constrain(JsonSchema(schema | {"const": {"format": "x"}})).valid(VOCABULARY.encode('{"format":"x"}')) == 14
    known = GRAMMARS.constrain(JsonSchema({"type": "string", "format": "date"}))
    assert known.valid(VOCABULARY.encode('"2026-01-01"')) == 12
    assert known.valid(VOCABULARY.encode('"x')) == 1


def test_a_schema_may_be_text_or_a_dictionary():
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        assert GRAMMARS.constrain(JsonSchema(schema)).valid(VOCABULARY.encode('{"name":"a')) == 10
    assert GRAMMARS.constrain(JsonSchema(True)).valid(VOCABULARY.encode("[1,{}]")) == 6


def test_gbnf_takes_unicode_escapes_comments_and_classes():
    grammar = Gbnf('# a comment\nroot ::= "\\u00e9\\u0041" [^"\\\\\\]x] ("," # one\n  word)?\nword ::= [\\u00e0-\\u00ff]+\n')
    constraint = GRAMMARS.constrain(grammar)
    assert constraint.valid(VOCABULARY.encode("éAb,éà")) == len("éAb,éà".encode())
    for text in ("éA]", "éAx", 'éA"', "éB"):
        assert constraint.valid(VOCABULARY.encode(text)) < len(text.encode())


REFUSED = {
    "no JSON": (JsonSchema("{"), "is not JSON"),
    "no schema": (JsonSchema("[]"), "is a list"),
    "false": (JsonSchema(False), "schema is false"),
    "not supported": (JsonSchema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "without end": (JsonSchema({"$ref": "#"}), "no text that it allows"),
    "a file": (JsonSchema({"$ref": "file:///etc/passwd"}), "file:///etc/passwd"),
    "not GBNF": (Gbnf('root = "a"'), "Expected ::="),
    "a rule missing": (Gbnf("root ::= other"), "'other' not found"),
    "no root": (Gbnf('a ::= "a"'), "No 'root' rule"),
    "no character": (Gbnf('root ::= "\\UFFFFFFFF"'), "is not a character"),
    "an open group": (Regex("(a"), "unclosed group"),
    "look-around": (Regex("a(?=b)"), "look-around"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one_sentence_with_the_reason(name):
    source, words = REFUSED[name]
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        GRAMMARS.constrain(source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


BOMBS = {
    "a large schema": JsonSchema('{"enum": ["' + "x" * (1 << 20) + '"]}'),
    "nested JSON": JsonSchema('{"items":' * 50_000 + "{}" + "}" * 50_000),
    "JSON nested beyond the library": JsonSchema('{"items":' * 300 + "{}" + "}" * 300),
    "a chain of schemas": JsonSchema({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(20_000)}, "$ref": "#/$defs/d0"}),
    "references without a target": JsonSchema({"allOf": [{"$ref": f"#x{i}"} for i in range(20_000)]}),
    "remainders": JsonSchema({"type": "integer", "multipleOf": 10_000_019}),
    "remainders together": JsonSchema({"allOf": [{"type": "integer", "multipleOf": prime} for prime in (10007, 10009, 10037)]}),
    "decimal remainders": JsonSchema({"type": "number", "multipleOf": 0.1234567}),
    "products of alternatives": JsonSchema(
        {"allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": {"type": "integer"}}} for j in range(10)]} for i in range(8)]}
    ),
    "a large grammar": Gbnf('root ::= "' + "a" * 70_000 + '"'),
    "a chain of rules": Gbnf("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5000)) + 'r5000 ::= "a"\n'),
    "nested groups": Gbnf("root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "doubling rules": Gbnf("root ::= r0 r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40 ::= "a"\n'),
    "a large pattern": Regex("a" * 70_000),
    "nested pattern": Regex("(" * 30_000 + "a" + ")" * 30_000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name):
    with pytest.raises(RequestError):
        walk(GRAMMARS.constrain(BOMBS[name]), 1)


def nested(levels: int, kinds: str | list[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": kinds, "items": schema, "properties": {"a": True}}
    return schema


@pytest.mark.parametrize("kinds", ["array", ["array", "object"] * 50, ["array", ["array"]]])
def test_the_grammar_of_a_tool_grows_no_faster_than_its_parameters(kinds):
    """Each level of arrays wrote the levels below twice, each name of a type once more: 1 kB of a request filled the server's memory."""
    parameters = {"type": "object", "properties": {"a": nested(60, kinds)}, "required": ["a"]}
    calls, words = ToolCalls((("f", parameters),)), ChatWords()
    assert len(tool_call_grammar(calls, words.control_tokens)) < 30_000
    text = "<|tool_call>call:f{a:" + "[" * 60 + "]" * 60 + "}<tool_call|>"
    constraint = Grammars(words, words.size).constrain(calls)
    assert not any(constraint.advance(token) for token in words.encode(text, add_bos=False, parse_special=True)[:-1])


def test_names_of_types_that_json_has_not_are_any_value_once():
    """Each copied the schema: 32,000 names beside as many keys took 2.2 seconds of processor time."""
    few, many = (ToolCalls((("f", {"properties": {"a": {"type": ["null", *(f"t{i}" for i in range(n))]}}}),)) for n in (1, 1000))
    assert tool_call_grammar(many, ChatWords().control_tokens) == tool_call_grammar(few, ChatWords().control_tokens)


def test_references_of_a_tool_that_lead_too_deep_are_refused():
    steps = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}
    with pytest.raises(RequestError, match="lead too deep; use fewer references"):
        tool_call_grammar(
            ToolCalls((("f", {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": steps | {"d5000": {}}}),)), ChatWords().control_tokens
        )


@pytest.mark.parametrize(
    "source", [Regex("((a{1000}){1000}){1000}"), Regex("(a|b)*a(a|b){200}"), JsonSchema({"minItems": 10**9, "type": "array"})]
)
def test_what_only_looks_like_a_bomb_is_served(source):
    walk(GRAMMARS.constrain(source), 1, 100)


DEEPEST = f"""
from edge_runtime.text.constraints import Gbnf, JsonSchema
from edge_runtime.text.grammar import Grammars
from tables import byte_vocabulary

vocabulary = byte_vocabulary()
grammars = Grammars(vocabulary, vocabulary.size)
levels = {MAX_SCHEMA_LEVELS}
wraps = {{
    "plain": (2, lambda inner: inner),
    "items": (3, lambda inner: {{"type": "array", "items": inner}}),
    "properties": (4, lambda inner: {{"type": "object", "properties": {{"a": inner}}, "required": ["a"]}}),
    "allOf": (5, lambda inner: {{"allOf": [inner, {{"type": ["null", "array"]}}]}}),
    "anyOf": (5, lambda inner: {{"anyOf": [inner, {{"type": "string"}}]}}),
    "deep": (61, lambda inner: [inner := {{"type": "array", "items": inner}} for _ in range(59)][-1]),
}}
for name, (depth, wrap) in wraps.items():
    count = (levels - 70) // depth
    schemas = {{f"d{{i}}": wrap({{"$ref": f"#/$defs/d{{i + 1}}"}}) for i in range(count)}}
    grammars.constrain(JsonSchema({{"$defs": schemas | {{f"d{{count}}": {{"type": "null"}}}}, "$ref": "#/$defs/d0"}})).allowed(())
    print(name, count, flush=True)
rules = {MAX_GRAMMAR_RULES} - 2
for name, tail in (("tokens", ""), ("rules", " root")):
    for nested in (0, 20):
        body = lambda i: '("a" ' * nested + f"r{{i + 1}}" + ' | "b" "c"' + tail + ")" * nested
        chain = "".join(f"r{{i}} ::= {{body(i)}}\\n" for i in range(rules))
        try:
            grammars.constrain(Gbnf("root ::= r0 r0\\n" + chain + f'r{{rules}} ::= "a"\\n')).allowed(())
        except Exception as error:
            print(error)
        print(name, nested, flush=True)
print("alive")
"""


def test_the_deepest_grammars_that_are_served_leave_the_process_alive():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.run([sys.executable, "-c", DEEPEST], capture_output=True, text=True, env=environment, timeout=120)
    assert child.stdout.endswith("alive\n"), child.stdout + child.stderr
    assert child.returncode == 0


HUGE = 10**9
HOSTILE: dict[str, ConstraintSource] = {
    "maxLength": JsonSchema({"type": "string", "maxLength": HUGE}),
    "minLength": JsonSchema({"type": "string", "minLength": HUGE}),
    "pattern and maxLength": JsonSchema({"type": "string", "pattern": "^.*a.{20}$", "maxLength": HUGE}),
    "minItems": JsonSchema({"type": "array", "minItems": HUGE}),
    "nested minItems": JsonSchema({"type": "array", "items": {"type": "array", "minItems": HUGE}, "minItems": HUGE}),
    "maxItems": JsonSchema({"type": "array", "minItems": HUGE, "maxItems": HUGE, "items": {"enum": [1, 2]}}),
    "minProperties": JsonSchema({"type": "object", "minProperties": HUGE}),
    "a separator of its own": JsonSchema({"type": "array", "x-guidance": {"item_separator": "(.*a.{20}b)*"}}),
    "a remainder": JsonSchema({"type": "integer", "multipleOf": 9973, "minimum": 3, "maximum": 10**17}),
    "repeated": Regex(".{0,1000000000}"),
    "repeated thrice": Regex("((a{1000}){1000}){1000}"),
    "exponential": Regex("(.*a.{15}b)*"),
    "classes intersected": Regex(r"([\w&&[^a]]{1,1000}){1,1000}"),
    "look-ahead": Regex("(?=.*a.{20})(?=.*b.{20}).*"),
    "many at once": Regex("(.{0,1000}a.{0,1000}b){1000}"),
    "a repeated rule": Gbnf('root ::= a{0,1000000000}\na ::= [a-z] | "x" root "y"'),
    "ambiguous": Gbnf('root ::= root root | root root root | [a-z] | "a" | root "a" root'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_refused_or_served_within_the_limits(name):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(RequestError):
        walk(GRAMMARS.constrain(HOSTILE[name]), 1, 30)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 64 << 10
    assert walk(GRAMMARS.constrain(SOURCES["regex"]), 1)


@pytest.mark.slow
@pytest.mark.skipif(not fork_host.AVAILABLE, reason="needs fork")
def test_a_compilation_that_takes_too_long_ends_with_the_reason():
    schema = {"type": "object", "properties": {f"p{number}": True for number in range(20000)}}
    with pytest.raises(RequestError, match="more than 5 s of processor time or 640 MB; simplify it"):
        GRAMMARS.constrain(JsonSchema(schema))


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BackendError, match=r"pip install 'edge-mtp\[grammar\]'"):
        Grammars(VOCABULARY, VOCABULARY.size)


def test_a_vocabulary_without_an_end_is_refused():
    with pytest.raises(RequestError, match="no end token"):
        Grammars(LetterVocabulary(), 17)


def test_many_slow_steps_are_limited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them delays a round of all of a server's clients: one that takes nearly the limit each time ends soon."""
    clock, limits = itertools.count(step=0.2), []
    matching = types.SimpleNamespace(compute_bitmask=lambda: b"", is_error=lambda: False, is_stopped=lambda: False)
    library = types.SimpleNamespace(LLParserLimits=lambda **_: None, LLMatcher=lambda *_, **__: matching)
    monkeypatch.setattr(matcher, "limit_step", limits.append)
    monkeypatch.setattr(matcher.time, "process_time", lambda: next(clock))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in [bytes([matcher.COMPILE]) + b"x"] + [bytes([matcher.MASK])] * 40:
            fork_host.send(ours, message)
        ours.shutdown(socket.SHUT_WR)
        with contextlib.suppress(EOFError):
            matcher.serve((library, None), theirs)
    steps = [limit for limit in limits[1:] if limit]
    assert steps[:20] == [matcher.STEP_SECONDS] * 20
    assert steps[-1] == matcher._SHORTEST_SECONDS, "no step has no limit"
    assert steps == sorted(steps, reverse=True)
