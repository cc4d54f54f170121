"""The keywords of a JSON schema hold together: here it becomes alternatives without references and without keywords that combine others."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import product
from typing import Any

from edge_runtime.errors import RequestError

Schema = Mapping[str, Any]
# More items than any answer has; the library takes numbers of 32 bits.
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
    """A schema that several parts of a document make up together."""


def identity(schema: Any) -> Hashable:
    """Returns what tells a schema from the others of its document, as long as that exists."""
    return frozenset(map(id, schema["allOf"])) if isinstance(schema, Both) else id(schema)


class Alternatives:
    """The alternatives of schemas within the document `root`. `spend` is called with what each takes, and may raise."""

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
        """Returns the alternatives of a schema; none if nothing fits it."""
        return list(self._of(schema, ()))

    def options(self, flat: Schema) -> list[Any] | None:
        """Returns the values that a schema without combining keywords lists, as far as they fit its other keywords; None for any."""
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
        """Returns the schema without combining keywords, const written as enum, and required properties declared."""
        flat = {key: value for key, value in schema.items() if key not in COMBINING}
        if schema.get("additionalProperties") is False:  # forgotten properties, as nothing would fit
            flat["properties"] = {**dict.fromkeys(required_of(schema), True), **properties_of(schema)}
        listed = flat.pop("enum", None)
        allowed = [flat.pop("const")] if "const" in flat else None
        if isinstance(listed, list):
            allowed = listed if allowed is None else self._common(allowed, listed)
        return flat if allowed is None else flat | {"enum": allowed}

    def _both(self, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the schema of what fits both; None if the types or the values exclude each other."""
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
        """Returns what equal values of JSON have in common: 1 is 1.0, but not true."""
        if not isinstance(value, dict | list):
            return isinstance(value, bool), value
        if id(value) not in self._keys:
            self._keys[id(value)] = json.dumps(value, sort_keys=True)
        return self._keys[id(value)]


def types_of(schema: Schema) -> list[str]:
    """Returns the types of values that a schema without combining keywords allows, each once; those of keywords that only one type has."""
    kinds = schema.get("type")
    listed = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else None
    if listed is None:
        hinted = [kind for kind, words in (("object", _OF_OBJECTS), ("array", _OF_LISTS)) if any(word in schema for word in words)]
        return hinted or list(TYPES)
    known = [kind for kind in TYPES if kind in listed]
    return known or (list(TYPES) if any(isinstance(kind, str) for kind in listed) else [])


def required_of(schema: Schema) -> list[str]:
    """Returns the names of properties that must be there."""
    return [name for name in _listed(schema, "required") if isinstance(name, str)]


def properties_of(schema: Schema) -> Mapping[str, Any]:
    """Returns the schemas of the named properties."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def count_of(schema: Schema, keyword: str) -> int | None:
    """Returns a number of items; None if it is not given."""
    value: Any = schema.get(keyword)
    return min(int(value), _ENDLESS) if _is(value, "integer") and value >= 0 else None


def _property(schema: Schema, name: str) -> Any:
    """Returns the schema of a property, which may be one of the additional ones."""
    return properties_of(schema).get(name, schema.get("additionalProperties", True))


def _and(*schemas: Any) -> Any:
    parts = [part for schema in schemas for part in (schema["allOf"] if isinstance(schema, Both) else [schema])]
    said = list({id(part): part for part in parts if part is not True and part != {}}.values())
    return True if not said else said[0] if len(said) == 1 else Both(allOf=said)


def _allows(schema: Schema, kind: str) -> bool:
    kinds = types_of(schema)
    return kind in kinds or (kind == "integer" and "number" in kinds)


def _is(value: Any, kind: str) -> bool:
    """Whether a value has a type, as JSON Schema counts: 1.0 is an integer, true is no number."""
    if kind in ("integer", "number"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or isinstance(value, int) or value.is_integer())
    types = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": Mapping}
    return isinstance(value, types[kind])


def _listed(schema: Schema, keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
