"""What `--force` may replace: a folder that an export wrote and to which no file was added since."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_export.checkpoint.json_file import read_json_object
from edge_export.errors import CheckpointError, ExportError
from edge_runtime.bundle.manifest import MANIFEST_NAME
from edge_runtime.bundle.signature import SIGNATURE_NAME
from edge_runtime.config.yaml_file import CONFIG_NAME

_MAX_LIST_BYTES = 64 << 20
# Python's compiled files, beside their source.
_COMPILED = "__pycache__/*.pyc"


@dataclass(frozen=True, kw_only=True)
class FolderKind:
    """A kind of folder: `list_name` is the file that lists the others, `is_ours` decides by its content whether an export wrote it.

    `unlisted` are files of an export that are not in the list.
    """

    name: str
    list_name: str
    unlisted: frozenset[str]
    is_ours: Callable[[dict[str, Any]], bool]


BUNDLE = FolderKind(
    name="bundle",
    list_name=MANIFEST_NAME,
    unlisted=frozenset((MANIFEST_NAME, SIGNATURE_NAME, CONFIG_NAME)),
    is_ours=lambda manifest: type(manifest.get("schema_version")) is int and str(manifest.get("created_by")).startswith("edge-mtp "),
)


def check_replaceable(folder: Path, kind: FolderKind) -> None:
    """Raises ExportError unless `folder` is empty, or one of this kind that contains only the files in its list."""
    if folder.is_symlink() or not folder.is_dir():
        raise _refusal(folder, kind)
    try:
        found = list(_files(folder))
    except OSError as error:
        raise ExportError(
            f"{error.filename or folder} cannot be read ({error.strerror}); remove it yourself or choose another name"
        ) from error
    if not found:
        return
    ours = _listed(folder, kind) | kind.unlisted
    for path in found:
        if path not in ours and not Path(path).match(_COMPILED):
            raise ExportError(
                f"{folder / path} is no file of the {kind.name} {folder}, which --force would remove with it;"
                " move it away or choose another name"
            )


def check_outside(output: Path, sources: list[Path]) -> None:
    """Raises ExportError if one of the sources lies in the folder that is to be replaced."""
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
