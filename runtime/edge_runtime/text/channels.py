"""Tokens to text, as a stream that ends at stop strings, and to the answer, the thinking channel and tool calls, as Gemma 4 marks them.

<|channel>thought, a newline, thoughts, <channel|>: the thinking channel. <|tool_call>call:...<tool_call|>: a call.
Source: ai.google.dev/gemma/docs/core/prompt-formatting-gemma4. A vocabulary without these tokens has answers only.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Vocabulary
from edge_runtime.text.tool_calls import ToolCall, cut_tool_call, parse_tool_call

MAX_STOP_LENGTH = 1000
# Splits no character: bytes of an unfinished one are kept for the next token.
_UTF8 = codecs.getincrementaldecoder("utf-8")


class StopStrings:
    """Cuts a stream of text before the stop string that is complete first; of several complete at once, before the longest.

    The result does not depend on how the text is split. A possible beginning of a stop string is held back until it is decided.
    Raises RequestError for an empty stop string, and for one of more than `MAX_STOP_LENGTH` characters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise RequestError(f"stop is the string {stops!r}; give a list of strings")
        for stop in stops:
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise RequestError(f"a stop string has {len(stop)} characters; give it 1 to {MAX_STOP_LENGTH}")
        self.stopped_by: str | None = None
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> str:
        """Returns the text that no stop string can cut; nothing after a stop string was found."""
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        hits = [(place + len(stop), place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if hits:
            _, place, self.stopped_by = min(hits)
            self._held = ""
            return text[:place]
        begun = max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]

    def finish(self) -> str:
        """Returns the text that was held back and is not part of a stop string."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """Returns how many characters at the end of `text` may be the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


MAX_CHANNEL_NAME = 32
# A call is buffered until it is complete; a longer one cannot be parsed.
MAX_CALL_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """A piece of the thinking channel: not part of the answer or of the next turn."""

    text: str


Event = Text | Thought | ToolCall
Place = Literal["answer", "name", "thought", "call"]


class ChannelParser:
    """Turns tokens into events as soon as they are final; `stop` strings end the answer (not thoughts) before them.

    Without `channels`, all tokens are the answer's, as completions have it.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str] = (), *, channels: bool = True) -> None:
        self._vocabulary = vocabulary
        control = vocabulary.control_tokens if channels else {}
        self._marks = {
            control[text]: mark
            for text, mark in {
                "<|channel>": "channel",
                "<channel|>": "answer",
                "<|tool_call>": "call",
                "<tool_call|>": "answer",
                "<|tool_response>": "answer",
                "<tool_response|>": "answer",
            }.items()
            if text in control
        }
        self._stops = StopStrings(stop)
        self._place: Place = "answer"
        self._characters = _UTF8(errors="replace")
        self._held = ""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stops.stopped_by

    @property
    def place(self) -> Place:
        """What the newest token belongs to; a mark belongs to what it begins."""
        return self._place

    def feed(self, token: int) -> list[Event]:
        """Takes one token; returns the events that became final, possibly none."""
        if self._stops.stopped_by is not None:
            return []
        mark = self._marks.get(token)
        if mark is not None:
            events = self._close()
            self._place = "name" if mark == "channel" else "call" if mark == "call" else "answer"
            return events
        return self._take(self._characters.decode(self._vocabulary.piece(token, special=self._place == "call")))

    def finish(self) -> list[Event]:
        """Returns the remaining events after the last token. A call that was cut off has partial arguments."""
        return self._close(parse=cut_tool_call)

    def _close(self, parse: Callable[[str], ToolCall] = parse_tool_call) -> list[Event]:
        """Ends the current part; an unfinished character becomes U+FFFD."""
        events = self._take(self._characters.decode(b"", final=True))
        self._characters.reset()
        held, self._held = self._held, ""
        if self._place == "call":
            events.append(parse(held))
        elif self._place == "name" and held and not "thought".startswith(held.strip()):
            events.append(Thought(held))
        elif self._place == "answer" and self._stops.stopped_by is None and (text := self._stops.finish()):
            events.append(Text(text))
        self._place = "answer"
        return events

    def _take(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._place == "answer":
            certain = self._stops.feed(text)
            return [Text(certain)] if certain else []
        if self._place == "thought":
            return [Thought(text)]
        self._held += text
        if self._place == "call":
            return self._overlong_call()
        name, newline, rest = self._held.partition("\n")
        if not newline and len(name) <= MAX_CHANNEL_NAME:
            return []
        # The first line names the channel; a channel with another name, or one too long for a name, counts as thoughts.
        self._place, self._held = "thought", ""
        thought = rest if newline and name.strip() == "thought" else name + newline + rest
        return [Thought(thought)] if thought else []

    def _overlong_call(self) -> list[Event]:
        if len(self._held) <= MAX_CALL_CHARACTERS:
            return []
        call = ToolCall(name=None, arguments=None, raw=self._held)
        self._held, self._place = "", "answer"
        return [call]


def merged(events: Iterable[Event]) -> tuple[Event, ...]:
    """Merges neighbouring events of the same kind."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + event.text)
        elif isinstance(event, Thought) and isinstance(last, Thought):
            result[-1] = Thought(last.text + event.text)
        else:
            result.append(event)
    return tuple(result)
