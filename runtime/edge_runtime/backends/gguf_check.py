"""Looks at a GGUF file before C code does: what our own reader refuses never reaches it."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.errors import BackendError
from edge_runtime.gguf_header import GgufError, GgufHeader, read_gguf_header


def check_gguf(path: Path) -> GgufHeader:
    """Returns the header. Raises BackendError if `path` is no file, or its header is not sound or does not fit its size."""
    if not path.is_file():
        raise BackendError(f"{path} is not a file; check the path or export the bundle again")
    try:
        return read_gguf_header(path)
    except GgufError as error:
        raise BackendError(f"{error}, or export the bundle again") from error
