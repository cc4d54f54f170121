"""Reads a file of a bundle whole, where it is no longer than such a file can be."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.errors import BundleError


def read_part(path: Path, most: int, kind: str) -> bytes:
    """Returns the bytes of a `kind` of file that has at most `most`. Raises BundleError for a longer one, or one that cannot be read.

    Unlike `bounded.read_at_most`, which serves pipes too, it never holds a file twice.
    """
    try:
        size = path.stat().st_size
        if size > most:
            raise BundleError(f"{path} has {size} bytes, more than any {kind}; copy the bundle again, or export it again")
        return path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror or error}); copy the bundle again") from error
