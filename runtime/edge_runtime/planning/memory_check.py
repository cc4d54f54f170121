"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

_NO_LIMIT = 1 << 60


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns how many bytes this process may still take: MemAvailable (proc(5)), or less where a control group says so
    (cgroup v2, memory.max); None where neither is known."""
    free = [size for size in (_mem_available(root), _group_available(root)) if size is not None]
    return min(free) if free else None


def _mem_available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        words = value.split()
        if name == "MemAvailable" and words and words[0].isdigit():
            return int(words[0]) * 1024
    return None


def _group_available(root: Path) -> int | None:
    """Of the process's own control group; what its mapped files take can be dropped, so it counts as free."""
    group = next((line[3:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::/")), None)
    if group is None:
        return None
    folder = root / "sys/fs/cgroup" / group.lstrip("/")
    most, used = (" ".join(_lines(folder / name)) for name in ("memory.max", "memory.current"))
    if not most.isdigit() or not used.isdigit() or int(most) >= _NO_LIMIT:
        return None
    files = next((line.split()[1] for line in _lines(folder / "memory.stat") if line.startswith("file ")), "0")
    return max(0, int(most) - int(used) + int(files))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
