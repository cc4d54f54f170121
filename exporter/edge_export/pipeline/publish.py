"""Uploads a bundle to the hub: the files, the model card, and the upload itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_devices.errors import errors_as, one_line
from edge_devices.files.limited_read import read_at_most
from edge_export.checkpoint.published.hub_client import Repository, hub_errors, upload_files
from edge_export.errors import CheckpointError, ExportError
from edge_export.output.atomic_folder import CARD_NAME, MODELFILE_NAME, PRESET_NAME
from edge_export.pipeline.model_card import card, title_of
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import FIGURES_OF, MANIFEST_NAME, Manifest, files_key
from edge_runtime.bundle.signature import SIGNATURE_NAME
from edge_runtime.config.yaml_file import CONFIG_NAME

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# What a bundle's folder may hold beside the files of its manifest. What else lies there is the user's own.
_MAX_FIGURES = 1 << 20
_BESIDE = (MANIFEST_NAME, SIGNATURE_NAME, CONFIG_NAME, PRESET_NAME, MODELFILE_NAME)


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A checked bundle with its card: `files` are bytes and, where known, sha256 by name in the repository, without the card."""

    folder: Path
    repository: str
    title: str
    files: dict[str, tuple[int, str | None]]
    card: str

    def tree(self) -> list[tuple[str, int]]:
        """Name and bytes of each file of the repository."""
        return sorted((name, size) for name, (size, _) in self._contents().items())

    def upload(self, *, private: bool) -> tuple[Repository, list[str]]:
        """Uploads it and compares the repository's listing with it; returns the repository, and what it holds beside these files.

        The repository is made if there is none; `private` counts for a new one only. Files that are there already are not sent again.
        Raises CheckpointError, which says that the command may be repeated, for whatever the hub refuses or answers wrongly.
        """
        with hub_errors(
            f"huggingface_hub, which would publish {self.repository}, is not installed",
            f"{self.repository} could not be published on the Hugging Face hub",
            "check the token, the name and the network and repeat the command, which goes on where it stopped",
        ):
            message = f"Publish {self.title} with edge-mtp"
            there = upload_files(self.folder, self.files, {CARD_NAME: self.card}, self.repository, private=private, message=message)
        for name, (size, sha256) in self._contents().items():  # the hub may ignore a file
            stored, digest = there.files.get(name, (None, None))
            if size != stored or (sha256 and digest and sha256 != digest):
                state = "lacks" if name not in there.files else "holds other contents under the name of"
                raise CheckpointError(
                    f"the hub took the upload, but {self.repository} {state} {name}; look at its .gitignore and publish again"
                )
        return there, sorted(there.files.keys() - self.files.keys() - {CARD_NAME, ".gitattributes"})

    def _contents(self) -> dict[str, tuple[int, str | None]]:
        return self.files | {CARD_NAME: (len(self.card.encode()), None)}


def publication(folder: Path, repository: str, figures: Sequence[Path] = ()) -> Publication:
    """Checks everything that can be checked here: the name, every byte of the bundle, the figures. Raises EdgeError."""
    if not _REPOSITORY.fullmatch(repository):
        raise CheckpointError(f"{repository!r} is no OWNER/NAME of a hub repository, such as me/gemma-4-E2B-it-pair; give that alone")
    manifest = open_bundle(folder, check="full").manifest
    if not {"target", "drafter"} <= manifest.sources.keys():
        raise ExportError(f"{folder}: the manifest does not name what target and drafter were made from; export the bundle again")
    files: dict[str, tuple[int, str | None]] = {entry.path: (entry.bytes, entry.sha256) for entry in manifest.files}
    for name in _BESIDE:
        if (folder / name).is_symlink():  # one of a folder from elsewhere could name any file of this machine
            raise ExportError(f"{folder / name} is a symbolic link; put the file itself into the folder, or remove the link")
        if (folder / name).is_file():
            files[name] = (folder / name).stat().st_size, None
    text = card(manifest, [_figures(path, manifest) for path in figures], repository)
    return Publication(folder=folder, repository=repository, title=one_line(title_of(manifest)), files=files, card=text)


def _figures(path: Path, manifest: Manifest) -> str:
    """Returns a section of figures. Raises ExportError for another file, and for figures of another bundle."""
    with errors_as(ExportError, f"{path} cannot be read", "give a file that edge-bench run BUNDLE --markdown wrote", OSError, ValueError):
        text = read_at_most(path, _MAX_FIGURES).decode()
    first, _, section = text.partition("\n")
    if first != FIGURES_OF.format(files_key(manifest.files)):
        raise ExportError(f"{path} does not begin as figures of this bundle's files do; edge-bench run BUNDLE --markdown writes them")
    return section
