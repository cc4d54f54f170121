"""The trained pair that is shipped with the package: a small Gemma 4 target and its MTP drafter, as Hugging Face folders."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from edge_export.errors import ExportError

_FOLDER = "reference_pair"


def reference_pair() -> tuple[Path, Path]:
    """Returns the folders of the shipped target and drafter. Raises ExportError if the package was installed without them."""
    # The package is never run from an archive (its model files are read by path), so a resource is a real folder.
    folder = Path(str(files("edge_export"))) / _FOLDER
    target, drafter = folder / "target", folder / "drafter"
    for part in (target, drafter):
        if not (part / "config.json").is_file():
            raise ExportError(f"the reference pair is not installed: {part} has no config.json; install edge-mtp again")
    return target, drafter
