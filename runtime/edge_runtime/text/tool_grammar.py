"""Grammars for JSON schemas and for calls of given functions, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from edge_runtime.errors import RequestError
from edge_runtime.text.constraints import ToolCalls
from edge_runtime.text.tool_calls import CALL_BEGINS, CALL_ENDS, QUOTE

# All keywords of a JSON schema apply at once. Here a schema becomes a list of alternatives without references and combining keywords.

Schema = Mapping[str, Any]
# More items than any answer has. llguidance takes 32-bit numbers.
_ENDLESS = 1 << 30
COMBINING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_OF_OBJECTS = ("properties", "required", "additionalProperties")
_OF_LISTS = ("items", "prefixItems", "minItems", "maxItems")
_ENFORCED = COMBINING.union({"const", "enum", "type"}, _OF_OBJECTS, _OF_LISTS)


def constraining(schema: Schema) -> set[str]:
    """Returns the keywords of a schema that are enforced."""
    return set(_ENFORCED.intersection(schema))


class Both(dict[str, Any]):
    """A schema that is the conjunction of several parts of a document."""


def identity(schema: Any) -> Hashable:
    """Returns a key that identifies a schema within its document. It is valid as long as the document exists."""
    return frozenset(map(id, schema["allOf"])) if isinstance(schema, Both) else id(schema)


class Alternatives:
    """The alternatives of schemas within the document `root`. `spend` is called with the cost of each, and may raise."""

    def __init__(self, root: Schema, spend: Callable[[int], None]) -> None:
        self._root = root
        self._spend = spend
        self._keys: dict[int, str] = {}

    def target(self, reference: str) -> Any:
        """Returns the part of the document that a reference names. Raises RequestError if there is none."""
        schema: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
        if not reference.startswith("#") or schema is None:
            raise RequestError(f"the reference {reference[:60]!r} in a function's parameters leads nowhere; use '#/$defs/NAME'")
        return schema

    def of(self, schema: object) -> list[dict[str, Any]]:
        """Returns the alternatives of a schema; an empty list if no value fits it."""
        return list(self._of(schema, ()))

    def options(self, flat: Schema) -> list[Any] | None:
        """Returns the values in the `enum` of a schema without combining keywords that fit its other keywords; None without an `enum`."""
        rest = {key: value for key, value in flat.items() if key != "enum"}
        return [value for value in flat["enum"] if self._fits_flat(value, rest)] if "enum" in flat else None

    def _fits(self, value: Any, schema: Any) -> bool:
        return any(self._fits_flat(value, flat) for flat in self.of(schema))

    def _fits_flat(self, value: Any, flat: Schema) -> bool:
        if "type" in flat and not any(_is(value, kind) for kind in types_of(flat)):
            return False
        if "enum" in flat and not self._common([value], flat["enum"]):
            return False
        if isinstance(value, Mapping):
            there = all(name in value for name in required_of(flat))
            return there and all(self._fits(item, _property(flat, name)) for name, item in value.items())
        if isinstance(value, list):
            most = count_of(flat, "maxItems")
            own = _listed(flat, "prefixItems")[: len(value)]
            schemas = [*own, *[flat.get("items", True)] * (len(value) - len(own))]
            counted = (count_of(flat, "minItems") or 0) <= len(value) and (most is None or len(value) <= most)
            return counted and all(map(self._fits, value, schemas))
        return True

    def _of(self, schema: object, within: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        if schema is False:
            return
        if not isinstance(schema, Mapping):
            yield {}
            return
        lists = [list(self._of(part, within)) for part in _listed(schema, "allOf")]
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                lists.append([one for part in schema[keyword] for one in self._of(part, within)])
        if isinstance(reference := schema.get("$ref"), str) and reference not in within:
            lists.append(list(self._of(self.target(reference), (*within, reference))))
        own = self._flat(schema)
        for parts in product(*lists):
            whole: dict[str, Any] | None = own
            for part in parts:
                self._spend(1 + (len(part.get("enum", ())) + len(properties_of(part))) // 64)
                whole = whole if whole is None else self._both(whole, part)
            if whole is not None:
                yield whole

    def _flat(self, schema: Schema) -> dict[str, Any]:
        """Returns the schema without combining keywords, with `const` written as `enum`, and with required properties declared."""
        flat = {key: value for key, value in schema.items() if key not in COMBINING}
        if schema.get("additionalProperties") is False:  # else nothing would fit if the schema forgot to declare one
            flat["properties"] = {**dict.fromkeys(required_of(schema), True), **properties_of(schema)}
        listed = flat.pop("enum", None)
        allowed = [flat.pop("const")] if "const" in flat else None
        if isinstance(listed, list):
            allowed = listed if allowed is None else self._common(allowed, listed)
        return flat if allowed is None else flat | {"enum": allowed}

    def _both(self, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the conjunction of two schemas; None if their types or values exclude each other."""
        both = one | other
        if "type" in one and "type" in other:
            kinds = [kind for kind in TYPES if _allows(one, kind) and _allows(other, kind)]
            if not kinds:
                return None
            both["type"] = kinds
        if "enum" in one and "enum" in other:
            both["enum"] = self._common(one["enum"], other["enum"])
        if "properties" in one or "properties" in other:
            names = dict.fromkeys([*properties_of(one), *properties_of(other)])
            both["properties"] = {name: _and(_property(one, name), _property(other, name)) for name in names}
        if "required" in one and "required" in other:
            both["required"] = [*required_of(one), *required_of(other)]
        for keyword in ("items", "additionalProperties"):
            if keyword in one and keyword in other:
                both[keyword] = _and(one[keyword], other[keyword])
        for keyword, choose in (("minItems", max), ("maxItems", min)):
            counts = [count for count in (count_of(one, keyword), count_of(other, keyword)) if count is not None]
            both |= {keyword: choose(counts)} if counts else {}
        return None if both.get("enum") == [] else both

    def _common(self, one: list[Any], other: list[Any]) -> list[Any]:
        keys = set(map(self._key, other))
        return [value for value in one if self._key(value) in keys]

    def _key(self, value: Any) -> Hashable:
        """Returns a key that is equal for equal JSON values: 1 equals 1.0, but not true."""
        if not isinstance(value, dict | list):
            return isinstance(value, bool), value
        if id(value) not in self._keys:
            self._keys[id(value)] = json.dumps(value, sort_keys=True)
        return self._keys[id(value)]


