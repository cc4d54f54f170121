"""What is remembered on a machine between runs, and for which CPU it is true."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

from edge_devices.files.atomic_write import atomic_write

CACHE_VARIABLE = "EDGE_MTP_CACHE"
MAX_CACHE_BYTES = 1 << 20
# The newest so many entries of a file are kept.
MAX_REMEMBERED = 200
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


def read_entries(path: Path) -> dict[str, object]:
    """Returns what a file of remembered entries holds, by key; nothing if it is missing or damaged."""
    try:
        if path.stat().st_size > MAX_CACHE_BYTES:
            return {}
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def remember_entry(path: Path, key: str, value: object) -> OSError | None:
    """Adds an entry as the newest. Returns why it could not be written; then it is only measured again the next time."""
    entries = {k: v for k, v in read_entries(path).items() if k != key}
    kept = dict([*list(entries.items())[-MAX_REMEMBERED + 1 :], (key, value)])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, [json.dumps(kept, indent=2).encode()])
    except OSError as error:
        return error
    return None
