"""Tokens of one answer to the events that a client hears, up to where a stop string ends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from edge_runtime.interfaces import Vocabulary
from edge_runtime.text.channels import Event, Text, Thought
from edge_runtime.text.stream import OutputText


class Speech(Protocol):
    """Takes tokens one by one; `channels.ChannelParser` is one too."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer, if one did."""

    def feed(self, token: int) -> list[Event]:
        """Returns what became certain."""

    def finish(self) -> list[Event]:
        """Returns what was held back, once no token follows."""


class PlainSpeech:
    """All tokens are text: no conversation, no channels."""

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str]) -> None:
        self._vocabulary = vocabulary
        self._text = OutputText(stop)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._text.stopped_by

    def feed(self, token: int) -> list[Event]:
        """Returns the text that became certain."""
        self._text.feed(self._vocabulary.piece(token))
        return _as_events(self._text.take())

    def finish(self) -> list[Event]:
        """Returns the rest."""
        return _as_events(self._text.finish())


def joined(events: Iterable[Event]) -> tuple[Event, ...]:
    """Joins neighbouring pieces of the same kind."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + event.text)
        elif isinstance(event, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + event.text)
        else:
            found.append(event)
    return tuple(found)


def _as_events(text: str) -> list[Event]:
    return [Text(text)] if text else []
