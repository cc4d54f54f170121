"""Writing a file whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from edge_devices.errors import DeviceError


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Writes lines to a temporary name beside `path` and renames it; raises DeviceError, with nothing left behind, when that fails."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(line + "\n")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise DeviceError(f"{path} cannot be written: {error.strerror}.") from error
