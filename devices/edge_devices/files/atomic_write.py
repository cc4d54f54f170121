"""Files that are replaced completely or left as they were, however the process ends, and files that grow while something is measured."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from edge_devices.errors import EdgeError, MeasurementError
from edge_devices.files.temp_files import clear_stale, locked, unforeseen_temporary_of

# Conversations and cached rows are their owner's alone.
_PRIVATE = 0o600
_PUBLIC = 0o644


def atomic_write(path: Path, parts: Iterable[bytes], *, mode: int = _PRIVATE) -> None:
    """Writes the parts to a temporary file beside `path`, then renames it; the old file stays until then. Raises OSError.

    A symbolic link is kept: the file it leads to is written. Stale temporary files of earlier processes are removed first.
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


def write_text(path: Path, parts: Iterable[str], *, parents: bool = False) -> None:
    """Writes UTF-8 text with `atomic_write`, readable by everyone; `parents` makes missing folders. Raises EdgeError."""
    try:
        if parents:
            destination_of(path).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, (part.encode() for part in parts), mode=_PUBLIC)
    except OSError as error:
        raise EdgeError(f"{path} cannot be written ({error.strerror}); choose another place") from error


def destination_of(path: Path) -> Path:
    """Returns the file that `path` leads to.

    Raises OSError for a device or pipe, which the rename would replace: /dev/null would become a regular file.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "it already exists and is not a regular file", str(path))
    return Path(os.path.realpath(path))


PARTIAL = ".partial"


class GrowingFile:
    """A file that is named with PARTIAL until its context ends, so that what is written survives the end of the process.

    An error or Ctrl-C keeps it only where it is `worth_keeping`.
    """

    worth_keeping = False

    def __init__(self, path: Path) -> None:
        """Raises MeasurementError if it cannot be written."""
        try:
            self._path = destination_of(path)
            self._partial = self._path.with_name(self._path.name + PARTIAL)
            self._file = self._partial.open("w", encoding="utf-8")
        except OSError as error:
            raise MeasurementError(f"{path} cannot be written ({error.strerror}); choose another place") from error

    def append(self, lines: Iterable[str]) -> None:
        """Writes lines at once. Raises MeasurementError if the disk is full."""
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
