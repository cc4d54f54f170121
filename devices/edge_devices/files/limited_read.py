"""Reads files that people name: no more of them than such a file has, whatever they are."""

from __future__ import annotations

import errno
from pathlib import Path

_PIECE = 1 << 20


class TooLong(OSError):
    """There is more of a file than it may have."""

    def __init__(self, says: str) -> None:
        super().__init__(errno.EFBIG, says)

    def __str__(self) -> str:
        return str(self.strerror)


def read_at_most(path: Path, most: int) -> bytes:
    """Returns a file's bytes. A pipe is read to its end, so that `<(command)` can be given; no size is asked for, which only files have.

    Raises OSError for what cannot be read, and for more than `most` bytes.
    """
    pieces, left = [], most
    try:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(min(_PIECE, left + 1)):
                if len(piece) > left:
                    raise TooLong(f"it has more than {most} bytes")
                pieces.append(piece)
                left -= len(piece)
    except ValueError as error:  # a path with a null character
        raise OSError(errno.EINVAL, str(error)) from error
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
