"""A folder that appears complete or not at all.

It is filled under a temporary name beside its place. Then its files are written to the disk, and it takes its place: in one step where
the system can exchange two names.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from edge_devices.files.temp_files import clear_stale, locked, stale_of, temporary_of
from edge_export.errors import ExportError
from edge_export.output.replaceable_folder import BUNDLE, FolderKind, check_replaceable

_REPLACED = "replaced"
# linux/fs.h, linux/fcntl.h.
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# What renameat2 returns where the kernel or the file system has no exchange.
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
# Python's audit hooks get this event, with the folder's path, just before a new folder takes its place (scripts/checks/faults.py).
REPLACE_EVENT = "edge_export.replace_folder"


def check_output(output: Path, force: bool, kind: FolderKind = BUNDLE) -> None:
    """Raises ExportError if `output` cannot be written: it has no parent folder, or it exists and `force` does not cover it.

    First repairs what a killed export left here: removes its temporary folders, and puts back the bundle it was replacing.
    """
    parent = output.absolute().parent
    try:
        if not parent.is_dir():
            raise ExportError(f"{parent} is not a folder, so {output.name} cannot be written there; create it first")
        if not os.access(parent, os.W_OK):
            raise ExportError(f"{parent} cannot be written; choose another place")
        _restore_or_clear(output.absolute())
        _check_place(output, force, kind)
    except OSError as error:
        raise ExportError(f"{error.filename or output} cannot be written ({error.strerror or error}); choose another place") from error


def _check_place(output: Path, force: bool, kind: FolderKind) -> None:
    if not os.path.lexists(output):
        return
    if not force:
        raise ExportError(f"{output} exists already; choose another name, or replace it with --force")
    check_replaceable(output, kind)


@contextlib.contextmanager
def partial_folder(output: Path, force: bool, kind: FolderKind = BUNDLE) -> Iterator[Path]:
    """Yields an empty folder beside `output`; on success it becomes `output`, otherwise it is removed.

    With `force` an existing bundle is replaced at that moment. Without, raises ExportError if one appeared in the meantime.
    """
    output = output.absolute()
    partial = temporary_of(output)
    try:
        partial.mkdir()
        with locked(partial):
            yield partial
            _check_place(output, force, kind)
            sys.audit(REPLACE_EVENT, str(output))
            _move_in(partial, output)
            sync_names(output.parent)
    except OSError as error:
        where = error.filename or partial
        raise ExportError(f"the export to {output} failed ({error.strerror or error}: {where}); check the disk and the sources") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move_in(partial: Path, output: Path) -> None:
    """Renames `partial` to `output`; the old folder is removed, or is at `partial` afterwards."""
    if not os.path.lexists(output):
        partial.rename(output)
        return
    if exchange(partial, output):
        return
    replaced = temporary_of(output, _REPLACED)
    with locked(output):
        output.rename(replaced)
        try:
            partial.rename(output)
        except BaseException:
            replaced.rename(output)
            raise
    shutil.rmtree(replaced, ignore_errors=True)


def _restore_or_clear(output: Path) -> None:
    """Puts back a bundle whose replacement was killed between two renames, and removes all other temporary folders."""
    if not os.path.lexists(output):
        for replaced in stale_of(output, _REPLACED):
            if replaced.is_dir():
                replaced.rename(output)
                break
    clear_stale(output, _REPLACED)
    clear_stale(output)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two folders in one step; both names exist at every moment.

    Returns False, and does nothing, where that is not supported: outside Linux, with a C library without renameat2 and on some file
    systems. Raises OSError for every other failure.
    """
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(other))


def sync_files(folder: Path) -> None:
    """Flushes the files of a folder to the disk. Raises OSError: some file systems report only now that they are full."""
    for path in sorted(folder.iterdir()):
        _sync(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    sync_names(folder)


def sync_names(folder: Path) -> None:
    """Flushes a folder's list of names to the disk; does nothing on Windows, which cannot. Raises OSError."""
    if os.name != "nt":
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
