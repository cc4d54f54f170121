"""The grammar of calls: what it lets a model write fits the function's parameters, and is read back as the call that it is."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
jsonschema = pytest.importorskip("jsonschema", reason="needs edge-mtp[dev]")

from chat_words import FIRST_BYTE, ChatWords
from edge_runtime.errors import RequestError
from edge_runtime.text.constraints import AfterThoughts, ConstraintSource, JsonSchema, Regex, ToolCalls
from edge_runtime.text.grammar import Constraint, Grammars
from edge_runtime.text.tool_calls import QUOTE, parse_tool_call

WORDS = ChatWords()
GRAMMARS = Grammars(WORDS, WORDS.size)


def takes(source: ConstraintSource, text: str) -> bool:
    """Whether a model may write a text, with Q for the mark of a string, and end there."""
    constraint = GRAMMARS.constrain(source)
    ids = WORDS.encode(text.replace("Q", QUOTE), add_bos=False, parse_special=True)
    if constraint.valid(ids) < len(ids):
        return False
    for token in ids:
        constraint.advance(token)
    return constraint.complete


def called(parameters: dict[str, Any] | None, arguments: str) -> bool:
    return takes(ToolCalls((("f", parameters),)), f"<|tool_call>call:f{arguments}<tool_call|>")


NODE = {"type": "object", "properties": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}, "y": {"type": "integer"}}}
LIST = {"type": "array", "items": {"type": "integer"}}
X, Y, Z = ({"type": "object", "required": [name]} for name in "xyz")
# What a function declares of its parameter a; what may be written for it, and what may not.
VALUES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "enum and type": ({"type": ["integer", "null"], "enum": [1, "x", None]}, ["1", "null"], ["QxQ", "2"]),
    "const and enum": ({"const": 1, "enum": [1, 2]}, ["1"], ["2"]),
    "const of objects": ({"const": {"k": [1, "s"], "b": None}}, ["{b:null,k:[1,QsQ]}"], ["{b:null}", "{}"]),
    "enum and required": ({"enum": [{"x": 1}, {"y": 1}], "required": ["x"]}, ["{x:1}"], ["{y:1}"]),
    "anyOf beside properties": (
        X | {"properties": {"x": LIST}, "anyOf": [Y, Z]},
        ["{x:[1],y:2}", "{x:[],z:2}"],
        ["{x:[1]}", "{x:QxQ,y:1}"],
    ),
    "oneOf beside a type": ({"type": "integer", "oneOf": [{"enum": [1, "x"]}, {"enum": [2]}]}, ["1", "2"], ["QxQ", "3"]),
    "allOf": (
        {"allOf": [{"properties": {"x": {"type": "integer"}}}, X | {"properties": {"x": {"enum": [1, "q"]}}}]},
        ["{x:1}"],
        ["{x:QqQ}", "{}"],
    ),
    "a reference beside keywords": ({"$ref": "#/$defs/n", "required": ["y"]}, ["{n:{n:null},y:1}"], ["{n:null}", "{n:null,y:QxQ}"]),
    "properties without a type": ({"properties": {"x": {"type": "integer"}}}, ["{x:1}", "{}"], ["5", "{x:QaQ}"]),
    "a property that is false": ({"properties": {"x": False, "y": {"type": "null"}}}, ["{y:null}", "{}"], ["{x:1}"]),
    "required and not declared": (Z | {"properties": {"x": {"type": "integer"}}}, ["{x:1,z:QaQ}", "{z:1}"], ["{x:1}"]),
    "additional ones alone": ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", "{x:1,y:2}"], ["{x:QsQ}"]),
    "no additional ones": ({"type": "object", "properties": {}, "additionalProperties": False}, ["{}"], ["{x:1}"]),
    "minItems and maxItems": (LIST | {"minItems": 2, "maxItems": 3}, ["[1,2]", "[1,2,3]"], ["[]", "[1]", "[1,2,3,4]", "[1,QxQ]"]),
    "minItems alone": ({"type": "array", "minItems": 2}, ["[1,QxQ]", "[1,2,3]"], ["[1]"]),
    "maxItems 0": ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    "prefixItems": (
        {"prefixItems": [LIST, {"type": "null"}], "minItems": 1, "items": False},
        ["[[1]]", "[[],null]"],
        ["[]", "[[],null,1]"],
    ),
    "prefixItems and items": (LIST | {"prefixItems": [{"type": "null"}], "minItems": 3}, ["[null,1,2]"], ["[null,1]", "[null,1,null]"]),
    "more items than there can be": ({"type": "array", "minItems": 10**20}, [], ["[1]"]),
}


@pytest.mark.parametrize("name", VALUES)
def test_keywords_hold_together(name: str) -> None:
    schema, good, bad = VALUES[name]
    parameters = {"properties": {"a": schema}, "$defs": {"n": NODE}}
    assert [value for value in good if not called(parameters, f"{{a:{value}}}")] == []
    assert [value for value in bad if called(parameters, f"{{a:{value}}}")] == []


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
    ],
)
def test_a_function_without_parameters_gets_none(parameters: dict[str, Any] | None) -> None:
    assert called(parameters, "{}")
    assert not called(parameters, "{a:1}")


def test_a_function_that_takes_any_arguments_may_get_some() -> None:
    assert called({"type": "object", "additionalProperties": True}, "{a:1}")


@pytest.mark.parametrize("parameters", [{"properties": {"a": {"type": "integer"}}}, {"additionalProperties": False}])
def test_a_required_parameter_that_is_not_declared_is_written(parameters: dict[str, Any]) -> None:
    assert called(parameters | {"required": ["z"]}, "{z:QxQ}")
    assert not called(parameters | {"required": ["z"]}, "{}")


@pytest.mark.parametrize("schema", [{"enum": []}, {"type": "string", "const": 5}, {"allOf": [{"type": "string"}, {"type": "null"}]}, False])
def test_parameters_that_nothing_fits_are_refused(schema: Any) -> None:
    with pytest.raises(RequestError, match="parameters of the function 'f'"):
        called({"properties": {"a": schema}, "required": ["a"]}, "{}")


def test_products_of_alternatives_are_refused() -> None:
    choice = {"anyOf": [{"properties": {f"p{i}": {"type": "integer"}}} for i in range(10)]}
    with pytest.raises(RequestError, match="alternatives"):
        called({"allOf": [choice] * 12}, "{}")


BIG = [{"k": "x" * 1_000_000}]
GROWING = {"next": {"allOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/s"}]}}
COSTLY: dict[str, tuple[dict[str, Any], str]] = {
    "a long enum": ({"enum": [f"v{i}" for i in range(3000)]}, "QvQ"),
    "large values in all alternatives": ({"enum": BIG, "anyOf": [{"enum": BIG}] * 1900}, "{}"),
    "long lists in all alternatives": ({"enum": [*range(100_000)], "anyOf": [{"enum": [*range(100_000)]}] * 1900}, "QxQ"),
    "keywords that refer to themselves": ({"allOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/s"}]}, "1"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_costly_parameters_are_refused_or_written(name: str) -> None:
    """Where they took time as the product of what is in them, this would not end."""
    schema, wrong = COSTLY[name]
    with contextlib.suppress(RequestError):
        assert not called(
            {"properties": {"a": schema}, "$defs": {"n": NODE, "s": {"type": "object", "properties": GROWING}}}, f"{{a:{wrong}}}"
        )


def test_properties_beside_alternatives_are_written_once() -> None:
    """Each level doubled those below it: 20 levels would need a million rules."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(20):
        schema = {"properties": {"a": schema}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    assert called(schema, "{b:1}")


NAMES = ("a", "b", "C d")
SCALARS = st.sampled_from(["x", "", "call:", 1, 2, True, None, 1.5])
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "object", "array"])
LEAVES = st.one_of(
    st.sampled_from([{}, True]),
    st.builds(lambda kinds: {"type": kinds}, TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True)),
    st.builds(lambda values: {"enum": values}, st.lists(SCALARS, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, SCALARS | st.sampled_from([{"a": 1}, [1, "x"]])),
)


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    keywords = {
        "type": st.sampled_from(["object", "array", "string", "integer", ["object", "null"]]),
        "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "additionalProperties": st.booleans() | inner,
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "minItems": st.integers(0, 3),
        "maxItems": st.integers(0, 3),
        "enum": st.lists(SCALARS, min_size=1, max_size=3),
        "const": SCALARS,
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "$ref": st.just("#/$defs/r"),
    }
    return st.fixed_dictionaries({}, optional=keywords).map(without_slip)


