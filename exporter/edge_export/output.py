"""The folders that an export writes: its output, and the state of long steps. Checks what `--force` may replace.

The output folder appears complete or not at all. It is filled under a temporary name beside its final one. Then its files are flushed to
the disk, and the folder is renamed; where the system can exchange two names, an old folder is replaced in one step. Only a folder that an
export wrote, and to which no file was added since, may be replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_devices.errors import errors_as
from edge_devices.files.atomic_write import clear_stale, locked, stale_of, temporary_of
from edge_export.checkpoint.safetensors import read_json_object
from edge_export.errors import CheckpointError, ExportError
from edge_runtime.bundle.bundle import SIGNATURE_NAME
from edge_runtime.bundle.manifest import MANIFEST_NAME
from edge_runtime.config.settings import CONFIG_NAME

_LIST = "state.json"


def prepare_state(folder: Path, facts: object, sources: Sequence[Path], what: str) -> None:
    """Creates the folder, or keeps that of an earlier call with the same facts and the same weights in the folders `sources`.

    The state of a call with other facts or weights is deleted. Raises ExportError if the folder is not a state of `what`, or cannot be
    written.
    """
    files = [path for source in sources for path in sorted(source.glob("*.safetensors"))]
    stated = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((facts, stated)).encode()).hexdigest()
    if folder.exists():
        try:
            previous = json.loads((folder / _LIST).read_text(encoding="utf-8"))["request"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ExportError(f"{folder} is in the way and no state of {what}; move it away") from error
        if previous == digest:
            return
        shutil.rmtree(folder)
    with errors_as(ExportError, f"{folder} cannot be written", "choose another place for the bundle"):
        folder.mkdir()
        (folder / _LIST).write_text(json.dumps({"request": digest}) + "\n", encoding="utf-8")


_REPLACED = "replaced"
# Constants of linux/fs.h and linux/fcntl.h.
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
# The errors of renameat2 if the kernel or the file system cannot exchange names.
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
# An event for Python's audit hooks, with the folder's path, just before a new folder is put in place. scripts/checks/faults.py uses it.
REPLACE_EVENT = "edge_export.replace_folder"
# Files in a bundle's folder for other programs and for people: presets for llama.cpp's server and Ollama, and the model card.
PRESET_NAME, MODELFILE_NAME, CARD_NAME = "models.ini", "Modelfile", "README.md"
COMPANIONS = (PRESET_NAME, MODELFILE_NAME, CARD_NAME)
_MAX_LIST_BYTES = 64 << 20
# Python's compiled files, which it writes into a folder beside the source.
_COMPILED = "__pycache__/*.pyc"


@dataclass(frozen=True, kw_only=True)
class FolderKind:
    """A kind of output folder.

    `list_name` is the file that lists the others. `is_ours` decides by that file's content whether an export wrote the folder. `unlisted`
    are files of an export that are not in the list.
    """

    name: str
    list_name: str
    unlisted: frozenset[str]
    is_ours: Callable[[dict[str, Any]], bool]


BUNDLE = FolderKind(
    name="bundle",
    list_name=MANIFEST_NAME,
    unlisted=frozenset((MANIFEST_NAME, SIGNATURE_NAME, CONFIG_NAME, *COMPANIONS)),
    is_ours=lambda manifest: type(manifest.get("schema_version")) is int and str(manifest.get("created_by")).startswith("edge-mtp "),
)


@dataclass(frozen=True, kw_only=True)
class BundlePart:
    """A written file, with its role and format as in the manifest, and its quantization if it holds weights."""

    role: str
    path: Path
    format: str
    quantization: str | None = None


def check_output(output: Path, force: bool, kind: FolderKind = BUNDLE) -> None:
    """Raises ExportError if `output` cannot be written: its parent folder is missing, or it exists and may not be replaced.

    It first repairs what a killed export left behind: it removes temporary folders, and puts back a bundle that was being replaced.
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
        raise ExportError(f"{output} exists already; choose another name with --output, or replace a bundle with --force")
    check_replaceable(output, kind)


@contextlib.contextmanager
def partial_folder(output: Path, force: bool, kind: FolderKind = BUNDLE) -> Iterator[Path]:
    """Yields an empty folder beside `output`. On success it becomes `output`; otherwise it is removed.

    With `force`, an existing bundle is replaced at that moment. Without it, raises ExportError if `output` appeared in the meantime.
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
    """Renames `partial` to `output`. An old folder at `output` is removed, or gets the name `partial`."""
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
    """Puts back a bundle if its replacement was killed between two renames, and removes all other temporary folders."""
    if not os.path.lexists(output):
        for replaced in stale_of(output, _REPLACED):
            if replaced.is_dir():
                replaced.rename(output)
                break
    clear_stale(output, _REPLACED)
    clear_stale(output)


def exchange(first: Path, second: Path) -> bool:
    """Exchanges the names of two folders atomically, so that both names always exist.

    Does nothing and returns False where that is not supported: outside Linux, with a C library without renameat2, and on some file systems.
    Raises OSError for any other failure.
    """
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(second))


def sync_files(folder: Path) -> None:
    """Flushes the files of a folder to the disk. Raises OSError; some file systems only now report that they are full."""
    for path in sorted(folder.iterdir()):
        _sync(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    sync_names(folder)


def sync_names(folder: Path) -> None:
    """Flushes a folder's list of names to the disk. It does nothing on Windows, where that is impossible. Raises OSError."""
    if os.name != "nt":
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_replaceable(folder: Path, kind: FolderKind) -> None:
    """Raises ExportError unless `folder` is empty, or is of this kind and contains no other files than an export's."""
    if folder.is_symlink() or not folder.is_dir():
        raise _refusal(folder, kind)
    try:
        files = list(_files(folder))
    except OSError as error:
        raise ExportError(
            f"{error.filename or folder} cannot be read ({error.strerror}); remove it yourself or choose another name"
        ) from error
    if not files:
        return
    ours = _listed(folder, kind) | kind.unlisted
    for path in files:
        if path not in ours and not Path(path).match(_COMPILED):
            raise ExportError(
                f"{folder / path} is no file of the {kind.name} {folder}, which --force would remove with it;"
                " move it away or choose another name"
            )


def check_outside(output: Path, sources: list[Path]) -> None:
    """Raises ExportError if one of the sources is inside the folder that would be replaced."""
    for source in sources:
        if source.resolve().is_relative_to(output.resolve()):
            raise ExportError(f"{source} lies in {output}, which --force would replace; choose another name for the output")


def _files(folder: Path) -> Iterator[str]:
    """Yields all files and links below `folder`, as relative paths with slashes. Raises OSError."""

    def fail(error: OSError) -> None:
        raise error

    for place, folders, files in os.walk(folder, onerror=fail):
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in files + links:
            yield (Path(place) / name).relative_to(folder).as_posix()


def _listed(folder: Path, kind: FolderKind) -> set[str]:
    try:
        data = read_json_object(folder / kind.list_name, _MAX_LIST_BYTES)
    except CheckpointError as error:
        raise _refusal(folder, kind) from error
    files = data.get("files")
    if not kind.is_ours(data) or not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        raise _refusal(folder, kind)
    return {str(file.get("path")) for file in files}


def _refusal(folder: Path, kind: FolderKind) -> ExportError:
    return ExportError(f"{folder} is not a {kind.name}, so --force does not replace it; remove it yourself or choose another name")
