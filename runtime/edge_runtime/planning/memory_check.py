"""Refuses to open what does not fit into memory, before it is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edge_runtime.bundle.manifest import Manifest
from edge_runtime.config.validators import bytes_of, size
from edge_runtime.errors import RequestError
from edge_runtime.planning.memory import MemoryPlan, Opening, largest_context, memory_plan, smaller_kv_type

_NO_LIMIT = 1 << 60


def memory_bytes(limit: str | int) -> int:
    """Returns the bytes that "2GB", "512 MiB" or a number of bytes mean. Raises ConfigError for anything else."""
    size("the memory limit", limit)
    return bytes_of(limit)


def available_memory(root: Path = Path("/")) -> int | None:
    """Returns how many bytes this process may still take: MemAvailable (proc(5)), or less where a control group says so
    (cgroup v2, memory.max); None where neither is known."""
    free = [size for size in (_mem_available(root), _group_available(root)) if size is not None]
    return min(free) if free else None


def check_memory(
    manifest: Manifest, opening: Opening, limit: int | None, available: int | None, notify: Callable[[str], None] = lambda _: None
) -> MemoryPlan:
    """Returns the plan. Raises RequestError if all of it exceeds `limit`, or, without one, what cannot be dropped exceeds `available`.

    Mapped weights count against a limit, which is about the whole process. They do not count against the machine, where the system may
    drop them and read them again; when they will not all stay, `notify` gets a sentence, since that is slow.
    """
    plan = memory_plan(manifest, opening)
    if limit is not None:
        if plan.total > limit:
            raise RequestError(_refusal(manifest, opening, plan.total, limit, f"the limit is {_size(limit)}", reserved_only=False))
    elif available is not None:
        if plan.reserved > available:
            where = f"{_size(available)} are available"
            raise RequestError(_refusal(manifest, opening, plan.reserved, available, where, reserved_only=True))
        if plan.total > available:
            notify(
                f"The weights and the rest take {_size(plan.total)}, of which {_size(available)} fit: weights will be read from disk again and again."
            )
    return plan


def _refusal(manifest: Manifest, opening: Opening, needed: int, fits: int, where: str, *, reserved_only: bool) -> str:
    context = largest_context(manifest, opening, fits, reserved_only=reserved_only)
    kv_type = smaller_kv_type(manifest, opening, fits, reserved_only=reserved_only)
    cures = [f"a context of at most {context}"] if context is not None else []
    cures += [f"KV type {kv_type}"] if kv_type is not None else []
    advice = f"ask for {' or '.join(cures)}" if cures else "no context is small enough: use a smaller bundle, or give it more memory"
    several = f" for each of {opening.sequences} sequences" if opening.sequences > 1 else ""
    return f"a context of {opening.context}{several} with KV type {opening.kv_type} needs {_size(needed)} of memory, but {where}; {advice}"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10**9 else f"{count / 1e6:.1f} MB"


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
