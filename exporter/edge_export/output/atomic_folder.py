"""A folder that appears whole or not at all: it is filled under a temporary name beside its place, then takes that place."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from edge_devices.files.temp_files import clear_leftovers, held, leftovers_of, temporary_of
from edge_export.errors import ExportError
from edge_export.output.folder_swap import exchange, sync_names
from edge_export.output.replaceable_folder import BUNDLE, FolderKind, check_replaceable

_REPLACED = "replaced"


def check_output(output: Path, force: bool, kind: FolderKind = BUNDLE) -> None:
    """Raises ExportError if `output` may not be written: no parent, or something is there that `force` does not cover.

    What earlier exports left here that were killed is removed first, and a bundle that one was about to replace is put back.
    """
    parent = output.absolute().parent
    try:
        if not parent.is_dir():
            raise ExportError(f"{parent} is no folder, so {output.name} cannot be written there; make it first")
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

    With `force` a bundle that is there is replaced at that moment; without, one that appeared meanwhile is an ExportError.
    """
    output = output.absolute()
    partial = temporary_of(output)
    try:
        partial.mkdir()
        with held(partial):
            yield partial
            _check_place(output, force, kind)
            _move_in(partial, output)
            sync_names(output.parent)
    except OSError as error:
        where = error.filename or partial
        raise ExportError(f"the export to {output} failed ({error.strerror or error}: {where}); check the disk and the sources") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _move_in(partial: Path, output: Path) -> None:
    """What was there is at `partial` afterwards, or gone."""
    if not os.path.lexists(output):
        partial.rename(output)
        return
    if exchange(partial, output):
        return
    replaced = temporary_of(output, _REPLACED)
    with held(output):
        output.rename(replaced)
        try:
            partial.rename(output)
        except BaseException:
            replaced.rename(output)
            raise
    shutil.rmtree(replaced, ignore_errors=True)


def _restore_or_clear(output: Path) -> None:
    """Puts back a bundle that an export was about to replace when it was killed between two renames, and removes what else such left."""
    if not os.path.lexists(output):
        for replaced in leftovers_of(output, _REPLACED):
            if replaced.is_dir():
                replaced.rename(output)
                break
    clear_leftovers(output, _REPLACED)
    clear_leftovers(output)
