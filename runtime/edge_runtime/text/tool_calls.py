"""Gemma 4's notation for a tool call: call:NAME{key:value,...}, with strings between <|"|> marks and bare keys.

Models do not always keep to it. What they are known to write instead is read as what it means: strings in other quotes or without their
first mark, marks for the quotes within a string, round brackets around the arguments, '=' after a key, a comma too many. No argument
ever holds a mark. Anything else is no call, but text.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 32
CALL_BEGINS, CALL_ENDS, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
NAME = re.compile(r"\s*(?:call)?\s*:\s*([\w.\-]+)\s*")
# Stands for the mark of a string, as one character: Unicode reserves it for internal use.
MARK = "\ufdd0"
_KEY = re.compile(rf'([^:={{}}\[\],"{MARK}]+)([:=]|\Z)')
_NEXT_KEY = re.compile(r",\s*[\w.\-]+\s*[:=]")
_BARE = re.compile(rf"[^,{{}}\[\]{MARK}]+")
_SOLID = re.compile(r"\S")
_AFTER_STRING = re.compile(r"\s*(?:[,:=}\]]|\Z)")
# The end of a string that was cut off is the text's.
_JSON_STRING = re.compile(rf'"((?:[^"\\{MARK}]|\\[^{MARK}])*)(?:"|(\\?\Z))', re.DOTALL)
_PYTHON_END = re.compile(r"(?<!\\)'(?=\s*(?:[,:=}\]]|\Z))")
_LONGEST_ESCAPE = len(r"\u00e9")
_BRACKETS = {"{": "}", "[": "]"}


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call of the model; `raw` is what it wrote. `arguments` is None where that is no whole call.

    `partial` is then the beginning of the arguments' JSON if the answer was cut off within them; None for other calls.
    `unsent` is the rest of the arguments' JSON where a `CallPiece` has begun the call.
    """

    name: str | None
    arguments: dict[str, Any] | None
    raw: str
    partial: str | None = None
    unsent: str | None = None

    @property
    def arguments_json(self) -> str | None:
        """The arguments as JSON text, whole or partial; None for what is no call."""
        return self.partial if self.arguments is None else json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class CallPiece:
    """A piece of a call that the model still writes: the next of its arguments' JSON. The first piece has the `name`."""

    name: str | None
    arguments: str


def parse_tool_call(raw: str) -> ToolCall:
    """Parses one call, the text between the two tool-call tokens. Never raises."""
    named = NAME.match(raw)
    if named is None:
        return ToolCall(name=None, arguments=None, raw=raw)
    reader = _Arguments(_braced(raw[named.end() :]))
    return ToolCall(name=named[1], arguments=json.loads(reader.json) if reader.whole else None, raw=raw)


def cut_tool_call(raw: str) -> ToolCall:
    """Parses a call that the end of the answer may have cut off: what is there of its arguments becomes `partial`. Never raises."""
    call, named = parse_tool_call(raw), NAME.match(raw)
    if call.arguments is not None or named is None:
        return call
    reader = _begun_reader(raw[named.end() :])
    return ToolCall(name=named[1], arguments=None, raw=raw, partial=None if reader.failed else reader.json or None)


def written_arguments(raw: str, *, cut: bool) -> str:
    """Returns the arguments of a call as JSON in the order and with the names that the model wrote, `cut` off or whole."""
    named = NAME.match(raw)
    if named is None:
        return ""
    body = raw[named.end() :]
    return (_begun_reader(body) if cut else _Arguments(_braced(body))).json


def written_scalar(word: str) -> str:
    """Returns the JSON of a bare word."""
    return _written(_scalar(word))


def begun_arguments(text: str) -> dict[str, Any]:
    """Returns what the beginning of an object's JSON says, as far as it is JSON; nothing for any other text. Never raises."""
    return dict(json.loads(_Arguments(text, cut=True).completed or "{}"))


def _begun_reader(body: str) -> _Arguments:
    return _Arguments(re.sub(r"^\(", "{", body), cut=True)


