"""The runtime's reader of GGUF headers, with the exporter's kind of error."""

from __future__ import annotations

from pathlib import Path

from edge_export.errors import CheckpointError
from edge_runtime.bundle import gguf_header
from edge_runtime.bundle.gguf_header import GgufHeader


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads keys and tensor infos. Raises CheckpointError if it is no GGUF file of a known version, or is truncated or corrupt."""
    try:
        return gguf_header.read_gguf_header(path)
    except gguf_header.GgufError as error:
        raise CheckpointError(str(error)) from error
