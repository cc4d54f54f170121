"""A folder beside an export's output with the state of long steps, so that a repeated call continues where the last one stopped."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from edge_export.errors import ExportError

_LIST = "state.json"


def prepare_state(folder: Path, facts: object, sources: Sequence[Path], what: str) -> None:
    """Makes the folder, or takes the one of an earlier call with the same facts and weights in the folders `sources`.

    Raises ExportError if the folder is no state of `what`, or cannot be written.
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
    try:
        folder.mkdir()
        (folder / _LIST).write_text(json.dumps({"request": digest}) + "\n", encoding="utf-8")
    except OSError as error:
        raise ExportError(f"{folder} cannot be written ({error.strerror}); choose another place for the bundle") from error