def _braced(body: str) -> str:
    body = body.rstrip()
    return f"{{{body[1:-1]}}}" if body.startswith("(") and body.endswith(")") else body


class _Arguments:
    """An object in the notation, or in JSON. With `cut` it may be a beginning, whose last word may go on, and is left out.

    `whole` and `failed` say whether the text is one, and whether it cannot become one.
    """

    def __init__(self, text: str, *, cut: bool = False) -> None:
        self._parts: list[str] = []
        self._inside = ""
        self._follows = "object"
        # How many parts are whole but for closing brackets, which, and a closing quote.
        self._kept = (0, "", "")
        text = text.replace(MARK, "\ufffd").replace(QUOTE, MARK)
        self.whole = self.failed = False
        try:
            self.whole = self._read(text, _Strings(text, cut=cut), cut=cut)
        except ValueError:
            self.failed = True

    @property
    def json(self) -> str:
        """JSON of the object, or its beginning."""
        return "".join(self._parts)

    @property
    def completed(self) -> str:
        """JSON of what is there: a key without a value and a word that may go on are left out."""
        count, inside, quote = self._kept
        return "".join((*self._parts[:count], quote, *(_BRACKETS[bracket] for bracket in reversed(inside))))

    def _read(self, text: str, strings: _Strings, *, cut: bool) -> bool:
        """Reads it all; returns whether it ends. Raises ValueError for what is no object and no beginning of one."""
        at = 0
        while solid := _SOLID.search(text, at):
            at, letter, follows = solid.start(), solid[0], self._follows
            if follows in ("key", "value") and (string := strings.read(at, value=follows == "value")):
                content, at, ended = string
                self._add(_written(content) if ended else _written(content)[:-1], "colon" if follows == "key" else "mark")
                if not ended:
                    if follows == "value":
                        self._kept = (len(self._parts), self._inside, '"')
                    return False
            elif follows == "key" and (key := _KEY.match(text, at)) and (key[2] or cut):
                if not key[2]:
                    return False
                self._add(f"{_written(key[1].strip())}:", "value")
                at = key.end()
            elif follows == "value" and (word := _BARE.match(text, at)):
                at = word.end()
                if cut and at == len(text):
                    return False
                self._add(_written(_scalar(word[0].strip())), "mark")
            else:
                self._add_mark(letter)
                at += 1
            if self._follows == "mark" or letter in _BRACKETS:
                self._kept = (len(self._parts), self._inside, "")
        return bool(self._parts) and not self._inside

    def _add_mark(self, letter: str) -> None:
        """Adds what is neither a string nor a word."""
        inside, last = self._inside[-1:], self._parts[-1] if self._parts else ""
        if letter in _BRACKETS and self._follows in ("value", "object" if letter == "{" else "value") and len(self._inside) <= MAX_DEPTH:
            self._inside += letter
            self._add(letter, "key" if letter == "{" else "value")
        elif letter == _BRACKETS.get(inside) and (self._follows == "mark" or last in (inside, ",")):
            if last == ",":
                self._parts.pop()
            self._inside = self._inside[:-1]
            self._add(letter, "mark")
        elif letter == "," and inside and self._follows == "mark":
            self._add(letter, "key" if inside == "{" else "value")
        elif letter in ":=" and self._follows == "colon":
            self._add(":", "value")
        else:
            raise ValueError(f"{letter!r} stands where a {self._follows} belongs")

    def _add(self, part: str, follows: str) -> None:
        self._parts.append(part)
        self._follows = follows


