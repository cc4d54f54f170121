"""What is remembered on a machine between runs, and for which CPU it is true."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CACHE_VARIABLE = "EDGE_MTP_CACHE"
_CPU_FIELDS = {"model name", "flags", "Features", "CPU implementer", "CPU variant", "CPU part", "CPU revision"}


def cache_folder() -> Path:
    """Returns $EDGE_MTP_CACHE, or ~/.cache/edge-mtp."""
    folder = os.environ.get(CACHE_VARIABLE)
    return Path(folder) if folder else Path.home() / ".cache" / "edge-mtp"


def cpu_identity() -> list[str]:
    """Returns what tells one CPU's instruction sets from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [platform.processor()]
    pairs = (line.partition(":") for line in lines)
    return sorted({f"{name.strip()}:{value.strip()}" for name, _, value in pairs if name.strip() in _CPU_FIELDS})
