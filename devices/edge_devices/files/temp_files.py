"""Temporary files and folders that carry the number of their process, so that the next start knows which of them a killed one left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PARTIAL = "partial"
# A process that runs may have got the number of one that was killed; what nobody holds is forgotten after so long.
_FORGOTTEN_SECONDS = 3600.0


def temporary_of(path: Path, kind: str = PARTIAL) -> Path:
    """Returns the name beside `path` under which this process makes it."""
    return path.parent / f".{path.name}.{kind}-{os.getpid()}"


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Locks a temporary file or folder while it is made, whatever it is named by then: the lock ends with the process, however that ends.

    Where the system or the file system has no such locks, the number in the name must do.
    """
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = _locked(path, wait=True)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def leftovers_of(path: Path, kind: str = PARTIAL) -> Iterator[Path]:
    """Yields what processes that run no more left of making `path`: nobody holds it, and its number's process is gone or it is old."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.{kind}-(\d+)")
    with contextlib.suppress(OSError):
        for found in sorted(path.parent.iterdir()):
            match = pattern.fullmatch(found.name)
            if match is not None and not found.is_symlink() and _is_left(found, int(match[1])):
                yield found


def clear_leftovers(path: Path, kind: str = PARTIAL) -> None:
    """Removes them; what cannot be removed stays."""
    for found in leftovers_of(path, kind):
        if found.is_dir():
            shutil.rmtree(found, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                found.unlink()


def _is_left(path: Path, process: int) -> bool:
    try:
        os.close(_locked(path, wait=False))
    except BlockingIOError:
        return False
    except OSError:
        return not is_running(process)
    return not is_running(process) or time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS


def _locked(path: Path, *, wait: bool) -> int:
    """Returns a descriptor that has the lock until it is closed. Raises OSError; BlockingIOError if another has it, unless `wait`."""
    if fcntl is None:
        raise OSError("there are no such locks here")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_running(process: int) -> bool:
    """Whether another process with this id runs. Our own id on a leftover is that of an earlier run (containers reuse small ids)."""
    if process == os.getpid():
        return False
    if os.name == "nt":
        return True  # asking would end it
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
