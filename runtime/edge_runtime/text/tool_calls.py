"""Reads Gemma 4's notation for a tool call, when it is complete and while it is written: call:NAME{key:value,...}.

Strings stand between <|"|> marks, and keys are bare. Models do not always keep to this. Known deviations are read as they are meant:
strings in other quotes or without their first mark, marks for the quotes within a string, round brackets around the arguments, '=' after a
key, and a trailing comma. No argument ever contains a mark. Anything else is not a call but text.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

MAX_DEPTH = 32
CALL_BEGINS, CALL_ENDS, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
NAME = re.compile(r"\s*(?:call)?\s*:\s*([\w.\-]+)\s*")
# A single character that stands for the mark of a string. Unicode reserves it for internal use.
MARK = "\ufdd0"
_KEY = re.compile(rf'([^:={{}}\[\],"{MARK}]+)([:=]|\Z)')
_NEXT_KEY = re.compile(r",\s*[\w.\-]+\s*[:=]")
_BARE = re.compile(rf"[^,{{}}\[\]{MARK}]+")
_SOLID = re.compile(r"\S")
_AFTER_STRING = re.compile(r"\s*(?:[,:=}\]]|\Z)")
# A string that is cut off ends with the text.
_JSON_STRING = re.compile(rf'"((?:[^"\\{MARK}]|\\[^{MARK}])*)(?:"|(\\?\Z))', re.DOTALL)
_PYTHON_END = re.compile(r"(?<!\\)'(?=\s*(?:[,:=}\]]|\Z))")
_LONGEST_ESCAPE = len(r"\u00e9")
_BRACKETS = {"{": "}", "[": "]"}


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A tool call of the model. `raw` is what it wrote. `arguments` is None if that is not a complete call.

    If the answer was cut off within the arguments, `partial` is the beginning of their JSON; otherwise it is None. If a `CallPiece` began
    this call, `unsent` is the rest of the arguments' JSON.
    """

    name: str | None
    arguments: dict[str, Any] | None
    raw: str
    partial: str | None = None
    unsent: str | None = None

    @property
    def arguments_json(self) -> str | None:
        """The arguments as JSON text, complete or partial; None if this is not a call."""
        return self.partial if self.arguments is None else json.dumps(self.arguments, ensure_ascii=False)

    @property
    def rest(self) -> str:
        """The part of `arguments_json` that no `CallPiece` has sent."""
        return (self.arguments_json or "") if self.unsent is None else self.unsent


@dataclass(frozen=True)
class CallPiece:
    """A piece of a call that the model is still writing: the next part of the arguments' JSON. The first piece has the `name`."""

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
    """Parses a call that may have been cut off. The existing part of its arguments becomes `partial`. Never raises."""
    call, named = parse_tool_call(raw), NAME.match(raw)
    if call.arguments is not None or named is None:
        return call
    reader = _begun_reader(raw[named.end() :])
    return ToolCall(name=named[1], arguments=None, raw=raw, partial=None if reader.failed else reader.json or None)


def written_arguments(raw: str, *, cut: bool) -> str:
    """Returns a call's arguments as JSON, in the order and with the names that the model wrote. With `cut`, the call was cut off."""
    named = NAME.match(raw)
    if named is None:
        return ""
    body = raw[named.end() :]
    return (_begun_reader(body) if cut else _Arguments(_braced(body))).json


def begun_arguments(text: str) -> dict[str, Any]:
    """Returns the readable part of a JSON object that was cut off; an empty dict for any other text. Never raises."""
    return dict(json.loads(_Arguments(text, cut=True).completed or "{}"))


def _begun_reader(body: str) -> _Arguments:
    return _Arguments(re.sub(r"^\(", "{", body), cut=True)


def _braced(body: str) -> str:
    body = body.rstrip()
    return f"{{{body[1:-1]}}}" if body.startswith("(") and body.endswith(")") else body


