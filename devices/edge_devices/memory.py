"""How much memory this process took and the machine has left."""

from __future__ import annotations

import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """Returns the largest resident size this process ever had, mapped model files included, in bytes (getrusage(2) ru_maxrss)."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Returns MemAvailable of /proc/meminfo in bytes (proc(5)), or None where the kernel does not say."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable" and value.split()[:1] and value.split()[0].isdigit():
            return int(value.split()[0]) * 1024
    return None
