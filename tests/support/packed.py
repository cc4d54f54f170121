"""Waits for files of packed weights."""

from __future__ import annotations

import threading


def written() -> None:
    """Waits until all files of packed weights are on the disk."""
    for thread in threading.enumerate():
        if thread.name == "edge-mtp packed cache":
            thread.join()
