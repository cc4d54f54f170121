"""Writing a file whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from edge_devices.errors import DeviceError


def atomic_write(path: Path, lines: Iterable[str]) -> None:
    """Writes lines to a temporary name beside `path` and renames it; raises DeviceError, with nothing left behind, when that fails.

    A link stays one: the file it leads to is written.
    """
    try:
        place = _destination(path)
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceError(f"{path} cannot be written: {error.strerror}") from error
    partial = place.with_name(place.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(line + "\n")
        partial.replace(place)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise DeviceError(f"{path} cannot be written: {error.strerror}") from error


def _destination(path: Path) -> Path:
    """Returns the file that `path` leads to. A device or pipe would be renamed away: /dev/null would be a file from then on."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "it is there already and not a regular file", str(path))
    return Path(os.path.realpath(path))
