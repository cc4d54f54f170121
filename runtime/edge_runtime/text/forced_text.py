"""The text that a constraint forces, as tokens: drafts that need no drafter.

The tokens are those that the tokenizer chooses for the text. They are verified like any draft, so the model may still spell it otherwise.

A JSON schema forces names, brackets and commas, but between them any blanks may stand, so hardly a byte is forced by itself. Another
matcher of the same schema without blanks follows the text without its blanks; what it forces gets back the blanks that the text is
written with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.interfaces import Vocabulary
from edge_runtime.text.matcher import Matcher

_BLANKS = b" \t\r\n"
_OPENING, _CLOSING, _BETWEEN = b"{[", b"}]", b",:"
_VALUE = b"v"
# A place between two tokens of JSON: the one before, the one after, and the depth.
Place = tuple[bytes, bytes, int]


class ForcedText:
    """Of one request. `matcher` is the constraint's own; `blankless` makes one for the same JSON schema without blanks, None for others."""

    def __init__(self, vocabulary: Vocabulary, matcher: Matcher, blankless: Callable[[], Matcher] | None, style: BlankStyle) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._make_blankless = blankless
        self._blankless: Matcher | None = None
        self._json = JsonText(style)
        self._unread = b""

    def add(self, token: int) -> None:
        if self._make_blankless is not None:
            self._unread += self._json.feed(self._vocabulary.piece(token))

    def tokens(self, ahead: Sequence[int]) -> list[int]:
        """Returns the forced tokens after `ahead`, where the constraint's matcher is."""
        text = self._expected_json(ahead) or self._matcher.compute_ff_bytes()
        readable = text.decode("utf-8", errors="ignore")
        return self._vocabulary.encode(readable, add_bos=False) if readable else []

    def _expected_json(self, ahead: Sequence[int]) -> bytes:
        matcher = self._caught_up()
        if matcher is None or self._unread:  # the text ends within a character
            return b""
        rest, position = self._json.without_blanks(b"".join(self._vocabulary.piece(token) for token in ahead))
        tokens = self._encoded(rest)
        if tokens is None or matcher.validate_tokens(tokens) < len(tokens):
            return b""
        if tokens:
            matcher.consume_tokens(tokens)
        forced = matcher.compute_ff_bytes()
        if tokens:
            matcher.rollback(len(tokens))
        return self._json.with_blanks(forced, position)

    def _caught_up(self) -> Matcher | None:
        """Returns the matcher without blanks after the emitted tokens; None once it cannot follow them."""
        if self._make_blankless is None:
            return None
        try:
            self._blankless = self._blankless or self._make_blankless()
        except EdgeRuntimeError:
            self._make_blankless = None
            return None
        tokens = self._encoded(self._unread)
        if tokens is not None:
            self._unread = b""
        if tokens and self._blankless.validate_tokens(tokens) < len(tokens):
            self._make_blankless = None
            return None
        if tokens:
            self._blankless.consume_tokens(tokens)
        return self._blankless

    def _encoded(self, text: bytes) -> list[int] | None:
        """Returns tokens of `text`; None if it ends within a character."""
        try:
            return self._vocabulary.encode(text.decode(), add_bos=False) if text else []
        except UnicodeDecodeError:
            return None


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
    """The blanks that were written at each place, newest first; shared by the requests of a model, which keeps its style."""

    def __init__(self) -> None:
        self._learned: dict[Place, bytes] = {}

    def learn(self, place: Place, blanks: bytes) -> None:
        """Remembers the blanks of a place."""
        self._learned.pop(place, None)
        self._learned[place] = blanks

    def expected(self, place: Place) -> bytes:
        """Returns the blanks of this place, else at the same place of the nearest depth, else one after a comma or colon."""
        if place in self._learned:
            return self._learned[place]
        before, after, depth = place
        near = [other for other in self._learned if other[:2] == (before, after)]
        if near:
            return self._learned[min(near, key=lambda other: abs(other[2] - depth))]
        return b" " if before and before in _BETWEEN and after == _VALUE else b""


class JsonText:
    """Splits JSON text into blanks and the rest."""

    def __init__(self, style: BlankStyle) -> None:
        self.position = JsonPosition()
        self._style = style

    def feed(self, text: bytes) -> bytes:
        """Adds text and learns its style; returns the text without its blanks."""
        rest, self.position = self.without_blanks(text, learn=True)
        return rest

    def without_blanks(self, text: bytes, *, learn: bool = False) -> tuple[bytes, JsonPosition]:
        """Returns the text without its blanks, and the position after it."""
        position, rest = self.position, b""
        for value in text:
            byte = bytes([value])
            if learn and byte not in _BLANKS and not position.within(byte):
                self._style.learn(position.place(byte), position.blanks)
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
