"""A text file that grows while something is measured, and is complete after every write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from edge_devices.errors import MeasurementError
from edge_devices.files.atomic_write import destination_of

PARTIAL = ".partial"


class GrowingFile:
    """A file that is named with PARTIAL until it is closed, so that what is written survives the end of the process."""

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

    def close(self, *, keep: bool) -> None:
        """Gives the file its name, or removes it."""
        with contextlib.suppress(OSError):
            self._file.close()
            if keep:
                self._partial.replace(self._path)
            else:
                self._partial.unlink()
