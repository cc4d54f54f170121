"""Temporary files and folders named after their process, so that a later process can tell which of them are stale."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PARTIAL = "partial"
# A running process may have got the number of a killed one: an unlocked file this old is stale even so.
_STALE_SECONDS = 3600.0


def temporary_of(path: Path, kind: str = PARTIAL) -> Path:
    """Returns the temporary name beside `path` that this process writes to."""
    return path.parent / f".{path.name}.{kind}-{os.getpid()}"


def unforeseen_temporary_of(path: Path) -> Path:
    """Returns another such name at each call, which nobody can have planted a link at, and which two threads do not share."""
    return path.parent / f"{temporary_of(path).name}-{secrets.token_hex(8)}"


@contextlib.contextmanager
def locked(path: Path, before_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Locks a file or folder while it is written, also across a rename; the lock ends with the process.

    `before_wait` is called if another has the lock. Where the system or the file system has no such locks, only the process number in
    the name of a temporary file protects it.
    """
    descriptor, is_locked = None, False
    try:
        descriptor = _lock(path, wait=False)
    except BlockingIOError:
        is_locked = True
    except OSError:
        pass
    if is_locked:
        before_wait()
        with contextlib.suppress(OSError):
            descriptor = _lock(path, wait=True)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def stale_of(path: Path, kind: str = PARTIAL) -> Iterator[Path]:
    """Yields the stale temporary files of `path`: unlocked, and of a process that has ended, or old."""
    return _stale_in(path.parent, re.escape(path.name), kind)


def _stale_in(folder: Path, names: str, kind: str) -> Iterator[Path]:
    pattern = re.compile(rf"\.{names}\.{kind}-(\d+)(?:-[0-9a-f]+)?")
    with contextlib.suppress(OSError):
        for entry in sorted(folder.iterdir()):
            match = pattern.fullmatch(entry.name)
            if match is not None and not entry.is_symlink() and _is_stale(entry, int(match[1])):
                yield entry


def clear_stale(path: Path, kind: str = PARTIAL) -> None:
    """Removes the stale temporary files of `path`; ignores what cannot be removed."""
    _remove(stale_of(path, kind))


def clear_stale_in(folder: Path, names: str = ".+") -> None:
    """Removes the stale temporary files of files whose names fit an expression without groups; ignores what cannot be removed."""
    _remove(_stale_in(folder, names, PARTIAL))


def _remove(paths: Iterator[Path]) -> None:
    for stale in paths:
        if stale.is_dir():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                stale.unlink()


def _is_stale(path: Path, process: int) -> bool:
    try:
        os.close(_lock(path, wait=False))
    except BlockingIOError:
        return False
    except OSError:
        return not is_running(process)
    return not is_running(process) or time.time() - path.stat().st_mtime > _STALE_SECONDS


def _lock(path: Path, *, wait: bool) -> int:
    """Returns a descriptor that holds the lock until it is closed.

    Raises OSError; BlockingIOError if another has the lock, unless `wait`.
    """
    if fcntl is None:
        raise OSError("this system has no locks of folders and of files that are being renamed")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_running(process: int) -> bool:
    """Whether another process with this id runs. Our own id on a stale file is that of an earlier run: containers reuse small ids."""
    if process == os.getpid():
        return False
    if os.name == "nt":
        return True  # os.kill would end it
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
