"""Markdown in a terminal, painted while it streams: headings, bold text, code and lists."""

from __future__ import annotations

import re

_RESET, _BOLD, _CODE, _HEADING = "\x1b[0m", "\x1b[1m", "\x1b[36m", "\x1b[1;4m"
# What may still become a fence, a heading or a bullet; it is held back until the next characters decide.
_UNDECIDED = re.compile(r" {0,3}(`{0,2}|`{3}[^\n]*|#{1,6}|[*+-]|)\Z")
_FENCE = re.compile(r" {0,3}```[^\n]*\n")
_BULLET, _TITLE = re.compile(r"( *)[*+-] "), re.compile(r" {0,3}(#{1,6}) ")


class MarkdownPainter:
    """Adds a terminal's colours to text that arrives in pieces. Nothing but the marks of bold text, code and headings is removed."""

    def __init__(self) -> None:
        self._held = ""
        self._at_line_start = True
        self._fenced = self._bold = self._code = self._heading = False

    def feed(self, text: str) -> str:
        """Returns the painted text that is final."""
        self._held += text
        return self._paint(final=False)

    def finish(self) -> str:
        """Returns the rest and switches all colours off."""
        painted = self._paint(final=True)
        return painted + (_RESET if self._fenced or self._bold or self._code or self._heading else "")

    def _paint(self, *, final: bool) -> str:
        painted = []
        while self._held:
            if self._at_line_start:
                if not final and _UNDECIDED.match(self._held):
                    break
                painted.append(self._line_start())
                continue
            if not final and self._held == "*":
                break
            painted.append(self._next())
        return "".join(painted)

    def _line_start(self) -> str:
        """Consumes a fence or the mark of a heading or bullet."""
        if fence := _FENCE.match(self._held):
            self._fenced = not self._fenced
            self._held = self._held[fence.end() :]
            return _CODE if self._fenced else _RESET
        self._at_line_start = False
        if self._fenced:
            return ""
        if title := _TITLE.match(self._held):
            self._held, self._heading = self._held[title.end() :], True
            return _HEADING
        if bullet := _BULLET.match(self._held):
            self._held = self._held[bullet.end() :]
            return f"{bullet[1]}• "
        return ""

    def _next(self) -> str:
        """Consumes a mark, a line's end, or the text before the next of them."""
        if self._held[0] == "\n":
            ended = self._bold or self._code or self._heading
            self._held, self._at_line_start = self._held[1:], True
            self._bold = self._code = self._heading = False
            return _RESET + "\n" if ended else "\n"
        if not self._fenced and self._held[0] == "`":
            self._held, self._code = self._held[1:], not self._code
            return _CODE if self._code else self._style()
        if not self._fenced and not self._code and self._held.startswith("**"):
            self._held, self._bold = self._held[2:], not self._bold
            return self._style()
        stop = re.compile(r"\n" if self._fenced else r"[\n`]" if self._code else r"[\n`*]").search(self._held, 1)
        end = stop.start() if stop else len(self._held)
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _style(self) -> str:
        return _RESET + (_HEADING if self._heading else "") + (_BOLD if self._bold else "")
