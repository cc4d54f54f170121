"""The rows of a meter's table: its encoding, its separator, and the cells of each line."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from edge_devices.errors import MeterError
from edge_devices.files.limited_read import lines_at_most

MAX_ROWS = 10_000_000
MAX_LINE_CHARS = 1 << 16  # a log of hundreds of sensors has a header of 20,000
SEPARATORS = ";\t|,"
SNIFFED_LINES, SNIFFED_BYTES, SNIFFED_SHARE = 60, 1 << 16, 0.6


def rows_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields number and cells of every line that is neither empty nor a note. Raises MeterError if it cannot be read, or for a line that
    is too long.
    """
    try:
        with path.open("rb") as file:
            text = io.TextIOWrapper(file, encoding=_encoding(file.peek(SNIFFED_BYTES)), errors="replace")
            lines = enumerate(lines_at_most(text, MAX_LINE_CHARS, 2 * MAX_ROWS), start=1)
            first = [(number, line) for number, line in islice(lines, SNIFFED_LINES) if line.strip("\r\n \0")]
            separator, begun = _separator([line for _, line in first]), False
            for number, line in chain(first, lines):
                stripped = line.strip("\r\n \0")
                if begun and stripped.startswith("#"):
                    continue  # a note; before the table it may be the header
                if cells := _cells(stripped, separator):
                    begun = begun or (len(cells) > 1 and not stripped.startswith("#"))
                    yield number, cells
    except (OSError, csv.Error) as error:
        raise MeterError(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _encoding(head: bytes) -> str:
    """Returns the encoding of a text that begins so; without a mark and not UTF-8 it is that of Windows."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if len(head) > 3 and head[0] and not head[1] and head[2] and not head[3]:
        return "utf-16-le"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8-sig"


def _separator(lines: Sequence[str]) -> str:
    """Returns the separator of most of the last lines, as preambles have others; a blank where there is none."""
    figures = lines[len(lines) // 2 :]
    for separator in SEPARATORS:
        split = [cells for line in figures if len(cells := _split(line, separator)) > 1]
        if len(split) >= SNIFFED_SHARE * len(figures) and figures:
            if separator == "," and any(re.fullmatch(r"\d+\s{2,}-?\d+", cell.strip()) for cells in split for cell in cells):
                continue  # decimal commas in columns of blanks
            return separator
    return " "


def _split(line: str, separator: str) -> list[str]:
    return next(csv.reader([line.replace("\0", "")], delimiter=separator, skipinitialspace=True), [])


def _cells(text: str, separator: str) -> list[str]:
    """Returns the cells of a line; those of a line with # too, which may be the header."""
    cut = text.lstrip("# ") if text.startswith("#") else text
    if separator != " ":
        return [cell.strip().strip('"') for cell in _split(cut, separator)]
    cells: list[str] = []
    for word in cut.split():
        if cells and re.fullmatch(r"[(\[].*[)\]]", word):  # the unit of a header's name
            cells[-1] += f" {word}"
        else:
            cells.append(word.strip('"'))
    return cells
