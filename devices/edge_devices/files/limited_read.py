"""Reads with limits: a file or pipe is read only up to the size that such a file may have. Also hashes."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO


def sha256_of(path: Path, length: int | None = None, progress: Callable[[int], None] = lambda _bytes: None) -> str:
    """Returns the hex sha256 of a file, or of its first `length` bytes. `progress` gets the size of each piece. Raises OSError."""
    digest, left = hashlib.sha256(), length
    with path.open("rb") as file:
        while piece := file.read(_PIECE if left is None else min(_PIECE, left)):
            digest.update(piece)
            progress(len(piece))
            left = None if left is None else left - len(piece)
    return digest.hexdigest()


_PIECE = 1 << 20
# Flags for opening a file that must not be a link. O_NONBLOCK is needed because opening a pipe without a writer would wait.
READ_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class FileTooLarge(OSError):
    """A file is larger than allowed. The message has the limit."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EFBIG, message)

    def __str__(self) -> str:
        return str(self.strerror)


def read_at_most(path: Path, max_bytes: int) -> bytes:
    """Returns all bytes of a file, or of a pipe, as in `<(command)`.

    Raises OSError if it cannot be read, and FileTooLarge if it has more than `max_bytes` bytes.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return _read(file, max_bytes)
    except ValueError as error:  # a path with a null character
        raise OSError(errno.EINVAL, str(error)) from error


def read_regular(path: Path, max_bytes: int) -> bytes:
    """As `read_at_most`, for a file of a bundle, which must be a regular file.

    Raises OSError for a symbolic link, which could lead to any file, and for a pipe or device.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link, and a bundle holds none", str(path))
    with os.fdopen(os.open(path, READ_FLAGS), "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return _read(file, max_bytes)


def parse_integer(text: str) -> int | None:
    """Returns the integer in a text of 1 to 18 decimal digits; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def lines_at_most(file: TextIO, max_characters: int, max_lines: int) -> Iterator[str]:
    """Yields the lines of an open file.

    Raises FileTooLarge if a line has more than `max_characters` characters with its end, or if there are more than `max_lines` lines.
    """
    for number in range(1, max_lines + 1):
        line = file.readline(max_characters + 1)
        if not line:
            return
        if len(line) > max_characters:
            raise FileTooLarge(f"line {number} has more than {max_characters} characters")
        yield line
    if file.read(1):
        raise FileTooLarge(f"it has more than {max_lines} lines")


def _read(file: BinaryIO, max_bytes: int) -> bytes:
    """Reads a regular file at once, so that it is never in memory twice. A pipe or device has no size, so it is read in pieces."""
    step = max(_PIECE, os.fstat(file.fileno()).st_size)
    pieces, left = [], max_bytes
    while piece := file.read(min(step, left) + 1):
        if len(piece) > left:
            raise FileTooLarge(f"it has more than {max_bytes} bytes")
        pieces.append(piece)
        left -= len(piece)
        step = _PIECE
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
