"""Markdown in a terminal, painted while it streams: headings, bold text, code and lists, and what accepted drafts brought."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from rich.cells import cell_len

_RESET, _BOLD, _CODE, _HEADING = "\x1b[0m", "\x1b[1m", "\x1b[36m", "\x1b[1;4m"
_ACCEPTED, _DEFAULT = "\x1b[32m", "\x1b[39m"
# What may still become a fence, a heading or a bullet; it is held back until the next characters decide.
_UNDECIDED = re.compile(r" {0,3}(`{0,2}|`{3}[^\n]*|#{1,6}|[*+-]|)\Z")
_FENCE = re.compile(r" {0,3}```[^\n]*\n")
# A style, the end of a line, spaces, or a part of a word.
_PARTS, _STYLE = re.compile(r"\x1b\[[0-9;]*m|\n|[ \t]+|[^\x1b\n \t]+|\x1b"), re.compile(r"\x1b\[[0-9;]*m")
_BULLET, _TITLE = re.compile(r"( *)[*+-] "), re.compile(r" {0,3}(#{1,6}) ")


class MarkdownPainter:
    """Adds a terminal's colours to text that arrives in pieces, and breaks its lines between words where `columns` end.

    Nothing but the marks of bold text, code and headings is removed. Code between fences keeps its lines. A word appears when it is
    complete.
    """

    def __init__(self, columns: int | None = None) -> None:
        self._columns = columns
        # The cells of the line so far, the spaces behind them, and the word that may still grow.
        self._cells, self._gap, self._word = 0, "", ""
        self._held, self._accepted = "", list[bool]()  # text, and for each character whether an accepted draft brought it
        self._at_line_start = True
        self._fenced = self._bold = self._code = self._heading = False

    def feed(self, text: str, *, accepted: bool = False) -> str:
        """Returns the painted text that is final; what is `accepted` is green."""
        self._held += text
        self._accepted += [accepted] * len(text)
        return self._paint(final=False)

    def finish(self) -> str:
        """Returns the rest and switches all colours off."""
        painted = self._paint(final=True) + self._placed() + self._gap
        self._gap = ""
        return painted + (_RESET if self._fenced or self._bold or self._code or self._heading else "")

    def _paint(self, *, final: bool) -> str:
        painted = []
        while self._held:
            if self._at_line_start:
                if not final and _UNDECIDED.match(self._held):
                    break
                painted.append(self._broken(self._line_start()))
                continue
            if not final and self._held == "*":
                break
            painted.append(self._broken(self._next()))
        return "".join(painted)

    def _broken(self, painted: str) -> str:
        """Returns the part of a painted text that can no longer move to another line."""
        if self._columns is None:
            return painted
        parts = []
        for part in _PARTS.findall(painted):
            if part == "\n" or self._fenced:
                parts += [self._placed(), self._gap, part]
                self._gap = ""
                self._cells = 0 if part == "\n" else self._cells + cell_len(part)
            elif part[0] in " \t":
                parts.append(self._placed())
                self._gap += part
            else:
                self._word += part
                if cell_len(_STYLE.sub("", self._word)) >= self._columns:
                    parts.append(self._placed())
        return "".join(parts)

    def _placed(self) -> str:
        """Returns the word behind its spaces, or on a line of its own if it does not fit."""
        if not self._word or self._columns is None:
            return ""
        width = cell_len(_STYLE.sub("", self._word))
        fits = not self._cells or self._cells + len(self._gap) + width <= self._columns
        placed = f"{self._gap if fits else chr(10)}{self._word}"
        cells = (self._cells + len(self._gap) if fits else 0) + width
        # The terminal itself breaks a word that is wider than a line.
        self._cells = cells if cells <= self._columns else cells % self._columns or self._columns
        self._gap = self._word = ""
        return placed

    def _line_start(self) -> str:
        """Consumes a fence or the mark of a heading or bullet."""
        if fence := _FENCE.match(self._held):
            self._fenced = not self._fenced
            self._drop(fence.end())
            return _CODE if self._fenced else _RESET
        self._at_line_start = False
        if self._fenced:
            return ""
        if title := _TITLE.match(self._held):
            self._drop(title.end())
            self._heading = True
            return _HEADING
        if bullet := _BULLET.match(self._held):
            self._drop(bullet.end())
            return f"{bullet[1]}• "
        return ""

    def _next(self) -> str:
        """Consumes a mark, a line's end, or the text before the next of them."""
        if self._held[0] == "\n":
            ended = self._bold or self._code or self._heading
            self._drop(1)
            self._at_line_start = True
            self._bold = self._code = self._heading = False
            return _RESET + "\n" if ended else "\n"
        if not self._fenced and self._held[0] == "`":
            self._drop(1)
            self._code = not self._code
            return _CODE if self._code else self._style()
        if not self._fenced and not self._code and self._held.startswith("**"):
            self._drop(2)
            self._bold = not self._bold
            return self._style()
        stop = re.compile(r"\n" if self._fenced else r"[\n`]" if self._code else r"[\n`*]").search(self._held, 1)
        end = stop.start() if stop else len(self._held)
        painted = "".join(
            f"{_ACCEPTED}{part}{_CODE if self._code or self._fenced else _DEFAULT}" if accepted else part
            for accepted, part in self._parts(end)
        )
        self._drop(end)
        return painted

    def _parts(self, end: int) -> Iterator[tuple[bool, str]]:
        """Yields the held text up to `end` in parts that accepted drafts brought or did not."""
        for accepted, characters in groupby(zip(self._accepted[:end], self._held[:end], strict=True), key=itemgetter(0)):
            yield accepted, "".join(character for _, character in characters)

    def _drop(self, characters: int) -> None:
        """Forgets the first held characters, which are painted or were marks."""
        self._held, self._accepted = self._held[characters:], self._accepted[characters:]

    def _style(self) -> str:
        return _RESET + (_HEADING if self._heading else "") + (_BOLD if self._bold else "")