def without_slip(schema: dict[str, Any]) -> dict[str, Any]:
    """Allows additional properties where the schema requires what it does not declare."""
    if schema.get("additionalProperties") is False and not set(schema.get("required", ())) <= set(schema.get("properties", ())):
        del schema["additionalProperties"]
    return schema


SCHEMAS = st.recursive(LEAVES, combined, max_leaves=6)


def written(constraint: Constraint, seed: int, longest: int = 300) -> str | None:
    """Text that the constraint allows, drawn at random, with a liking for what closes; None if it does not end."""
    chance, tokens = random.Random(seed), []
    while len(tokens) < longest:
        allowed = np.flatnonzero(constraint.allowed(())).tolist()
        closing = [token for token in allowed if token < FIRST_BYTE or WORDS.piece(token) in (b"}", b"]", b'"')]
        tokens.append(chance.choice(closing if closing and chance.random() < 0.4 else allowed))
        if constraint.advance(tokens[-1]):
            return WORDS.spell([token for token in tokens if token not in WORDS.eog_tokens])
    return None


def fits(value: Any, schema: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@example({"required": ["b"], "anyOf": [{"const": {"a": 1}}]}, {}, 0)
@given(SCHEMAS, SCHEMAS, st.integers(0, 10**6))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_calls_fit_the_parameters_of_their_function(schema: Any, referenced: Any, seed: int) -> None:
    parameters = (schema if isinstance(schema, dict) else {}) | {"$defs": {"r": referenced}}
    assume(parameters.get("type", "object") == "object")
    assume("$ref" not in json.dumps(referenced))  # a schema that refers to itself alone says nothing
    try:
        text = written(GRAMMARS.constrain(ToolCalls((("f", parameters),))), seed)
    except RequestError:
        candidates = ({}, {"a": 1}, {"b": "x"}, {"a": [], "b": {}}, {"a": None, "b": None, "C d": None})
        assert not any(fits(value, parameters | {"type": "object"}) for value in candidates)
        return
    if text is not None:
        arguments = parse_tool_call(text.removeprefix("<|tool_call>").removesuffix("<tool_call|>")).arguments
        assert fits(arguments, parameters | {"type": "object"}), arguments


@given(SCHEMAS, SCHEMAS, st.integers(0, 10**6))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_json_fits_its_schema(schema: Any, referenced: Any, seed: int) -> None:
    schema = (schema if isinstance(schema, dict) else {}) | {"$defs": {"r": referenced}}
    assume("$ref" not in json.dumps(referenced))
    try:
        text = written(GRAMMARS.constrain(JsonSchema(schema)), seed)
    except RequestError:
        return
    assert text is None or fits(json.loads(text), schema)


@pytest.mark.parametrize(("opened", "before"), [(False, "<|channel>thought\n"), (True, "")])
@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (JsonSchema({"type": "integer"}), "12", "x"),
        (Regex(r'a\}{2}"'), 'a}}"', "a}"),
        (ToolCalls((("f", None),)), "<|tool_call>call:f{}<tool_call|>", "<|tool_call>call:f{a:1}<tool_call|>"),
    ],
)
def test_thoughts_are_free_and_the_answer_behind_them_is_not(answer: Any, good: str, bad: str, opened: bool, before: str) -> None:
    source = AfterThoughts(answer, opened=opened)
    assert takes(source, f'{before}hm, "{{é\n<channel|>{good}')
    assert not takes(source, f"{before}hm<channel|>{bad}")
    assert not takes(source, f"{before}hm<channel|><|channel>thought\n<channel|>{good}")
    assert not takes(source, f"{before}hm")
    for mark in ("<turn|>", "<|tool_call>", "<|channel>", "<eos>"):
        assert not takes(source, f"{before}hm{mark}")
    assert takes(source, good) != opened


def test_an_answer_of_a_vocabulary_without_a_thinking_channel_has_no_thoughts() -> None:
    words = ChatWords(["<eos>"])
    constraint = Grammars(words, words.size).constrain(AfterThoughts(Regex("ab")))
    assert constraint.valid(words.encode("ab", add_bos=False)) == 2
    assert constraint.valid(words.encode("x", add_bos=False)) == 0
