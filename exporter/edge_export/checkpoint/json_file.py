"""Reads JSON objects from untrusted files: the size is checked before reading, the type after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edge_devices.files.limited_read import FileTooLarge, read_at_most
from edge_export.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20


def read_json_object(path: Path, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Returns the JSON object in `path`. Raises CheckpointError if it is missing, larger than `most_bytes`, or not a JSON object."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; download the checkpoint again, with all its files")
    try:
        data = json.loads(read_at_most(path, most_bytes).decode())
    except FileTooLarge as error:
        raise CheckpointError(f"{path} has more than the {most_bytes} bytes such a file may have; check where it came from") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); download the checkpoint again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} contains a JSON {type(data).__name__}, not an object; download the checkpoint again")
    return data


def read_optional_json_object(path: Path, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Like read_json_object, but a missing file is an empty object."""
    return read_json_object(path, most_bytes) if path.is_file() else {}
