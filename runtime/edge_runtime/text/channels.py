"""Turns a stream of tokens into text that ends at stop strings, and divides it into answer, thinking channel and tool calls.

Gemma 4 writes the thinking channel as <|channel>thought, a newline, thoughts, <channel|>, and a call as <|tool_call>call:...<tool_call|>.
Source: ai.google.dev/gemma/docs/core/prompt-formatting-gemma4. With a vocabulary without these tokens, everything is the answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Vocabulary
from edge_runtime.text.constraints import THOUGHTS_BEGIN, THOUGHTS_END, AfterThoughts, ConstraintSource
from edge_runtime.text.tool_calls import CALL_BEGINS, CALL_ENDS, QUOTE, CallPiece, StreamedCall, ToolCall, cut_tool_call, parse_tool_call

MAX_STOP_LENGTH = 1000
# Never splits a character: the bytes of an incomplete one are kept for the next token.
_UTF8 = codecs.getincrementaldecoder("utf-8")


class StopStrings:
    """Cuts a stream of text before the stop string that is completed first; if several are completed at once, before the longest.

    The result does not depend on how the text is split. Text that may be the beginning of a stop string is held back until that is decided.
    Raises RequestError for an empty stop string, and for one of more than `MAX_STOP_LENGTH` characters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise RequestError(f"stop is the string {stops!r}; give a list of strings")
        for stop in stops:
            if not 0 < len(stop) <= MAX_STOP_LENGTH:
                raise RequestError(f"a stop string has {len(stop)} characters; give it 1 to {MAX_STOP_LENGTH}")
        self.stopped_by: str | None = None
        self._stops = tuple(map(_StopString, dict.fromkeys(stops)))
        self._held = ""

    def feed(self, text: str) -> str:
        """Returns the text that no stop string can cut any more; an empty string after a stop string was found."""
        if self.stopped_by is not None:
            return ""
        if not self._stops:  # a fast path: most requests have none, and this runs for each token
            return text
        hits = [(end, -len(stop.text), stop.text) for stop in self._stops if (end := stop.feed(text)) is not None]
        text = self._held + text
        if hits:
            end, negative, self.stopped_by = min(hits)
            text, self._held = text[: len(self._held) + end + negative], ""
            return text
        begun = max((stop.begun for stop in self._stops), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]

    def finish(self) -> str:
        """Returns the text that was held back and is not part of a stop string."""
        held, self._held = self._held, ""
        for stop in self._stops:
            stop.begun = 0
        return held


class _StopString:
    """Searches a stream for one string with the Knuth-Morris-Pratt algorithm. Its time is linear even for a text made to match everywhere.

    `begun` is how many characters at the end of the stream match the beginning of the string.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0
        # The failure table: for each prefix of the string, its longest proper prefix that is also its suffix. It grows when needed.
        self._shorter = [0, 0]

    def feed(self, text: str) -> int | None:
        """Returns the position in `text` after the first complete match; None if there is none."""
        at = 0
        while at < len(text):
            if not self.begun and (at := text.find(self.text[0], at)) < 0:
                return None
            self.begun = self._longer(self.begun, text[at])
            at += 1
            if self.begun == len(self.text):
                return at
        return None

    def _longer(self, begun: int, letter: str) -> int:
        """Returns the length of the match after one more letter."""
        while begun and self.text[begun] != letter:
            begun = self._longest_within(begun)
        return begun + (self.text[begun] == letter)

    def _longest_within(self, begun: int) -> int:
        while len(self._shorter) <= begun:
            self._shorter.append(self._longer(self._shorter[-1], self.text[len(self._shorter) - 1]))
        return self._shorter[begun]


MAX_CHANNEL_NAME = 32
_TURN = "model\n"
# A call is held back until it is complete. A longer one counts as text.
MAX_CALL_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """A piece of the thinking channel. It is not part of the answer or of the next turn's prompt."""

    text: str


Event = Text | Thought | ToolCall | CallPiece
Place = Literal["answer", "name", "thought", "call", "turn"]
_MARKS: Mapping[str, Place] = {
    THOUGHTS_BEGIN: "name",
    THOUGHTS_END: "answer",
    CALL_BEGINS: "call",
    CALL_ENDS: "answer",
    "<|tool_response>": "answer",
    "<tool_response|>": "answer",
    "<|turn>": "turn",
    "<turn|>": "answer",
}


