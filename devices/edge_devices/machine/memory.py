"""How much memory this process took and the machine has left."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


def peak_memory_bytes() -> int:
    """Returns the largest resident size this process ever had, mapped model files included, in bytes (getrusage(2) ru_maxrss)."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Returns MemAvailable of /proc/meminfo in bytes (proc(5)), or None where the kernel does not say."""
    try:
        return available_memory_bytes_of((root / "proc/meminfo").read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None


def available_memory_bytes_of(meminfo: str) -> int | None:
    """Returns MemAvailable of the text of /proc/meminfo in bytes, or None where it is not there."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable" and value.split()[:1] and value.split()[0].isdigit():
            return int(value.split()[0]) * 1024
    return None


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Bytes of this process that are in memory now; `anonymous` are those that no file holds, so that nobody else can share them."""

    total: int
    anonymous: int


def resident_bytes(root: Path = Path("/")) -> Resident | None:
    """Returns VmRSS and RssAnon of /proc/self/status (proc(5)), or None where there is none."""
    try:
        lines = (root / "proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = {
        name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines) if name in ("VmRSS", "RssAnon")
    }
    return Resident(total=found["VmRSS"], anonymous=found["RssAnon"]) if len(found) == 2 else None
