"""Gemma 4's notation for a tool call: call:NAME{key:value,...}, with strings between <|"|> marks and bare keys; and its grammar for given
functions, in llguidance's dialect of Lark.

The grammar enforces of a function's parameters: names, required ones, types, nesting, enum, const, anyOf, oneOf and local references. Other
keywords of JSON Schema are not enforced. Properties are in alphabetical order, as the chat template writes them.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edge_runtime.errors import RequestError
from edge_runtime.text.constraints import ToolCalls

MAX_DEPTH = 32
QUOTE = '<|"|>'
_NAME = re.compile(r"\s*call\s*:\s*([\w.\-]+)\s*")
_KEY = re.compile(r"([^:{}\[\],\"]+):")
_BARE = re.compile(r"[^,{}\[\]]+")
_SOLID = re.compile(r"\S")
# A string between Gemma's marks, or one of JSON; the end of one that was cut off is the text's.
_STRING = re.compile(
    rf"""{re.escape(QUOTE)}(?P<quoted>.*?)(?:{re.escape(QUOTE)}|(?P<cut>\Z))|"(?:[^"\\]|\\.)*(?:"|(?P<cut_json>\\?\Z))""", re.DOTALL
)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call of the model. `arguments`, and possibly `name`, are None if `raw`, the generated text, could not be parsed.

    `partial` is the beginning of the arguments' JSON where the answer ended within them; None for other calls.
    """

    name: str | None
    arguments: dict[str, Any] | None
    raw: str
    partial: str | None = None

    @property
    def arguments_json(self) -> str | None:
        """The arguments as JSON text, whole or partial; None for a call that could not be parsed."""
        return self.partial if self.arguments is None else json.dumps(self.arguments, ensure_ascii=False)


def parse_tool_call(raw: str) -> ToolCall:
    """Parses one call, the text between the two tool-call tokens; arguments may also be JSON. Never raises."""
    named = _NAME.match(raw)
    if named is None:
        return ToolCall(name=None, arguments=None, raw=raw)
    try:
        arguments = json.loads("".join(_json(raw[named.end() :])))
    except ValueError:
        arguments = None
    return ToolCall(name=named[1], arguments=arguments if isinstance(arguments, dict) else None, raw=raw)


def cut_tool_call(raw: str) -> ToolCall:
    """Parses a call that the end of the answer may have cut off: what is there becomes `partial`. Without a whole name, `raw` is empty."""
    call = parse_tool_call(raw)
    if call.arguments is not None:
        return call
    named = _NAME.match(raw)
    if named is None or named.end() == len(raw):
        return ToolCall(name=None, arguments=None, raw="")
    parts: list[str] = []
    with contextlib.suppress(ValueError):
        parts.extend(_json(raw[named.end() :], cut=True))
    return ToolCall(name=named[1], arguments=None, raw=raw, partial="".join(parts))


def _json(text: str, *, cut: bool = False) -> Iterator[str]:
    """Yields the parts of an object's JSON; with `cut` of its beginning, whose last word may go on, and is left out.

    Raises ValueError for what is none, as far as marks and strings say: the parser of JSON decides on the rest.
    """
    inside, follows, at = "", "object", 0
    while solid := _SOLID.search(text, at):
        at, mark = solid.start(), solid[0]
        if follows in ("key", "value") and (string := _STRING.match(text, at)):
            yield _string(string, cut=cut)
            at, follows = string.end(), "colon" if follows == "key" else "mark"
        elif follows == "key" and (key := _KEY.match(text, at)):
            yield f"{json.dumps(key[1].strip(), ensure_ascii=False)}:"
            at, follows = key.end(), "value"
        elif follows == "value" and (word := _BARE.match(text, at)):
            if cut and word.end() == len(text):
                return
            yield json.dumps(_scalar(word[0].strip()), ensure_ascii=False)
            at, follows = word.end(), "mark"
        elif (
            (mark == ":" and follows == "colon")
            or (mark in "}]," and inside)
            or (mark in "{[" and follows in ("object", "value") and len(inside) <= MAX_DEPTH)
        ):
            yield mark
            inside = inside + mark if mark in "{[" else inside[:-1] if mark in "}]" else inside
            at, follows = at + 1, "mark" if mark in "}]" else "key" if mark != ":" and inside[-1] == "{" else "value"
        else:
            raise ValueError(f"{mark!r} stands where a {follows} belongs")


def _string(string: re.Match[str], *, cut: bool) -> str:
    """Returns JSON of a string. Half of a surrogate pair, as \\ud800, is no character: no answer could be encoded with it."""
    unended = string["cut"] is not None or string["cut_json"] is not None
    if unended and not cut:
        raise ValueError("a string does not end")
    if string["quoted"] is not None:
        value = string["quoted"]
    elif unended:
        return string[0]
    else:
        value = json.loads(string[0], strict=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(value, ensure_ascii=False)[: -1 if unended else None]


def _scalar(word: str) -> Any:
    """Returns the value of true, false, null, None or a number; any other bare word is text."""
    if word in ("None", "null"):
        return None
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return word
    if isinstance(value, float) and not math.isfinite(value):
        return word  # NaN, Infinity and 1e999, which no JSON that clients read can state
    return value if isinstance(value, bool | int | float) else word


CALL_BEGINS, CALL_ENDS = "<|tool_call>", "<tool_call|>"
MAX_RULES = 2000
_FUNCTION_NAME = re.compile(r"[\w.\-]+", re.ASCII)
_BARE_KEY = re.compile(r"[^:{}\[\],\"\s][^:{}\[\],\"\n]*")
_COMMON = """
string: {quote} /([^<]|<+[^<|])*<*/ {quote}
integer: /-?(0|[1-9][0-9]{{0,17}})/
number: /-?(0|[1-9][0-9]{{0,17}})(\\.[0-9]{{1,17}})?([eE][+-]?[0-9]{{1,3}})?/
boolean: "true" | "false"
null: "null"
key: /[A-Za-z_][A-Za-z0-9_.\\-]*/
array: "[" (value ("," value)*)? "]"
object: "{{" (key ":" value ("," key ":" value)*)? "}}"
value: string | number | boolean | null | array | object
"""
_PLAIN = {"string", "integer", "number", "boolean", "null", "array", "object"}


def tool_call_grammar(calls: ToolCalls, control: Mapping[str, int]) -> str:
    """Returns the grammar of one call, or of one or more; the rule `answer` is left open where there may be one instead.

    Raises RequestError if the vocabulary has no tokens for calls.
    """
    if missing := [text for text in (CALL_BEGINS, CALL_ENDS, QUOTE) if text not in control]:
        raise RequestError(f"this model cannot be made to call a function: its vocabulary has no {missing[0]}; leave tool_choice at 'auto'")
    return _Writer(calls, control).text()


class _Writer:
    def __init__(self, calls: ToolCalls, control: Mapping[str, int]) -> None:
        self._calls = calls
        self._control = control
        self._rules: list[str] = []
        self._references: dict[tuple[int, str], str] = {}
        self._root: Any = {}
        self._function = 0

    def text(self) -> str:
        bodies = []
        for number, (name, schema) in enumerate(self._calls.functions):
            if not _FUNCTION_NAME.fullmatch(name):
                raise RequestError(f"the function name {name[:60]!r} cannot be called; use letters, digits, '_', '-' and '.'")
            self._function, self._root = number, schema or {"type": "object"}
            try:
                bodies.append(f"{_literal(f'call:{name}')} {self._value(self._root | {'type': 'object'})}")
            except RecursionError:
                raise RequestError(f"the parameters of the function {name[:60]!r} lead too deep; use fewer references") from None
        call = f"call: {self._token(CALL_BEGINS)} ({' | '.join(bodies)}) {self._token(CALL_ENDS)}"
        start = "start: call+" if self._calls.several else "start: call"
        start += "" if self._calls.answer is None else " | answer"
        return "\n".join((start, call, *self._rules)) + _COMMON.format(quote=self._token(QUOTE))

    def _value(self, schema: object) -> str:
        """Returns the expression of a value that fits a schema."""
        if not isinstance(schema, Mapping):
            return "value"
        if isinstance(reference := schema.get("$ref"), str):
            return self._referenced(reference)
        if "const" in schema or isinstance(schema.get("enum"), list):
            options = [schema["const"]] if "const" in schema else schema["enum"]
            return self._choice([self._constant(option) for option in options])
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                return self._choice([self._value(option) for option in schema[keyword]])
        kinds = schema.get("type")
        if isinstance(kinds, list):
            # Each once, else each level would multiply those below; others than JSON's are any value, and each would copy the schema.
            once = dict.fromkeys(kind if kind in _PLAIN else "" for kind in kinds if isinstance(kind, str))
            return self._choice([self._value({**schema, "type": kind}) for kind in once])
        if kinds == "object" and isinstance(schema.get("properties"), Mapping) and schema["properties"]:
            return self._object(schema["properties"], schema.get("required"))
        if kinds == "array" and ("items" in schema or schema.get("minItems")):
            item = self._named("i", self._value(schema.get("items")))
            return f'"[" {item} ("," {item})* "]"' if schema.get("minItems") else f'"[" ({item} ("," {item})*)? "]"'
        return str(kinds) if isinstance(kinds, str) and kinds in _PLAIN else "value"

    def _object(self, properties: Mapping[str, Any], required: object) -> str:
        """One rule for each place: `first` before any property was written, `more` after one."""
        needed = set(required) if isinstance(required, list) and all(isinstance(name, str) for name in required) else set()
        number, names = len(self._rules), sorted(properties, key=str.lower)
        first, more = [f"o{number}_{i}" for i in range(len(names) + 1)], [f"m{number}_{i}" for i in range(len(names) + 1)]
        self._add(f'{first[-1]}: ""', f'{more[-1]}: ""')
        for i, name in enumerate(names):
            rule = self._add(f"p{number}_{i}: {self._key(name)} {self._value(properties[name])}")
            skip = "" if name in needed else f" | {first[i + 1]}"
            self._add(f"{first[i]}: {rule} {more[i + 1]}{skip}")
            self._add(f'{more[i]}: "," {rule} {more[i + 1]}' + ("" if name in needed else f" | {more[i + 1]}"))
        return f'"{{" {first[0]} "}}"'

    def _referenced(self, reference: str) -> str:
        if (self._function, reference) not in self._references:
            schema = self._root
            for part in reference.removeprefix("#").split("/")[1:]:
                schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
            if not reference.startswith("#") or schema is None:
                raise RequestError(f"the reference {reference[:60]!r} in a function's parameters leads nowhere; use '#/$defs/NAME'")
            name = self._references[self._function, reference] = f"r{len(self._references)}"
            self._add(f"{name}: {self._value(schema)}")
        return self._references[self._function, reference]

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            quote = self._token(QUOTE)
            return f"{quote} {_literal(value)} {quote}" if value else f"{quote} {quote}"
        if isinstance(value, Mapping | list):
            return "value"
        return _literal(json.dumps(value))

    def _named(self, kind: str, expression: str) -> str:
        """Returns a short name of an expression that is needed twice: written out twice at each level, 30 levels would fill any memory."""
        return expression if expression.isalpha() else self._add(f"{kind}{len(self._rules)}: {expression}")

    def _choice(self, options: list[str]) -> str:
        if not options:
            raise RequestError("a function's parameters have an empty enum, anyOf or oneOf, which nothing satisfies; give it a value")
        return f"({' | '.join(options)})" if len(options) > 1 else options[0]

    def _key(self, name: str) -> str:
        return _literal(f"{name if _BARE_KEY.fullmatch(name) else json.dumps(name)}:")

    def _token(self, text: str) -> str:
        return f"<[{self._control[text]}]>"

    def _add(self, *rules: str) -> str:
        self._rules += rules
        if len(self._rules) > MAX_RULES:
            raise RequestError(f"the functions' parameters need more than {MAX_RULES} grammar rules; declare fewer or simpler ones")
        return rules[0].partition(":")[0]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
