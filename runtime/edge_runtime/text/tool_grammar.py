"""The grammar of calls of given functions, in llguidance's dialect of Lark.

It enforces of a function's parameters: names, required ones, types, nesting, the number of a list's items, enum, const, allOf, anyOf,
oneOf and local references. Other keywords of JSON Schema are not enforced; additional properties are written only where none are named.
Properties are in alphabetical order, as the chat template writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from edge_runtime.errors import RequestError
from edge_runtime.text.constraints import ToolCalls
from edge_runtime.text.json_schema import (
    COMBINING,
    TYPES,
    Alternatives,
    Schema,
    constraining,
    count_of,
    identity,
    properties_of,
    required_of,
    types_of,
)
from edge_runtime.text.tool_calls import CALL_BEGINS, CALL_ENDS, QUOTE

_EMPTY_OBJECT = '"{" "}"'
MAX_RULES, MAX_ALTERNATIVES, MAX_CONSTANTS = 2000, 2000, 1 << 20
_FUNCTION_NAME = re.compile(r"[\w.\-]+", re.ASCII)
_BARE_KEY = re.compile(r"[\w.\-$@/]+( [\w.\-$@/]+)*")
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


def tool_call_grammar(calls: ToolCalls, control: Mapping[str, int]) -> str:
    """Returns the grammar of one call, or of one or more; the rule `answer` is left open where there may be one instead.

    Raises RequestError if the vocabulary has no tokens for calls, or a function cannot be called.
    """
    if missing := [text for text in (CALL_BEGINS, CALL_ENDS, QUOTE) if text not in control]:
        raise RequestError(f"this model cannot be made to call a function: its vocabulary has no {missing[0]}; leave tool_choice at 'auto'")
    rules = _Rules()
    bodies = [f"{_literal(f'call:{name}')} {_Parameters(name, schema, rules, control).text()}" for name, schema in calls.functions]
    call = f"call: {_token(control, CALL_BEGINS)} ({' | '.join(bodies)}) {_token(control, CALL_ENDS)}"
    start = "start: call+" if calls.several else "start: call"
    start += "" if calls.answer is None else " | answer"
    return "\n".join((start, call, *rules.written)) + _COMMON.format(quote=_token(control, QUOTE))


class _Rules:
    """The rules of all functions."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self._names = self._spent = self._constants = 0

    def add(self, *rules: str) -> str:
        """Adds rules; returns the name of the first. Raises RequestError if there are too many."""
        self.written += rules
        if len(self.written) > MAX_RULES:
            raise RequestError(f"the functions' parameters need more than {MAX_RULES} grammar rules; declare fewer or simpler ones")
        return rules[0].partition(":")[0]

    def spend(self, alternatives: int) -> None:
        """Counts alternatives of schemas. Raises RequestError if there are too many."""
        self._spent += alternatives
        if self._spent > MAX_ALTERNATIVES:
            raise RequestError(f"the functions' parameters have more than {MAX_ALTERNATIVES} alternatives; declare simpler ones")

    def constant(self, expression: str) -> str:
        """Counts the characters of a constant. Raises RequestError if there are too many."""
        self._constants += len(expression)
        if self._constants > MAX_CONSTANTS:
            raise RequestError(
                f"the functions' parameters list values of more than {MAX_CONSTANTS} characters; declare fewer or shorter ones"
            )
        return expression

    def named(self, kind: str, expression: str) -> str:
        """Returns a name of an expression that is needed twice: written out twice at each level, 30 levels would fill any memory."""
        return expression if expression.isalpha() else self.add(f"{self.name(kind)}: {expression}")

    def name(self, kind: str) -> str:
        """Returns a name for the next rule, or for one that is added later."""
        self._names += 1
        return f"{kind}{self._names}"


