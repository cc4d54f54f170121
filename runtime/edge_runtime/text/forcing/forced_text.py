"""The text that a constraint forces, as tokens: drafts that need no drafter.

The tokens are those that the tokenizer chooses for the text. They are verified like any draft, so the model may still spell it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.interfaces import Vocabulary
from edge_runtime.text.forcing.json_blanks import BlankStyle, JsonText
from edge_runtime.text.matcher_child import Matcher


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
        """Adds an emitted token."""
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
