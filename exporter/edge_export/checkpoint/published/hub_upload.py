"""A folder's way to a repository of the Hugging Face hub, with the hub's own client, which goes on after a cut connection."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edge_export.checkpoint.published.hub_client import hub_errors, upload_files
from edge_export.errors import CheckpointError

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class UploadFile:
    """A file of the folder with its size, and its sha256 where it is known."""

    bytes: int
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """The repository's address, whether only its owner can read it, and what it holds beside the uploaded files."""

    address: str
    private: bool
    others: tuple[str, ...]


def check_repository_name(name: str) -> None:
    """Raises CheckpointError for anything but OWNER/NAME."""
    if not _REPOSITORY.fullmatch(name):
        raise CheckpointError(f"{name!r} is no OWNER/NAME of a hub repository, such as me/gemma-4-E2B-it-pair; give that alone")


def upload(folder: Path, files: dict[str, UploadFile], card: tuple[str, str], repository: str, *, private: bool, message: str) -> Uploaded:
    """Uploads files of a folder, then the text `card` (name, contents), and compares the repository's listing with them.

    The repository is made if there is none; `private` counts for a new one only. Files that are there already are not sent again.
    Raises CheckpointError, which says that the command may be repeated, for whatever the hub refuses or answers wrongly.
    """
    check_repository_name(repository)
    with hub_errors(
        f"huggingface_hub, which would publish {repository}, is not installed",
        f"{repository} could not be published on the Hugging Face hub",
        "check the token, the name and the network and repeat the command, which goes on where it stopped",
    ):
        name, text = card
        there = upload_files(folder, files, {name: text}, repository, private=private, message=message)
    _compare(repository, files | {name: UploadFile(bytes=len(text.encode()))}, there.files)
    others = sorted(there.files.keys() - files.keys() - {name, ".gitattributes"})
    return Uploaded(address=there.address, private=there.private, others=tuple(others))


def _compare(repository: str, files: dict[str, UploadFile], there: dict[str, tuple[int | None, str | None]]) -> None:
    """Raises CheckpointError if the hub lacks a file, as it may ignore some, or holds other contents under its name."""
    for name, file in files.items():
        size, sha256 = there.get(name, (None, None))
        if size != file.bytes or (sha256 and file.sha256 and sha256 != file.sha256):
            state = "lacks" if name not in there else "holds other contents under the name of"
            raise CheckpointError(f"the hub took the upload, but {repository} {state} {name}; look at its .gitignore and publish again")
