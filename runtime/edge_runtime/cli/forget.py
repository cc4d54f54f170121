"""`edge-run forget`: removes what edge-run keeps of a user's texts."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edge_devices.command_line import PanelCommand
from edge_devices.errors import errors_as
from edge_runtime.drafting.draft_store import forget_store
from edge_runtime.errors import RequestError
from edge_runtime.session.saved.prompt_cache import default_folder, shrink

EXAMPLES = """
\b
Examples:
  edge-run forget                                the prompt cache
  edge-run forget --prompt-cache /data/prompts   one in a folder of its own
  edge-run forget --draft-store notes.drafts     the prompt cache and a draft store
"""


@click.command(cls=PanelCommand, epilog=EXAMPLES)
@click.option(
    "--prompt-cache",
    "folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Prompt cache to empty.  [default: the one in ~/.cache/edge-mtp]",
)
@click.option("--draft-store", "store", type=click.Path(path_type=Path), metavar="FILE", help="Remove this draft store too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def forget(folder: Path | None, store: Path | None, as_json: bool) -> None:
    """Forget texts: empty the prompt cache, and remove a draft store.

    Nothing else is removed, whatever else is in the folder. A command that runs meanwhile keeps what it computes later.
    """
    emptied = default_folder() if folder is None else folder
    texts = None if store is None else forget_store(store)
    with errors_as(RequestError, f"the prompt cache {emptied} cannot be emptied", "remove the folder"):
        files, size = shrink(emptied, 0)
    if as_json:
        click.echo(json.dumps({"prompt_cache": str(emptied), "files": files, "bytes": size, "texts": texts}))
        return
    click.echo(f"prompt cache {emptied}: {files} files of {size / 1e6:.1f} MB removed")
    if texts is not None:
        click.echo(f"draft store {store}: {texts} texts removed")
