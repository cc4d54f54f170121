"""The files of a cache folder: what they take, and which go first where they take too much."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from edge_devices.files.atomic_write import clear_stale_in


@dataclass(frozen=True)
class CacheFiles:
    """Files of one kind in a cache folder, in which other files are left alone.

    `name` fits their names. `any_name`, an expression without groups, fits those whose temporary files killed writers may have left.
    A file's time of change is that of its last use.
    """

    name: re.Pattern[str]
    any_name: str

    def listed(self, folder: Path) -> list[tuple[float, int, Path]]:
        """Returns (last use, bytes, path) of the files in a folder, the least recently used first; none if it cannot be read."""
        files = []
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if self.name.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        state = entry.stat(follow_symlinks=False)
                        files.append((state.st_mtime, state.st_size, Path(entry.path)))
        return sorted(files)

    def shrink(self, folder: Path, limit: int) -> tuple[int, int]:
        """Removes the least recently used files until at most `limit` bytes are left; returns how many files and bytes went.

        A process that has mapped one keeps it. Raises OSError for one that cannot be removed.
        """
        held, files, size = self.listed(folder), 0, 0
        total = sum(bytes_ for _, bytes_, _ in held)
        for _, bytes_, path in held:
            if total - size <= limit:
                break
            path.unlink(missing_ok=True)
            files, size = files + 1, size + bytes_
        return files, size

    def empty(self, folder: Path) -> tuple[int, int]:
        """Removes all files, and what killed writers left; returns as `shrink` does. Raises OSError if it is no folder."""
        with contextlib.suppress(FileNotFoundError):
            os.scandir(folder).close()  # one that cannot be read is not empty
        clear_stale_in(folder, self.any_name)
        return self.shrink(folder, 0)
