"""Parses a model's tokens into the answer, the thinking channel and tool calls, as Gemma 4 marks them.

<|channel>thought, a newline, thoughts, <channel|>: the thinking channel. <|tool_call>call:...<tool_call|>: a call.
Source: ai.google.dev/gemma/docs/core/prompt-formatting-gemma4. A vocabulary without these tokens has answers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_runtime.interfaces import Vocabulary
from edge_runtime.text.stream import StopStrings, TextStream
from edge_runtime.text.tool_calls import ToolCall, parse_tool_call

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
        self._characters = TextStream()
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
        return self._take(self._characters.feed(self._vocabulary.piece(token, special=self._place == "call")))

    def finish(self) -> list[Event]:
        """Returns the remaining events after the last token. A call that was cut off has no arguments."""
        return self._close()

    def _close(self) -> list[Event]:
        """Ends the current part; an unfinished character becomes U+FFFD."""
        events = self._take(self._characters.finish())
        self._characters = TextStream()
        held, self._held = self._held, ""
        if self._place == "call":
            events.append(parse_tool_call(held))
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
