"""Writes files that appear complete or not at all, by way of temporary files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from edge_devices.errors import EdgeError, MeasurementError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PARTIAL = "partial"
# A running process may have the number of a killed one. So an unlocked file of this age is stale even if the process runs.
_STALE_SECONDS = 3600.0


def temporary_of(path: Path, kind: str = PARTIAL) -> Path:
    """Returns the temporary name beside `path` to which this process writes."""
    return path.parent / f".{path.name}.{kind}-{os.getpid()}"


def unforeseen_temporary_of(path: Path) -> Path:
    """Returns a temporary name that differs at each call, so that threads do not share it and nobody can have put a link there."""
    return path.parent / f"{temporary_of(path).name}-{secrets.token_hex(8)}"


@contextlib.contextmanager
def locked(path: Path, before_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Locks a file or folder inside the block, while it is written.

    The lock survives a rename, and ends with the process. `before_wait` is called if another process has the lock. If the system or the
    file system has no such locks, only the process number in its name protects a temporary file.
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
    """Yields the stale temporary files of `path`. These are unlocked, and their process has ended or they are old."""
    return _stale_in(path.parent, re.escape(path.name), kind)


def _stale_in(folder: Path, names: str, kind: str) -> Iterator[Path]:
    pattern = re.compile(rf"\.{names}\.{kind}-(\d+)(?:-[0-9a-f]+)?")
    with contextlib.suppress(OSError):
        for entry in sorted(folder.iterdir()):
            match = pattern.fullmatch(entry.name)
            if match is not None and not entry.is_symlink() and _is_stale(entry, int(match[1])):
                yield entry


def clear_stale(path: Path, kind: str = PARTIAL) -> None:
    """Removes the stale temporary files of `path`. Those that cannot be removed are ignored."""
    _remove(stale_of(path, kind))


def clear_stale_in(folder: Path, names: str) -> None:
    """Removes the stale temporary files of all names that match `names`, a pattern without groups. Failures are ignored."""
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

    Raises OSError, which is a BlockingIOError if another process has the lock and `wait` is false.
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
    """Whether another process with this id runs. If a file has our own id, it is from an earlier process, as containers reuse small ids."""
    if process == os.getpid():
        return False
    if os.name == "nt":
        return True  # os.kill would end the process there
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


# Conversations and cached rows are private to their owner.
_PRIVATE = 0o600
_PUBLIC = 0o644


def atomic_write(path: Path, parts: Iterable[bytes], *, mode: int = _PRIVATE) -> None:
    """Writes the parts to a temporary file beside `path`, and then renames it to `path`.

    The old file is unchanged until the rename. If `path` is a symbolic link, its target is written. Stale temporary files of earlier
    processes are removed first. Raises OSError.
    """
    path = destination_of(path)
    temporary = unforeseen_temporary_of(path)
    clear_stale(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
        with os.fdopen(descriptor, "wb") as file, locked(temporary):
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, parts: Iterable[str]) -> None:
    """Writes UTF-8 text with `atomic_write`. Everyone may read the file. Raises EdgeError."""
    try:
        atomic_write(path, (part.encode() for part in parts), mode=_PUBLIC)
    except OSError as error:
        raise EdgeError(f"{path} cannot be written ({error.strerror}); choose another place") from error


def destination_of(path: Path) -> Path:
    """Returns the file to which `path` leads.

    Raises OSError for a device or pipe, because the rename would replace it: /dev/null would become a regular file.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "it already exists and is not a regular file", str(path))
    return Path(os.path.realpath(path))


GROWING_SUFFIX = ".partial"


class GrowingFile:
    """A file that grows, and whose name ends with GROWING_SUFFIX until its context ends.

    What was written survives the end of the process. After an error or Ctrl-C, the file is kept only if it is `worth_keeping`.
    """

    worth_keeping = False

    def __init__(self, path: Path) -> None:
        """Creates the file. Raises MeasurementError if it cannot be written."""
        try:
            self._path = destination_of(path)
            self._partial = self._path.with_name(self._path.name + GROWING_SUFFIX)
            self._file = self._partial.open("w", encoding="utf-8")
        except OSError as error:
            raise MeasurementError(f"{path} cannot be written ({error.strerror}); choose another place") from error

    def append(self, lines: Iterable[str]) -> None:
        """Writes lines to the disk immediately. Raises MeasurementError if the disk is full."""
        try:
            self._file.writelines(lines)
            self._file.flush()
        except OSError as error:
            raise MeasurementError(f"{self._path} cannot be written ({error.strerror}); free some disk space") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
            if kind is None or self.worth_keeping:
                self._partial.replace(self._path)
            else:
                self._partial.unlink()
