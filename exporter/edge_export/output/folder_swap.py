"""What makes replacing a folder safe: its files are on the disk first, and old and new change places in one step where the system can."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

# linux/fs.h, linux/fcntl.h.
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# What renameat2 says where a kernel or a file system has no exchange.
_HAS_IT_NOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def exchange(one: Path, other: Path) -> bool:
    """Gives two folders each other's name in one step: there is no moment without either.

    Returns False, with nothing done, where that cannot be had: outside Linux, on a C library without renameat2 and on some file systems.
    Raises OSError for whatever else hinders it.
    """
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _HAS_IT_NOT:
        return False
    raise OSError(code, os.strerror(code), str(other))


def sync_files(folder: Path) -> None:
    """Has the system write a folder's files to the disk. Raises OSError if it cannot: some disks say only now that they are full."""
    for path in sorted(folder.iterdir()):
        _sync(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    sync_names(folder)


def sync_names(folder: Path) -> None:
    """Has the system write a folder's list of names to the disk; Windows cannot be asked to. Raises OSError."""
    if os.name != "nt":
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