def types_of(schema: Schema) -> list[str]:
    """Returns the types that a schema without combining keywords allows. Without `type`, they follow from keywords of objects and lists."""
    kinds = schema.get("type")
    listed = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else None
    if listed is None:
        hinted = [kind for kind, words in (("object", _OF_OBJECTS), ("array", _OF_LISTS)) if any(word in schema for word in words)]
        return hinted or list(TYPES)
    known = [kind for kind in TYPES if kind in listed]
    return known or (list(TYPES) if any(isinstance(kind, str) for kind in listed) else [])


def required_of(schema: Schema) -> list[str]:
    """Returns the names of the required properties."""
    return [name for name in _listed(schema, "required") if isinstance(name, str)]


def properties_of(schema: Schema) -> Mapping[str, Any]:
    """Returns the schemas of the named properties."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def count_of(schema: Schema, keyword: str) -> int | None:
    """Returns a keyword's number of items; None if it is not given."""
    value: Any = schema.get(keyword)
    return min(int(value), _ENDLESS) if _is(value, "integer") and value >= 0 else None


def _property(schema: Schema, name: str) -> Any:
    """Returns the schema of a property, or of additional properties if this one is not declared."""
    return properties_of(schema).get(name, schema.get("additionalProperties", True))


def _and(*schemas: Any) -> Any:
    parts = [part for schema in schemas for part in (schema["allOf"] if isinstance(schema, Both) else [schema])]
    said = list({id(part): part for part in parts if part is not True and part != {}}.values())
    return True if not said else said[0] if len(said) == 1 else Both(allOf=said)


def _allows(schema: Schema, kind: str) -> bool:
    kinds = types_of(schema)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _is(value: Any, kind: str) -> bool:
    """Whether a value has a type of JSON Schema, where 1.0 is an integer and true is not a number."""
    if kind in ("integer", "number"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or isinstance(value, int) or value.is_integer())
    types = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": Mapping}
    return isinstance(value, types[kind])


def _listed(schema: Schema, keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


# The grammar of calls enforces these facts about a function's parameters: names, required ones, types, nesting, the number of a list's
# items, enum, const, allOf, anyOf, oneOf and local references. It does not enforce other keywords of JSON Schema. It allows additional
# properties only where no properties are declared. Properties are in alphabetical order, as the chat template writes them.

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
    """Returns the grammar of one call, or of one or more. If `calls.answer` is given, the caller has to add the rule `answer`.

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
        """Returns a name for an expression that is used twice. Written out twice at each of 30 levels, it would exhaust any memory."""
        return expression if expression.isalpha() else self.add(f"{self.name(kind)}: {expression}")

    def name(self, kind: str) -> str:
        """Returns an unused name for a rule."""
        self._names += 1
        return f"{kind}{self._names}"


class _Parameters:
    """The expressions of one function's parameters. The expression of a schema is None if no value fits it."""

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
        """Returns the expression of the arguments. Raises RequestError if no arguments fit the schema."""
        if all(self._root[word] in ({}, [], False) for word in constraining(self._root) - {"type"}):
            return _EMPTY_OBJECT  # the function declares no parameters
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
        """Returns the expression of a value that fits a schema. It is computed once, even if the schema occurs several times."""
        key = identity(schema)
        if key not in self._written:
            self._written[key] = schema, self._expression(schema)  # keeping the schema prevents another object from getting its id
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
        """Returns the name of a rule for an expression, which may refer to itself; None if no value fits the expression."""
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
        """Returns the expression of an object. Each property has two rules: `first` if none was written before it, else `more`."""
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
        """Returns the expression of a list: first the items with their own schemas, in order, then items with the common schema."""
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
