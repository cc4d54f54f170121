"""The type of the argument that names a bundle: a path which the shell completes to bundles."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from edge_runtime.bundle.manifest import MANIFEST_NAME

# A shell that waits for thousands of folders is worse than one that completes less.
MOST_FOLDERS = 1000


class BundlePath(click.Path):
    """A path as `pathlib.Path`. The shell is offered the bundles that begin with what was typed; where there are none, folders."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Returns the bundles, or leave for the shell to complete folders: click's bash code would drop what stands beside that."""
        parent, _, start = incomplete.rpartition("/")
        folder = parent + "/" if incomplete.startswith("/") or parent else ""
        try:
            names = sorted(path.name for path, _ in zip(Path(folder or ".").iterdir(), range(MOST_FOLDERS), strict=False))
        except OSError:
            names = []
        bundles = [name for name in names if name.startswith(start) and (Path(folder) / name / MANIFEST_NAME).is_file()]
        return [CompletionItem(folder + name) for name in bundles] or [CompletionItem(incomplete, type="dir")]
