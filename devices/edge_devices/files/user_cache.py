"""The user's cache folder, and JSON files of entries in it that are measured once per machine."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import stat
from pathlib import Path

from edge_devices.errors import EdgeError
from edge_devices.files.atomic_write import atomic_write, locked

CACHE_VARIABLE = "EDGE_MTP_CACHE"
MAX_CACHE_BYTES = 1 << 20
NOT_OURS = "it belongs to another user or others may write it, so it is not used"
# Entries kept in a file, the newest.
MAX_ENTRIES = 200


def cache_folder() -> Path:
    """Returns $EDGE_MTP_CACHE, or ~/.cache/edge-mtp. Raises EdgeError for a user without a home folder, as in some containers."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder:
        return Path(folder)
    try:
        return Path.home() / ".cache" / "edge-mtp"
    except RuntimeError:
        raise EdgeError(f"this user has no home folder to keep measurements in; set {CACHE_VARIABLE} to a folder") from None


def entry_key(facts: object) -> str:
    """Returns the key of an entry: the SHA-256 of the facts that it depends on, which must fit into JSON."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def only_ours(status: os.stat_result) -> bool:
    """Whether nobody else may write a file: it is this user's, and closed to others."""
    return os.name != "posix" or (is_own(status) and not status.st_mode & 0o022)


def is_own(status: os.stat_result) -> bool:
    """Whether a file or folder is this user's."""
    return os.name != "posix" or status.st_uid == os.geteuid()


def read_entries(path: Path) -> dict[str, object]:
    """Returns the entries of a cache file by key; none if it is missing or damaged, or if others may have written it."""
    try:
        status = path.stat()
        if status.st_size > MAX_CACHE_BYTES or not (stat.S_ISREG(status.st_mode) and only_ours(status)):
            return {}
        return dict(_parsed(path, (status.st_ino, status.st_size, status.st_mtime_ns)))
    except (OSError, ValueError, RecursionError):
        return {}


@functools.lru_cache(maxsize=2)
def _parsed(path: Path, _identity: tuple[int, int, int]) -> dict[str, object]:
    """The entries of a file that did not change: a start asks ten times, and every change is another file put in its place."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return data if isinstance(data, dict) else {}


def cache_put(path: Path, key: str, value: object) -> OSError | None:
    """Adds an entry as the newest, and drops the oldest above the limits. Entries that other processes add meanwhile stay.

    A link in the file's place is replaced: what it leads to is no cache. Another user's file stays, as root's first use would empty it.
    Returns the error if it cannot be written or will not be read (some file systems show owners and modes of their own), which only costs
    measuring it again.
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
