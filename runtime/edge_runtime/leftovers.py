"""Temporary files and folders that carry the number of their process, so that the next start knows which of them a killed one left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

PARTIAL = "partial"


def temporary_of(path: Path, kind: str = PARTIAL) -> Path:
    """Returns the name beside `path` under which this process makes it."""
    return path.parent / f".{path.name}.{kind}-{os.getpid()}"


def leftovers_of(path: Path, kind: str = PARTIAL) -> Iterator[Path]:
    """Yields what processes that run no more left of making `path`."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.{kind}-(\d+)")
    with contextlib.suppress(OSError):
        for found in sorted(path.parent.iterdir()):
            match = pattern.fullmatch(found.name)
            if match is not None and not found.is_symlink() and not is_running(int(match[1])):
                yield found


def clear_leftovers(path: Path, kind: str = PARTIAL) -> None:
    """Removes them; what cannot be removed stays."""
    for found in leftovers_of(path, kind):
        if found.is_dir():
            shutil.rmtree(found, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                found.unlink()


def is_running(process: int) -> bool:
    """Whether another process with this id runs. Our own id on a leftover is that of an earlier run (containers reuse small ids)."""
    if process == os.getpid():
        return False
    if os.name == "nt":
        return True  # asking would end it
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
