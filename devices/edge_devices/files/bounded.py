"""Reads the lines of files that people name, and no more of them than such a file has."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import TextIO


def lines_at_most(file: TextIO, longest: int, most: int) -> Iterator[str]:
    """Yields the lines of an open file, cut after `longest` characters. Raises OSError for more than `most` of them."""
    for _ in range(most):
        line = file.readline(longest)
        if not line:
            return
        yield line
    if file.read(1):
        raise OSError(errno.EFBIG, f"it has more than {most} lines")