class _Strings:
    """Finds the strings of a text, in which `MARK` stands for the mark; with `cut` the last one may go on."""

    def __init__(self, text: str, *, cut: bool) -> None:
        self._text, self._cut = text, cut
        self._marks = [match.start() for match in re.finditer(MARK, text)]
        self._closing = [place for place in self._marks if _AFTER_STRING.match(text, place + 1)]
        self._opening = {place for place in self._marks if self._may_open(place)}
        self._python_ends = [match.start() for match in _PYTHON_END.finditer(text)]
        self._next_key = -1

    def read(self, at: int, *, value: bool) -> tuple[str, int, bool] | None:
        """Returns what the string at a place says, where it ends, and whether it does; None where there is none.

        Raises ValueError where it does not end, or its escapes or marks make no sense.
        """
        first = self._text[at]
        if first == MARK:
            found = self._marked(at)
        elif first == '"' and (string := _JSON_STRING.match(self._text, at)):
            found = _unescaped(string[1]) if string[2] is None else _begun(string[1] + string[2]), string.end(), string[2] is None
        elif first == "'" and (end := _next(self._python_ends, at)) is not None and end < (_next(self._marks, at) or len(self._text)):
            found = _python(self._text[at + 1 : end]), end + 1, True
        elif not value or first in ",{}[]":
            return None
        elif self._marks and (mark := self._closes_without_opening(at)) is not None:
            found = self._text[at + (first in "\"'") : mark], mark + 1, True
        elif first == "'" and self._cut and _next(self._marks, at) is None:
            found = self._text[at + 1 :], len(self._text), False
        else:
            return None
        if not (found[2] or self._cut):
            raise ValueError("a string does not end")
        return found

    def _marked(self, at: int) -> tuple[str, int, bool]:
        """Returns a string that a mark opens. A mark within it that nothing follows as behind a string is one of its quotes."""
        end = _next(self._closing, at)
        content = self._text[at + 1 : end]
        inner = self._marks[bisect_right(self._marks, at) : None if end is None else bisect_right(self._marks, end) - 1]
        if not self._opening.isdisjoint(inner):
            raise ValueError("a mark within a string opens another one")
        return content.replace(MARK, '"'), len(self._text) if end is None else end + 1, end is not None

    def _closes_without_opening(self, at: int) -> int | None:
        """Returns the next mark if it closes what begins here."""
        mark = _next(self._marks, at)
        if mark is None or mark in self._opening or mark != _next(self._closing, at):
            return None
        word = _BARE.match(self._text, at)
        if word is not None and word.end() < mark and not isinstance(_scalar(word[0].strip()), str):
            return None
        if self._next_key < at:
            key = _NEXT_KEY.search(self._text, at)
            self._next_key = key.start() if key else len(self._text)
        return None if self._next_key < mark else mark

    def _may_open(self, place: int) -> bool:
        """Whether what is before a mark can be before a string."""
        place -= 1
        while place >= 0 and self._text[place].isspace():
            place -= 1
        return place < 0 or self._text[place] in ",:={["


def _next(places: list[int], at: int) -> int | None:
    """Returns the first place behind another one."""
    number = bisect_right(places, at)
    return places[number] if number < len(places) else None


def _unescaped(content: str) -> str:
    """Returns what a string of JSON says. Half of a surrogate pair, as \\ud800, is no character: no answer could be encoded with it."""
    return str(json.loads(f'"{content}"', strict=False)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _begun(content: str) -> str:
    """Returns what the beginning of a string of JSON says, without an escape that the end cuts."""
    for end in range(len(content), max(len(content) - 2 * _LONGEST_ESCAPE, -1), -1):
        try:
            value = json.loads(f'"{content[:end]}"', strict=False)
        except ValueError:
            continue
        if not "\ud800" <= value[-1:] <= "\udbff":
            return _unescaped(content[:end])
    raise ValueError("an escape makes no sense")


def _python(content: str) -> str:
    """Returns what a string of Python says, as far as JSON has its escapes."""
    if "\\" not in content:
        return content
    try:
        return _unescaped(re.sub(r"\\(.)|\"", lambda match: {"'": "'", None: '\\"'}.get(match[1], match[0]), content, flags=re.DOTALL))
    except ValueError:
        return content


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _scalar(word: str) -> Any:
    """Returns the value of a number, or of true, false and null as JSON and Python write them; any other bare word is text."""
    if word in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[word]
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return word
    if isinstance(value, float) and not math.isfinite(value):
        return word  # NaN, Infinity and 1e999, which no JSON that clients read can state
    return value if value is None or isinstance(value, bool | int | float) else word
