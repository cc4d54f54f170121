"""A bundle's way to the hub: what would be uploaded, its model card, and the upload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_devices.errors import errors_as, one_line
from edge_devices.files.limited_read import read_at_most
from edge_export.checkpoint.published.hub_upload import Uploaded, UploadFile, check_repository_name, upload
from edge_export.errors import ExportError
from edge_export.output.atomic_folder import CARD_NAME, MODELFILE_NAME, PRESET_NAME
from edge_export.pipeline.model_card import card, title_of
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import FIGURES_OF, MANIFEST_NAME, Manifest, files_key
from edge_runtime.bundle.signature import SIGNATURE_NAME
from edge_runtime.config.yaml_file import CONFIG_NAME

# What a bundle's folder may hold beside the files of its manifest. What else lies there is the user's own.
_MAX_FIGURES = 1 << 20
_BESIDE = (MANIFEST_NAME, SIGNATURE_NAME, CONFIG_NAME, PRESET_NAME, MODELFILE_NAME)


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A checked bundle with its card: `files` by name in the repository, without the card."""

    folder: Path
    repository: str
    title: str
    files: dict[str, UploadFile]
    card: str

    def tree(self) -> list[tuple[str, int]]:
        """Name and bytes of each file of the repository."""
        sizes = {name: file.bytes for name, file in self.files.items()} | {CARD_NAME: len(self.card.encode())}
        return sorted(sizes.items())

    def upload(self, *, private: bool) -> Uploaded:
        """Uploads it. Raises CheckpointError."""
        return upload(
            self.folder, self.files, (CARD_NAME, self.card), self.repository, private=private, message=f"Publish {self.title} with edge-mtp"
        )


def publication(folder: Path, repository: str, figures: Sequence[Path] = ()) -> Publication:
    """Checks everything that can be checked here: the name, every byte of the bundle, the figures. Raises EdgeError."""
    check_repository_name(repository)
    manifest = open_bundle(folder, check="full").manifest
    if not {"target", "drafter"} <= manifest.sources.keys():
        raise ExportError(f"{folder}: the manifest does not name what target and drafter were made from; export the bundle again")
    files = {entry.path: UploadFile(bytes=entry.bytes, sha256=entry.sha256) for entry in manifest.files}
    for name in _BESIDE:
        if (folder / name).is_symlink():  # one of a folder from elsewhere could name any file of this machine
            raise ExportError(f"{folder / name} is a symbolic link; put the file itself into the folder, or remove the link")
        if (folder / name).is_file():
            files[name] = UploadFile(bytes=(folder / name).stat().st_size)
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
