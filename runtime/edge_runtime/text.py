"""Token bytes to text, as a stream. Knows no logits and no drafts."""

from __future__ import annotations

import codecs


class TextStream:
    """Turns token pieces (bytes) into text without ever splitting a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, piece: bytes) -> str:
        """Returns the text that is complete now; bytes of an unfinished character wait for the next piece."""
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Returns what is left; an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