class _Parameters:
    """The expressions of one function's parameters. A value that nothing fits has none."""

    def __init__(self, name: str, schema: Schema | None, rules: _Rules, control: Mapping[str, int]) -> None:
        if not _FUNCTION_NAME.fullmatch(name):
            raise RequestError(f"the function name {name[:60]!r} cannot be called; use letters, digits, '_', '-' and '.'")
        self._name, self._root = name, schema or {}
        self._rules = rules
        self._quote = _token(control, QUOTE)
        self._alternatives = Alternatives(self._root, rules.spend)
        self._named: dict[Hashable, str | None] = {}
        self._written: dict[Hashable, tuple[object, str | None]] = {}

    def text(self) -> str:
        """Returns the expression of the arguments. Raises RequestError if there is none."""
        if all(self._root[word] in ({}, [], False) for word in constraining(self._root) - {"type"}):
            return _EMPTY_OBJECT  # a function that declares no parameters has none
        try:
            arguments = self._value({"allOf": [self._root, {"type": "object"}]})
        except RecursionError:
            raise RequestError(f"the parameters of the function {self._name[:60]!r} lead too deep; use fewer references") from None
        if arguments is None:
            raise RequestError(
                f"nothing satisfies the parameters of the function {self._name[:60]!r}, as with an empty enum; mend its schema"
            )
        return arguments

    def _value(self, schema: Any) -> str | None:
        """Returns the expression of a value that fits a schema; that of a schema which is there twice is written once."""
        key = identity(schema)
        if key not in self._written:
            self._written[key] = schema, self._expression(schema)  # the schema is kept, so that no other one gets its id
        return self._written[key][1]

    def _expression(self, schema: Any) -> str | None:
        if not isinstance(schema, Mapping):
            return None if schema is False else "value"
        words = constraining(schema)
        if words == {"$ref"} and isinstance(reference := schema["$ref"], str):
            return self._rule("r", reference, lambda: self._value(self._alternatives.target(reference)))
        if words in ({"anyOf"}, {"oneOf"}) and isinstance(options := schema[words.pop()], list):
            return _choice([self._value(option) for option in options])
        if not words & COMBINING:
            return _choice([self._flat(one) for one in self._alternatives.of(schema)])
        return self._rule("b", identity(schema), lambda: _choice([self._flat(one) for one in self._alternatives.of(schema)]))

    def _rule(self, kind: str, key: Hashable, expression: Callable[[], str | None]) -> str | None:
        """Returns the name of a rule, which its own expression may have; None if that says that nothing fits."""
        if key not in self._named:
            self._named[key] = name = self._rules.name(kind)
            written = expression()
            if written is None:
                self._named[key] = None
            else:
                self._rules.add(f"{name}: {written}")
        return self._named[key]

    def _flat(self, schema: Schema) -> str | None:
        """Returns the expression of a schema without combining keywords."""
        if (options := self._alternatives.options(schema)) is not None:
            return _choice([self._rules.constant(self._constant(option)) for option in options])
        kinds = types_of(schema)
        return "value" if kinds == list(TYPES) else _choice([self._of_type(kind, schema) for kind in kinds])

    def _of_type(self, kind: str, schema: Schema) -> str | None:
        if kind == "object":
            return self._object(schema)
        return self._list(schema) if kind == "array" else kind

    def _object(self, schema: Schema) -> str | None:
        """One rule for each place: `first` before any property was written, `more` after one."""
        properties, needed = properties_of(schema), set(required_of(schema))
        others = schema.get("additionalProperties", True)
        if not properties and not needed:
            other = self._value(others)
            if other is None or other == "value":
                return _EMPTY_OBJECT if other is None else "object"
            pair = self._rules.add(f'{self._rules.name("a")}: key ":" {other}')
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        values = {name: self._value(properties.get(name, others)) for name in {**properties, **dict.fromkeys(needed)}}
        if any(values[name] is None for name in needed):
            return None
        names = sorted((name for name, value in values.items() if value is not None), key=str.lower)
        number, places = self._rules.name(""), range(len(names) + 1)
        first, more = [f"o{number}_{i}" for i in places], [f"m{number}_{i}" for i in places]
        self._rules.add(f'{first[-1]}: ""', f'{more[-1]}: ""')
        for i, name in enumerate(names):
            rule = self._rules.add(f"p{number}_{i}: {_key(name)} {values[name]}")
            skip = "" if name in needed else f" | {first[i + 1]}"
            self._rules.add(f"{first[i]}: {rule} {more[i + 1]}{skip}")
            self._rules.add(f'{more[i]}: "," {rule} {more[i + 1]}' + ("" if name in needed else f" | {more[i + 1]}"))
        return f'"{{" {first[0]} "}}"'

    def _list(self, schema: Schema) -> str | None:
        """Returns the expression of a list: items with schemas of their own, each behind those before it, then others."""
        low, high = count_of(schema, "minItems") or 0, count_of(schema, "maxItems")
        items = [self._value(own) for own in schema["prefixItems"]] if isinstance(schema.get("prefixItems"), list) else []
        other = self._value(schema.get("items", True))
        if (low, high, items, other) == (0, None, [], "value"):
            return "array"
        other = None if other is None else self._rules.named("i", other)
        items = items or [other]
        if other is None or None in items:
            end = items.index(None) if None in items else len(items)
            high = end if high is None else min(high, end)
        if high is not None and low > high:
            return None
        items = items[:high]
        most = None if high is None else high - len(items)
        rest = "" if most == 0 else _repeated(f'("," {other})', max(0, low - len(items)), most)
        for number in reversed(range(len(items))):
            rest = ('"," ' if number else "") + f"{items[number]} {rest}"
            rest = rest if number < low else f"({rest})?"
        return f'"[" {rest} "]"'

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {_literal(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        if isinstance(value, Mapping):
            written = (f"{_key(str(key))} {self._constant(value[key])}" for key in sorted(value, key=str.lower))
            return f'"{{" {_joined(written)} "}}"'
        if isinstance(value, list):
            return f'"[" {_joined(map(self._constant, value))} "]"'
        return _literal(json.dumps(value))


def _joined(parts: Iterable[str]) -> str:
    return ' "," '.join(parts)


def _choice(options: Sequence[str | None]) -> str | None:
    each = list(dict.fromkeys(option for option in options if option is not None))
    return f"({' | '.join(each)})" if len(each) > 1 else next(iter(each), None)


def _repeated(expression: str, low: int, high: int | None) -> str:
    if (low, high) == (0, None):
        return f"{expression}*"
    return f"{expression}{{{low},{'' if high is None else high}}}"


def _key(name: str) -> str:
    return _literal(f"{name if _BARE_KEY.fullmatch(name) else json.dumps(name)}:")


def _token(control: Mapping[str, int], text: str) -> str:
    return f"<[{control[text]}]>"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
