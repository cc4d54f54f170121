"""The blanks of JSON output: where a schema leaves them free, a text is expected to go on with those that it had before.

A schema forces names, brackets and commas, but between them any blanks may stand, so hardly a byte is forced by itself. A second matcher
of the same schema without blanks follows the text without its blanks; what it forces gets the blanks back that the text is written with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_BLANKS = b" \t\r\n"
_OPENING, _CLOSING, _BETWEEN = b"{[", b"}]", b",:"
_VALUE = b"v"
# A place between two tokens of JSON: the one before, the one after, and the depth.
Place = tuple[bytes, bytes, int]


@dataclass(frozen=True)
class JsonPosition:
    """Where in JSON a text ends: in a string or not, the last byte outside strings, the depth, and the blanks since."""

    in_string: bool = False
    escaped: bool = False
    before: bytes = b""
    depth: int = 0
    blanks: bytes = b""

    def after(self, byte: bytes) -> JsonPosition:
        """Returns the position after another byte."""
        if self.in_string:
            if self.escaped:
                return replace(self, escaped=False)
            return replace(self, escaped=byte == b"\\", in_string=byte != b'"')
        if byte in _BLANKS:
            return replace(self, blanks=self.blanks + byte)
        before = byte if byte in _OPENING + _BETWEEN else _VALUE
        depth = self.depth + (byte in _OPENING) - (byte in _CLOSING)
        return JsonPosition(in_string=byte == b'"', before=before, depth=depth)

    def place(self, byte: bytes) -> Place:
        """Returns the place of the blanks before `byte`, which is outside strings."""
        return self.before, byte if byte in _CLOSING + _BETWEEN else _VALUE, self.depth

    def within(self, byte: bytes) -> bool:
        """Whether `byte` continues a number or a word, so that no blank may stand before it."""
        return self.in_string or (self.before == _VALUE and not self.blanks and byte not in _CLOSING + _BETWEEN)


class BlankStyle:
    """The blanks that were seen at each place, newest first; shared by the requests of a model, which keeps its style."""

    def __init__(self) -> None:
        self._seen: dict[Place, bytes] = {}

    def learn(self, place: Place, blanks: bytes) -> None:
        """Remembers the blanks of a place."""
        self._seen.pop(place, None)
        self._seen[place] = blanks

    def expected(self, place: Place) -> bytes:
        """Returns the blanks seen at this place, else at the same place of the nearest depth, else one after a comma or colon."""
        if place in self._seen:
            return self._seen[place]
        before, after, depth = place
        near = [other for other in self._seen if other[:2] == (before, after)]
        if near:
            return self._seen[min(near, key=lambda other: abs(other[2] - depth))]
        return b" " if before and before in _BETWEEN and after == _VALUE else b""


class JsonText:
    """Splits JSON text into blanks and the rest."""

    def __init__(self, style: BlankStyle) -> None:
        self.position = JsonPosition()
        self._style = style

    def feed(self, text: bytes) -> bytes:
        """Adds text and learns its style; returns the text without its blanks."""
        rest = b""
        for value in text:
            byte = bytes([value])
            if not self.position.in_string and byte not in _BLANKS and not self.position.within(byte):
                self._style.learn(self.position.place(byte), self.position.blanks)
            self.position = self.position.after(byte)
            if self.position.in_string or not (byte in _BLANKS and self.position.blanks):
                rest += byte
        return rest

    def without_blanks(self, text: bytes) -> tuple[bytes, JsonPosition]:
        """Returns what `feed` would, and the position after it, without learning."""
        position, rest = self.position, b""
        for value in text:
            byte = bytes([value])
            position = position.after(byte)
            if position.in_string or not (byte in _BLANKS and position.blanks):
                rest += byte
        return rest, position

    def with_blanks(self, forced: bytes, position: JsonPosition) -> bytes:
        """Returns `forced`, which has no blanks, as it is expected to be written at `position`; nothing if the style differs there."""
        text = b""
        for value in forced:
            byte = bytes([value])
            if not position.within(byte):
                blanks = self._style.expected(position.place(byte))
                if not blanks.startswith(position.blanks):
                    return text
                text += blanks[len(position.blanks) :]
            text += byte
            position = position.after(byte)
        return text
