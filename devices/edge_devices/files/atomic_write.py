"""Writes a file whole or not at all, whatever ends the process meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from edge_devices.files.temp_files import clear_leftovers, temporary_of

# Conversations and cached rows are their owner's alone.
_PRIVATE = 0o600


def atomic_write(path: Path, parts: Iterable[bytes], *, mode: int = _PRIVATE) -> None:
    """Writes the parts under a temporary name beside `path` and renames it; what was there stays until then. Raises OSError.

    A link stays one: the file it leads to is written. What earlier processes left of this file is removed first.
    """
    path = destination_of(path)
    temporary = temporary_of(path)
    clear_leftovers(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), mode)
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def destination_of(path: Path) -> Path:
    """Returns the file that `path` leads to. Raises OSError for a device or pipe, which would be renamed away: /dev/null would be a file then."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "it is there already and not a regular file", str(path))
    return Path(os.path.realpath(path))