class _Arguments:
    """An object in the notation, or in JSON. With `cut`, the text may be only its beginning; an incomplete last word is then left out.

    `whole` says whether the text is a complete object, and `failed` whether it can no longer become one.
    """

    def __init__(self, text: str, *, cut: bool = False) -> None:
        self._parts: list[str] = []
        self._inside = ""
        self._follows = "object"
        # For `completed`: how many parts to keep, the brackets that are still open after them, and the quote that closes a string.
        self._kept = (0, "", "")
        text = text.replace(MARK, "\ufffd").replace(QUOTE, MARK)
        self.whole = self.failed = False
        try:
            self.whole = self._read(text, _Strings(text, cut=cut), cut=cut)
        except ValueError:
            self.failed = True

    @property
    def json(self) -> str:
        """The object's JSON, or the beginning of it."""
        return "".join(self._parts)

    @property
    def completed(self) -> str:
        """Valid JSON of the part that was read. A key without a value and an incomplete word are left out."""
        count, inside, quote = self._kept
        return "".join((*self._parts[:count], quote, *(_BRACKETS[bracket] for bracket in reversed(inside))))

    def _read(self, text: str, strings: _Strings, *, cut: bool) -> bool:
        """Reads the text; returns whether the object is complete. Raises ValueError for text that is not (the beginning of) an object."""
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
        """Adds a bracket, comma or colon. Raises ValueError for other characters, and for one in the wrong place."""
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
    """Finds the strings of a text in which `MARK` stands for the mark. With `cut`, the last string may be incomplete."""

    def __init__(self, text: str, *, cut: bool) -> None:
        self._text, self._cut = text, cut
        self._marks = [match.start() for match in re.finditer(MARK, text)]
        self._closing = [place for place in self._marks if _AFTER_STRING.match(text, place + 1)]
        self._opening = {place for place in self._marks if self._may_open(place)}
        self._python_ends = [match.start() for match in _PYTHON_END.finditer(text)]
        self._next_key = -1

    def read(self, at: int, *, value: bool) -> tuple[str, int, bool] | None:
        """Returns the content of the string at `at`, the position after it, and whether it is complete; None if no string begins there.

        Raises ValueError if it does not end, or its escapes or marks are invalid.
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
        """Reads a string that a mark opens. A mark inside is a quote of the content, unless what follows it can follow a string."""
        end = _next(self._closing, at)
        content = self._text[at + 1 : end]
        inner = self._marks[bisect_right(self._marks, at) : None if end is None else bisect_right(self._marks, end) - 1]
        if not self._opening.isdisjoint(inner):
            raise ValueError("a mark within a string opens another one")
        return content.replace(MARK, '"'), len(self._text) if end is None else end + 1, end is not None

    def _closes_without_opening(self, at: int) -> int | None:
        """Returns the position of the next mark if it closes a string that begins here without a mark."""
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
        """Whether the text before a mark can stand before a string."""
        place -= 1
        while place >= 0 and self._text[place].isspace():
            place -= 1
        return place < 0 or self._text[place] in ",:={["


def _next(places: list[int], at: int) -> int | None:
    """Returns the first of the sorted `places` after `at`; None if there is none."""
    number = bisect_right(places, at)
    return places[number] if number < len(places) else None


def _unescaped(content: str) -> str:
    """Returns the content of a JSON string. A lone surrogate such as \\ud800 is replaced, because an answer with it cannot be encoded."""
    return str(json.loads(f'"{content}"', strict=False)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _begun(content: str) -> str:
    """Returns the content of a JSON string that was cut off, without an incomplete escape at its end."""
    for end in range(len(content), max(len(content) - 2 * _LONGEST_ESCAPE, -1), -1):
        try:
            value = json.loads(f'"{content[:end]}"', strict=False)
        except ValueError:
            continue
        if not "\ud800" <= value[-1:] <= "\udbff":
            return _unescaped(content[:end])
    raise ValueError("an escape makes no sense")


def _python(content: str) -> str:
    """Returns the content of a Python string. Escapes that JSON does not have leave it unchanged."""
    if "\\" not in content:
        return content
    try:
        return _unescaped(re.sub(r"\\(.)|\"", lambda match: {"'": "'", None: '\\"'}.get(match[1], match[0]), content, flags=re.DOTALL))
    except ValueError:
        return content


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _scalar(word: str) -> Any:
    """Returns the value of a bare word: a number, or true, false or null in the spelling of JSON or Python. Any other word is text."""
    if word in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[word]
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return word
    if isinstance(value, float) and not math.isfinite(value):
        return word  # NaN, Infinity and 1e999, which standard JSON cannot express
    return value if value is None or isinstance(value, bool | int | float) else word


_KEY_ENDS = re.compile(rf'[:={{}}\[\],"{MARK}]')
_WORD_ENDS = re.compile(rf"[,{{}}\[\]{MARK}]")
_CLOSES = frozenset(",:=}]")
_BEFORE_STRING = frozenset(",:={[")
# Undecided text that is longer is given up, so that it is not scanned again with each token.
_LONGEST_NAME, _LONGEST_WORD = 256, 1024


class StreamedCall:
    """Follows one call while it is written. Returns its name and pieces of its arguments' JSON as soon as they are final.

    If the model deviates from Gemma 4's own notation, nothing more is final before the call's end. `sent` is the part of the arguments'
    JSON that pieces have sent; None before the name.
    """

    def __init__(self) -> None:
        self.sent: str | None = None
        self._text = ""  # text that is not decided yet
        self._ready: list[str] = []
        self._inside = ""  # brackets that are open
        self._comma = False  # whether a value precedes, so that a comma is due before the next one
        self._before = ""  # the last non-blank character of a string's content
        self._step: Callable[[], bool] | None = self._name

    def feed(self, text: str) -> list[CallPiece]:
        """Takes more of the text after <|tool_call>. Returns what is final now: one piece or none."""
        if self._step is None:
            return []
        self._text += text
        named = self.sent is not None
        while self._step is not None and self._step():
            pass
        new, self._ready = "".join(self._ready), []
        if self.sent is None or (named and not new):
            return []
        self.sent += new
        return [CallPiece(name=None if named else self._called, arguments=new)]

    def ended(self, call: ToolCall) -> ToolCall:
        """Returns the call, complete or cut off, with its `unsent` part. If it contradicts what was sent, it counts as no call."""
        if self.sent is None or call.arguments_json is None:
            return call
        whole = written_arguments(call.raw, cut=call.arguments is None)
        return replace(call, unsent=whole[len(self.sent) :]) if whole.startswith(self.sent) else replace(call, arguments=None, partial=None)

    # Each step tries to decide about the beginning of `_text` and returns whether it could. It also chooses the next step.

    def _name(self) -> bool:
        before, brace, after = self._text.partition("{")
        if not brace:
            return self._wait(_LONGEST_NAME)
        named = NAME.fullmatch(before)
        if named is None:
            return self._give_up()
        self._called, self.sent = named[1], ""
        return self._open("{", after)

    def _open(self, bracket: str, after: str) -> bool:
        self._ready.append(bracket)
        self._inside, self._text, self._comma = self._inside + bracket, after, False
        self._step = self._key if bracket == "{" else self._value
        return True

    def _key(self) -> bool:
        if self._closes():
            return True
        end = _KEY_ENDS.search(self._text)
        if end is None:
            return self._wait()
        key = self._text[: end.start()].strip()
        if end[0] != ":" or not key or key[0] == "'":
            return self._give_up()
        self._begin(f"{_written(key)}:")
        self._comma = False
        return self._next(self._value, end.end())

    def _value(self) -> bool:
        if self._inside[-1] == "[" and self._closes():
            return True
        text = self._text = self._text.lstrip()
        if not text or QUOTE.startswith(text):
            return False
        if text.startswith(QUOTE):
            self._begin('"')
            self._before = ""
            return self._next(self._string, len(QUOTE))
        if text[0] in "{[":
            if len(self._inside) > MAX_DEPTH:
                return self._give_up()
            self._begin("")
            return self._open(text[0], text[1:])
        return self._word()

    def _word(self) -> bool:
        text = self._text.replace(MARK, "\ufffd").replace(QUOTE, MARK)
        end = _WORD_ENDS.search(text)
        if text[0] in "\"'" or (end is not None and end[0] not in ",}]"):
            return self._give_up()
        if end is None:
            return self._wait()
        scalar = _written(_scalar(text[: end.start()].strip()))
        if not end.start() or scalar.startswith('"'):  # bare text may be a string without its first mark
            return self._give_up()
        self._begin(scalar)
        self._text = text[: end.start()] + self._text[end.start() :]
        return self._next(self._after, end.start())

    def _string(self) -> bool:
        content, mark, after = self._text.partition(QUOTE)
        if not mark:
            held = next((n for n in range(len(QUOTE) - 1, 0, -1) if content.endswith(QUOTE[:n])), 0)
            self._text = content[len(content) - held :]
            self._content(content[: len(content) - held])
            return False
        self._content(content)
        follows = after.lstrip()[:1]
        if not follows:  # the text after a mark shows whether the mark ends the string
            self._text = mark + after
            return self._wait()
        if follows in _CLOSES:
            self._ready.append('"')
            self._text = after
            self._step = self._after
            return True
        if self._before in _BEFORE_STRING:
            return self._give_up()
        self._content('"')
        self._text = after
        return True

    def _after(self) -> bool:
        self._comma = True
        text = self._text = self._text.lstrip()
        if not text:
            return False
        if text[0] == ",":
            return self._next(self._key if self._inside[-1] == "{" else self._value, 1)
        return self._closes() or self._give_up()

    def _closes(self) -> bool:
        """Closes the innermost bracket if its end comes next; returns whether it did.

        The last `}` is sent only at the call's end. If it turns out to be no call, the client is left with incomplete JSON.
        """
        text = self._text.lstrip()
        if text[:1] != {"{": "}", "[": "]"}[self._inside[-1]]:
            return False
        if len(self._inside) > 1:
            self._ready.append(text[0])
        self._inside, self._text = self._inside[:-1], text[1:]
        self._step = self._after if self._inside else None
        return True

    def _content(self, text: str) -> None:
        """Adds a part of a string's content."""
        self._ready.append(_written(text.replace(MARK, "\ufffd"))[1:-1])
        self._before = text.rstrip()[-1:] or self._before

    def _begin(self, text: str) -> None:
        """Adds the beginning of a value or a key, after a comma if one is due. So a comma before a closing bracket is left out."""
        self._ready.append(f",{text}" if self._comma else text)

    def _next(self, step: Callable[[], bool], skipped: int) -> bool:
        self._text, self._step = self._text[skipped:], step
        return True

    def _wait(self, longest: int = _LONGEST_WORD) -> bool:
        return self._give_up() if len(self._text) > longest else False

    def _give_up(self) -> bool:
        self._step = None
        return False
