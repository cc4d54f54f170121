"""`edge-run forget`: removes the user's texts that edge-run has stored, and packed weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from edge_devices.command_line import PanelCommand
from edge_devices.errors import errors_as
from edge_runtime.backends.kernels import packed_cache
from edge_runtime.cli.terminal import history_file
from edge_runtime.errors import RequestError
from edge_runtime.session.prompt_cache import default_folder, empty

EXAMPLES = """
\b
Examples:
  edge-run forget                                prompts, what was typed in chats, and packed weights
  edge-run forget --prompt-cache /data/prompts   a prompt cache in a folder of its own, alone
"""


@click.command(cls=PanelCommand, epilog=EXAMPLES)
@click.option(
    "--prompt-cache",
    "folder",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Prompt cache to empty.  [default: the one in ~/.cache/edge-mtp, the history of chats, and packed weights]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def forget(folder: Path | None, as_json: bool) -> None:
    """Forget texts: empty the prompt cache, and remove the history of chats. Packed weights go, too.

    Nothing else is removed, whatever else is in the folder. A command that is still running keeps what it computes afterwards.
    """
    emptied = default_folder() if folder is None else folder
    with errors_as(RequestError, f"the prompt cache {emptied} cannot be emptied", "remove the folder"):
        files, size = empty(emptied)
    history = None if folder is not None else _forgotten_history(history_file())
    packed = None if folder is not None else _forgotten_weights(packed_cache.default_folder())
    if as_json:
        record = {"prompt_cache": str(emptied), "files": files, "bytes": size, "chat_history": history, "packed_cache": packed}
        click.echo(json.dumps(record))
        return
    click.echo(f"prompt cache {emptied}: {files} files of {size / 1e6:.1f} MB removed")
    if history is not None:
        click.echo(f"history of chats {history}: removed")
    if packed is not None:
        click.echo(f"packed weights {packed['folder']}: {packed['files']} files of {packed['bytes'] / 1e6:.1f} MB removed")


def _forgotten_weights(folder: Path) -> dict[str, Any]:
    """Removes the packed weights in a folder. Returns the folder, and how many files and bytes were removed."""
    with errors_as(RequestError, f"the packed weights in {folder} cannot be removed", "remove the folder"):
        files, size = packed_cache.empty(folder)
    return {"folder": str(folder), "files": files, "bytes": size}


def _forgotten_history(path: Path) -> str | None:
    """Removes the file of messages typed in chats. Returns its path; None if there was no file."""
    with errors_as(RequestError, f"the history of chats {path} cannot be removed", "remove it yourself"):
        try:
            path.unlink()
        except FileNotFoundError:
            return None
    return str(path)
