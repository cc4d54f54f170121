"""Token bytes to text, as a stream that ends at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from edge_runtime.errors import RequestError

MAX_STOP_LENGTH = 1000


class TextStream:
    """Decodes token pieces (bytes) to text without splitting a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: bytes) -> str:
        """Returns the complete characters; bytes of an unfinished one are kept for the next piece."""
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Returns the rest; an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


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


class OutputText:
    """The text of one request: `feed` takes token pieces one by one, `take` returns the text that is final."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._characters = TextStream()
        self._stops = StopStrings(stop)
        self._ready: list[str] = []

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found, if any."""
        return self._stops.stopped_by

    def feed(self, piece: bytes) -> bool:
        """Takes the bytes of one token; returns whether a stop string is complete, which ends the request."""
        self._ready.append(self._stops.feed(self._characters.feed(piece)))
        return self._stops.stopped_by is not None

    def take(self) -> str:
        """Returns the text that became final since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def finish(self) -> str:
        """Returns the rest after the last token, including text held back, unless a stop string ended it."""
        self._ready += [self._stops.feed(self._characters.finish()), self._stops.finish()]
        return self.take()
