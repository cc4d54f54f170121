"""The user's cache folder: JSON files with entries that are measured once per machine, and folders from which old files are removed."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from edge_devices.errors import EdgeError
from edge_devices.files.atomic_write import atomic_write, clear_stale_in, locked

CACHE_VARIABLE = "EDGE_MTP_CACHE"
MAX_CACHE_BYTES = 1 << 20
NOT_OURS = "it belongs to another user or others may write it, so it is not used"
# How many of the newest entries are kept in a file.
MAX_ENTRIES = 200


def cache_folder() -> Path:
    """Returns $EDGE_MTP_CACHE, or ~/.cache/edge-mtp. Raises EdgeError if the user has no home folder, as in some containers."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder:
        return Path(folder)
    try:
        return Path.home() / ".cache" / "edge-mtp"
    except RuntimeError:
        raise EdgeError(f"this user has no home folder to keep measurements in; set {CACHE_VARIABLE} to a folder") from None


def entry_key(facts: object) -> str:
    """Returns the key of an entry: the SHA-256 of the facts on which it depends, which must be JSON values."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def only_ours(status: os.stat_result) -> bool:
    """Whether a file belongs to this user and nobody else may write it."""
    return os.name != "posix" or (is_own(status) and not status.st_mode & 0o022)


def is_own(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user."""
    return os.name != "posix" or status.st_uid == os.geteuid()


def read_entries(path: Path) -> dict[str, object]:
    """Returns the entries of a cache file by key; none if it is missing or damaged, or if other users may have written it."""
    try:
        status = path.stat()
        if status.st_size > MAX_CACHE_BYTES or not (stat.S_ISREG(status.st_mode) and only_ours(status)):
            return {}
        return dict(_parsed(path, (status.st_ino, status.st_size, status.st_mtime_ns)))
    except (OSError, ValueError, RecursionError):
        return {}


@functools.lru_cache(maxsize=2)
def _parsed(path: Path, _identity: tuple[int, int, int]) -> dict[str, object]:
    """Parses a file's entries, cached while the file does not change. A start needs them ten times, and each change replaces the file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return data if isinstance(data, dict) else {}


def cache_put(path: Path, key: str, value: object) -> OSError | None:
    """Adds an entry as the newest, and removes the oldest ones above the limits.

    Entries that other processes add at the same time are kept. A link in place of the file is replaced, because its target is not a cache.
    Another user's file is left alone, because otherwise the first use by root would empty it. Returns the error if the file cannot be
    written, or would not be read because the file system reports other owners or modes. Then the only cost is that the entry is measured
    again.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.parent.resolve()):
            entries = read_entries(path)
            entries.pop(key, None)
            if path.is_symlink():
                path.unlink()
            if path.exists() and not is_own(path.stat()):
                raise PermissionError(errno.EPERM, NOT_OURS)
            atomic_write(path, [_newest({**entries, key: value})])
            if not only_ours(path.stat()):
                raise PermissionError(errno.EPERM, NOT_OURS)
    except OSError as error:
        return error
    return None


def _newest(entries: dict[str, object]) -> bytes:
    """Returns the JSON of as many of the newest entries as the limits of a file allow."""
    kept = list(entries.items())[-MAX_ENTRIES:]
    while len(data := json.dumps(dict(kept), indent=1).encode()) > MAX_CACHE_BYTES and len(kept) > 1:
        kept = kept[len(kept) // 4 + 1 :]
    return data


@dataclass(frozen=True)
class CacheFiles:
    """The files of one kind in a cache folder.

    Other files in the folder are left alone. `name` matches the names of this kind. `any_name`, a pattern without groups, matches the names
    whose temporary files killed writers may have left. A file's modification time is the time of its last use.
    """

    name: re.Pattern[str]
    any_name: str

    def listed(self, folder: Path) -> list[tuple[float, int, Path]]:
        """Returns (last use, bytes, path) of the files in a folder, least recently used first; none if it cannot be read."""
        files = []
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if self.name.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        state = entry.stat(follow_symlinks=False)
                        files.append((state.st_mtime, state.st_size, Path(entry.path)))
        return sorted(files)

    def shrink(self, folder: Path, limit: int) -> tuple[int, int]:
        """Removes the least recently used files until at most `limit` bytes are left.

        Returns how many files and bytes were removed. A process that has mapped a file can go on using it. Raises OSError if a file cannot
        be removed.
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
        """Removes all files, and temporary files of killed writers. Returns as `shrink` does. Raises OSError if this is not a folder."""
        with contextlib.suppress(FileNotFoundError):
            os.scandir(folder).close()  # raises an error if the folder cannot be read, as it then need not be empty
        clear_stale_in(folder, self.any_name)
        return self.shrink(folder, 0)
