"""The sha256 of a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

_PIECE = 1 << 20


def sha256_of(path: Path, length: int | None = None, progress: Callable[[int], None] = lambda _bytes: None) -> str:
    """Returns the hex sha256 of a file, or of its first `length` bytes; `progress` gets the bytes of each piece. Raises OSError."""
    digest, left = hashlib.sha256(), length
    with path.open("rb") as file:
        while piece := file.read(_PIECE if left is None else min(_PIECE, left)):
            digest.update(piece)
            progress(len(piece))
            left = None if left is None else left - len(piece)
    return digest.hexdigest()
