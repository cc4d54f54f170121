"""A tool call while it is written: the name and the beginnings of the arguments' JSON, as soon as nothing that follows can change them.

Only Gemma 4's own notation is followed: call:NAME{key:value,...}. From the first place on where a model leaves it, as `tool_calls` tells,
nothing more is certain before the call's end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

from edge_runtime.text.tool_calls import MARK, MAX_DEPTH, NAME, QUOTE, CallPiece, ToolCall, written_arguments, written_scalar

_KEY_ENDS = re.compile(rf'[:={{}}\[\],"{MARK}]')
_WORD_ENDS = re.compile(rf"[,{{}}\[\]{MARK}]")
_CLOSES = frozenset(",:=}]")
_BEFORE_STRING = frozenset(",:={[")
# What is longer and undecided is not looked through with each token again.
_LONGEST_NAME, _LONGEST_WORD = 256, 1024


class StreamedCall:
    """Follows one call. `sent` is the JSON that pieces have sent of its arguments, None before its name."""

    def __init__(self) -> None:
        self.sent: str | None = None
        self._text = ""  # what is not decided yet
        self._ready: list[str] = []
        self._inside = ""  # brackets that are open
        self._comma = False  # whether a value stands before what comes next
        self._before = ""  # the last character of a string's content that is no blank
        self._step: Callable[[], bool] | None = self._name

    def feed(self, text: str) -> list[CallPiece]:
        """Takes more of the text behind <|tool_call>; returns what is certain now, one piece or none."""
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
        """Returns the call, whole or cut off, with what is `unsent` of it. What is no call stays none."""
        if self.sent is None or call.arguments_json is None:
            return call
        whole = written_arguments(call.raw, cut=call.arguments is None)
        return replace(call, unsent=whole[len(self.sent) :]) if whole.startswith(self.sent) else replace(call, arguments=None, partial=None)

    # Each step decides about the beginning of `_text`, and returns whether it could; it chooses the next one.

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
        self._begin(f"{json.dumps(key, ensure_ascii=False)}:")
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
        scalar = written_scalar(text[: end.start()].strip())
        if not end.start() or scalar.startswith('"'):  # a bare text may be a string that lacks its first mark
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
        if not follows:  # what comes behind a mark says whether it ends the string
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
        """Whether the innermost bracket closes here."""
        text = self._text.lstrip()
        if text[:1] != {"{": "}", "[": "]"}[self._inside[-1]]:
            return False
        if len(self._inside) > 1:  # the last bracket waits for the call's end: what begins as a call may be none, and stays unfinished then
            self._ready.append(text[0])
        self._inside, self._text = self._inside[:-1], text[1:]
        self._step = self._after if self._inside else None
        return True

    def _content(self, text: str) -> None:
        """Adds a part of a string's content."""
        self._ready.append(json.dumps(text.replace(MARK, "\ufffd"), ensure_ascii=False)[1:-1])
        self._before = text.rstrip()[-1:] or self._before

    def _begin(self, text: str) -> None:
        """Adds what begins a value or a key, behind a comma that is due: one that a bracket follows is left out."""
        self._ready.append(f",{text}" if self._comma else text)

    def _next(self, step: Callable[[], bool], skipped: int) -> bool:
        self._text, self._step = self._text[skipped:], step
        return True

    def _wait(self, longest: int = _LONGEST_WORD) -> bool:
        return self._give_up() if len(self._text) > longest else False

    def _give_up(self) -> bool:
        self._step = None
        return False
