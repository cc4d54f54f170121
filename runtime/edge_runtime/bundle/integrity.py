"""Checks that files have the sha256 of the manifest: over all bytes, or by samples of files that passed the full check on this machine.

The fast check trusts no file that was not hashed completely before. It compares the file's metadata (size, times of change, inode) and a
hash of samples with the cached ones, as git and rsync do. Bytes that change on disk between the samples are found by the full check only.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Literal, get_args

from edge_devices.errors import errors_as
from edge_devices.files.limited_read import read_at_most, sha256_of
from edge_devices.files.user_cache import cache_folder, cache_put, read_entries
from edge_runtime.errors import BundleError

# fast: see above; full: every byte, every time; none: only that the files exist and have the right sizes.
CheckMode = Literal["fast", "full", "none"]
CHECK_MODES: tuple[CheckMode, ...] = get_args(CheckMode)
CACHE_NAME = "checked.json"
SAMPLES, SAMPLE_BYTES = 64, 16 << 10
# A file that changed this recently could change again without a change of its time stamps.
_SETTLED_NS = 2_000_000_000


def read_part(path: Path, limit: int, kind: str) -> bytes:
    """Returns the bytes of a file of a bundle. Raises BundleError for one that has more than any such `kind`, or cannot be read."""
    with errors_as(BundleError, f"{path} cannot be read as a {kind}", "copy the bundle again, or export it again"):
        return read_at_most(path, limit)


def is_intact(path: Path, sha256: str, mode: CheckMode) -> bool:
    """Whether the file has this sha256, by this kind of check. Raises OSError if it cannot be read."""
    if mode == "none":
        return True
    memory = cache_folder() / CACHE_NAME
    key = hashlib.sha256(f"{path.resolve()}\0{sha256}".encode("utf-8", "surrogateescape")).hexdigest()
    before = _identity(path)
    if mode == "fast" and read_entries(memory).get(key) == {**before, "samples": samples_of(path)}:
        return True
    if sha256_of(path) != sha256:
        return False
    now = time.time_ns()
    if _identity(path) == before and max(before["changed_ns"], before["modified_ns"]) < now - _SETTLED_NS:
        cache_put(memory, key, {**before, "samples": samples_of(path)})
    return True


def samples_of(path: Path) -> str:
    """Returns the hex sha256 of SAMPLES pieces spread evenly over the file, including its first and last bytes."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _identity(path: Path) -> dict[str, int]:
    status: os.stat_result = path.stat()
    return {
        "bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
        "inode": status.st_ino,
        "device": status.st_dev,
    }
