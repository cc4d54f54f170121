"""Gemma 4's notation for a tool call: call:NAME{key:value,...}, with strings between <|"|> marks and bare keys."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 32
QUOTE = '<|"|>'
_NAME = re.compile(r"\s*call\s*:\s*([\w.\-]+)\s*")
_KEY = re.compile(r"([^:{}\[\],\"]+):")
_BARE = re.compile(r"[^,{}\[\]]+")
_SPACE = re.compile(r"\s*")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call of the model. `arguments`, and possibly `name`, are None if `raw`, the generated text, could not be parsed."""

    name: str | None
    arguments: dict[str, Any] | None
    raw: str


class _Unreadable(ValueError):
    pass


def parse_tool_call(raw: str) -> ToolCall:
    """Parses one call, the text between the two tool-call tokens; arguments may also be JSON. Never raises."""
    named = _NAME.match(raw)
    if named is None:
        return ToolCall(name=None, arguments=None, raw=raw)
    rest = raw[named.end() :].rstrip()
    try:
        arguments, end = _object(rest, 0, 0)
        if end != len(rest):
            raise _Unreadable
    except _Unreadable:
        return ToolCall(name=named[1], arguments=None, raw=raw)
    return ToolCall(name=named[1], arguments=arguments, raw=raw)


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    at = _expect(text, at, "{", depth)
    members: dict[str, Any] = {}
    while (place := _skip(text, at)) < len(text) and text[place] != "}":
        if members:
            place = _skip(text, _expect(text, place, ",", depth))
        key, place = _key(text, place)
        members[key], at = _value(text, place, depth)
    return members, _expect(text, at, "}", depth)


def _array(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    at = _expect(text, at, "[", depth)
    items: list[Any] = []
    while (place := _skip(text, at)) < len(text) and text[place] != "]":
        if items:
            place = _expect(text, place, ",", depth)
        item, at = _value(text, place, depth)
        items.append(item)
    return items, _expect(text, at, "]", depth)


def _key(text: str, at: int) -> tuple[str, int]:
    if text.startswith((QUOTE, '"'), at):
        key, at = _string(text, at)
        return key, _expect(text, at, ":", 0)
    bare = _KEY.match(text, at)
    if bare is None:
        raise _Unreadable
    return bare[1].strip(), bare.end()


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    at = _skip(text, at)
    if text.startswith((QUOTE, '"'), at):
        return _string(text, at)
    if text.startswith("{", at):
        return _object(text, at, depth + 1)
    if text.startswith("[", at):
        return _array(text, at, depth + 1)
    bare = _BARE.match(text, at)
    if bare is None or not bare[0].strip():
        raise _Unreadable
    return _scalar(bare[0].strip()), bare.end()


def _string(text: str, at: int) -> tuple[str, int]:
    if text.startswith(QUOTE, at):
        end = text.find(QUOTE, at + len(QUOTE))
        if end < 0:
            raise _Unreadable
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    quoted = _JSON_STRING.match(text, at)
    if quoted is None:
        raise _Unreadable
    try:
        return json.loads(quoted[0], strict=False), quoted.end()
    except ValueError as error:
        raise _Unreadable from error


def _scalar(word: str) -> Any:
    """Returns the value of true, false, null, None or a number; any other bare word is text."""
    if word in ("None", "null"):
        return None
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return word
    return value if isinstance(value, bool | int | float) else word


def _expect(text: str, at: int, mark: str, depth: int) -> int:
    at = _skip(text, at)
    if not text.startswith(mark, at) or depth > MAX_DEPTH:
        raise _Unreadable
    return at + 1


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at
