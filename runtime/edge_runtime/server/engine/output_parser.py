"""Turns the tokens of one answer into events for the client, up to the stop string that ends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from edge_runtime.interfaces import Vocabulary
from edge_runtime.text.channels import Event, Place, Text, Thought
from edge_runtime.text.stream import OutputText


class OutputParser(Protocol):
    """Parses tokens one by one. `channels.ChannelParser` is the implementation for conversations."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer; None if none did."""

    @property
    def place(self) -> Place:
        """What the newest token belongs to."""

    def feed(self, token: int) -> list[Event]:
        """Returns the events that are final after this token."""

    def finish(self) -> list[Event]:
        """Returns the events that were held back; call it after the last token."""


class TextParser:
    """Treats all tokens as text: for completions, which have no channels."""

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str]) -> None:
        self.place: Place = "answer"
        self._vocabulary = vocabulary
        self._text = OutputText(stop)

    @property
    def stopped_by(self) -> str | None:
        return self._text.stopped_by

    def feed(self, token: int) -> list[Event]:
        self._text.feed(self._vocabulary.piece(token))
        return _as_events(self._text.take())

    def finish(self) -> list[Event]:
        return _as_events(self._text.finish())


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


def _as_events(text: str) -> list[Event]:
    return [Text(text)] if text else []