class ChannelParser:
    """Turns tokens into events as soon as they are final. The answer (but not thoughts) ends before the first of the `stop` strings.

    What begins like a call but is none becomes text; without `calls`, every call becomes text. The answer continues `prompt`, whose last
    tokens may have opened a channel or a call. Without `channels`, all tokens belong to the answer, as for completions. With `pieces`,
    the parts of a call that are certain are sent early as `CallPiece`; the `ToolCall` follows. If it turns out to be no call, its text
    follows as `Text`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: Sequence[str] = (),
        *,
        prompt: Sequence[int] = (),
        channels: bool = True,
        calls: bool = True,
        pieces: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        control = vocabulary.control_tokens if channels else {}
        self._marks: dict[int, Place] = dict.fromkeys(vocabulary.eog_tokens, "answer") if channels else {}
        self._marks |= {control[text]: place for text, place in _MARKS.items() if text in control}
        if not calls and CALL_BEGINS in control:
            self._marks[control[CALL_BEGINS]] = "answer"
        self._quote = control.get(QUOTE)
        self._stops = StopStrings(stop)
        self._place: Place = "answer"
        self._characters = _UTF8(errors="replace")
        self._held = ""
        self._pieces = False  # a call that began in the prompt is sent whole
        self._call: StreamedCall | None = None
        self._continue(prompt)
        self._pieces = pieces

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stops.stopped_by

    @property
    def place(self) -> Place:
        """What the newest token belongs to. A mark belongs to what it begins."""
        return self._place

    def feed(self, token: int) -> list[Event]:
        """Takes one token; returns the events that it made final, possibly none."""
        if self._stops.stopped_by is not None:
            return []
        mark = self._marks.get(token)
        if mark is not None:
            events = self._close(parse_tool_call)
            self._place = mark
            self._call = StreamedCall() if mark == "call" and self._pieces else None
            return events
        return self._take(self._characters.decode(self._vocabulary.piece(token, special=self._place == "call" and token == self._quote)))

    def finish(self, *, ended: bool = False) -> list[Event]:
        """Returns the remaining events after the last token. Unless the model `ended` the answer, a call at its end may be cut off."""
        return self._close(parse_tool_call if ended else cut_tool_call)

    def _continue(self, prompt: Sequence[int]) -> None:
        """Continues the channel or call that the last mark of the prompt opened."""
        begin = next((place for place in range(len(prompt) - 1, -1, -1) if prompt[place] in self._marks), None) if self._marks else None
        if begin is not None and self._marks[prompt[begin]] in ("name", "call"):
            for token in prompt[begin:]:
                self.feed(token)

    def _close(self, parse: Callable[[str], ToolCall]) -> list[Event]:
        """Ends the current part; an unfinished character becomes U+FFFD."""
        events = self._take(self._characters.decode(b"", final=True))
        self._characters.reset()
        held, self._held = self._held, ""
        place, self._place = self._place, "answer"
        if place == "name" and held and not "thought".startswith(held.strip()):
            events.append(Thought(held))
        elif place == "call" and (call := self._ended(parse(held))).arguments_json is not None:
            events.append(call)
        elif place == "call":
            events += self._take(held)
        if self._stops.stopped_by is None and (text := self._stops.finish()):
            events.append(Text(text))
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
            if len(self._held) > MAX_CALL_CHARACTERS:
                return self._answer()
            return [*self._call.feed(text)] if self._call else []
        if self._place == "turn":
            return self._begun_turn()
        name, newline, rest = self._held.partition("\n")
        if not newline and len(name) <= MAX_CHANNEL_NAME:
            return []
        # The first line names the channel; a channel with another name, or one too long for a name, counts as thoughts.
        self._place, self._held = "thought", ""
        thought = rest if newline and name.strip() == "thought" else name + newline + rest
        return [Thought(thought)] if thought else []

    def _ended(self, call: ToolCall) -> ToolCall:
        return call if self._call is None else self._call.ended(call)

    def _begun_turn(self) -> list[Event]:
        """Drops the header of a model's turn. The model writes it itself if the template left it out of the prompt."""
        if _TURN.startswith(self._held) and self._held != _TURN:
            return []
        self._held = self._held.removeprefix(_TURN)
        return self._answer()

    def _answer(self) -> list[Event]:
        """Treats the text that was held back as part of the answer."""
        self._place = "answer"
        text, self._held = self._held, ""
        return self._take(text)


def after_thoughts(
    constraint: ConstraintSource | None, vocabulary: Vocabulary, prompt: Sequence[int], *, thinking: bool
) -> ConstraintSource | None:
    """Returns the constraint for the answer to a prompt. It applies after the thoughts if the model thinks or the prompt began to."""
    opened = ChannelParser(vocabulary, prompt=prompt).place in ("name", "thought")
    if constraint is None or isinstance(constraint, AfterThoughts) or not (thinking or opened):
        return constraint
    return AfterThoughts(constraint, opened=opened)


def merged(events: Iterable[Event]) -> tuple[Event, ...]:
    """Merges adjacent events of the same kind."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + event.text)
        elif isinstance(event, Thought) and isinstance(last, Thought):
            result[-1] = Thought(last.text + event.text)
        elif isinstance(event, CallPiece) and event.name is None and isinstance(last, CallPiece):
            result[-1] = CallPiece(last.name, last.arguments + event.arguments)
        else:
            result.append(event)
    return tuple(result)
