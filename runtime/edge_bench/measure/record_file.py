"""A growing file of records that is complete after every line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from edge_bench.measure.records import Record, line_of
from edge_devices.files.atomic_write import destination_of
from edge_runtime.errors import RequestError

PARTIAL = ".partial"


class RecordFile:
    """A file with one line per record, named with PARTIAL until it is closed, so that records survive the end of the process.

    `path` None writes nothing. Leaving the context renames the file, also after an error or Ctrl-C, if it has more than the header.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises RequestError if it cannot be written."""
        self._path = path
        self._file: TextIO | None = None
        self._lines = 0
        if path is not None:
            try:
                self._path = path = destination_of(path)
                self._file = self._partial(path).open("w", encoding="utf-8")
            except OSError as error:
                raise RequestError(f"{path} cannot be written ({error.strerror}); choose another place") from error

    def add(self, record: Record) -> None:
        """Appends a record. Raises RequestError if the disk is full."""
        if self._file is None or self._path is None:
            return
        try:
            self._file.write(line_of(record))
            self._file.flush()
        except OSError as error:
            raise RequestError(f"{self._path} cannot be written ({error.strerror}); free some disk space") from error
        self._lines += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is None or self._path is None:
            return
        with contextlib.suppress(OSError):
            self._file.close()
            partial = self._partial(self._path)
            if self._lines > 1:
                partial.replace(self._path)
            else:
                partial.unlink()

    @staticmethod
    def _partial(path: Path) -> Path:
        return path.with_name(path.name + PARTIAL)
