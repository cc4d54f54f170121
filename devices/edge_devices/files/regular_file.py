"""Reads a small file that must be one: no link, which could lead to anyone's file, and no pipe or device, which could be without an end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# A pipe that nobody writes to would let the opening itself wait.
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def read_regular(path: Path, most: int) -> bytes:
    """Returns the file's first `most` bytes. Raises OSError if it cannot be read, is a link or is no regular file."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, and a bundle holds none", str(path))
    with os.fdopen(os.open(path, _FLAGS), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return file.read(min(most, found.st_size))  # read takes memory for all it is asked for
