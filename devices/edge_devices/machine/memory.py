"""Memory: the bytes that this process uses and may use, and the read bandwidth."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from edge_devices.files.limited_read import parse_integer

BLOCK = 64 << 20  # bytes per thread, more than the caches of the intended machines
# How often the block is read per round. It is read several times so that small differences of the threads' starts do not matter.
PASSES = 3
ROUNDS = 5
SPARE = 8  # the least ratio of available memory to the probe's buffers
FILL, ABSENT = 1, 2


def read_bandwidth(threads: int, *, memory_available: int | None = None) -> float | None:
    """Returns the bytes per second that `threads` threads read together, in the best of 5 rounds.

    It takes some tenths of a second. Returns None if less than 8 times the buffers' memory is available, so that the probe does not evict
    other memory. It reads with the C library's memchr, which searches for a byte that does not occur.
    """
    if memory_available is not None and memory_available < SPARE * BLOCK * threads:
        return None
    blocks = [ctypes.create_string_buffer(BLOCK) for _ in range(threads)]
    for block in blocks:
        ctypes.memset(block, FILL, BLOCK)  # commits the pages before the timing
    search = _memchr()
    return max(PASSES * BLOCK * threads / _round_seconds(search, blocks) for _ in range(ROUNDS))


def _memchr() -> Any:
    library = ctypes.CDLL("msvcrt") if sys.platform == "win32" else ctypes.CDLL(None)
    library.memchr.argtypes, library.memchr.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
    return library.memchr


def _round_seconds(search: Any, blocks: list[ctypes.Array[ctypes.c_char]]) -> float:
    start = threading.Barrier(len(blocks) + 1)

    def read(block: ctypes.Array[ctypes.c_char]) -> None:
        start.wait()
        for _ in range(PASSES):
            search(block, ABSENT, BLOCK)  # ctypes releases the GIL

    workers = [threading.Thread(target=read, args=(block,), daemon=True) for block in blocks]
    for worker in workers:
        worker.start()
    start.wait()
    begin = time.perf_counter()
    for worker in workers:
        worker.join()
    return max(time.perf_counter() - begin, 1e-9)


_M_ARENA_MAX = -8  # mallopt(3), malloc.h
# Mounts of control groups, and their files of limits and of use, and the fields for cached files in that use (Linux,
# admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst).
_GROUPS = (
    ("sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    ("sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)


def peak_memory_bytes() -> int:
    """Returns the peak resident size of this process in bytes, with mapped model files (getrusage(2) ru_maxrss)."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Returns how many bytes this process may still allocate; None if the kernel does not report it.

    This is MemAvailable of /proc/meminfo (proc(5)), or less if the process's control group or one above it has a limit. In cgroup v2, these
    are memory.max, and memory.high, above which processes are slowed down until they release memory.
    """
    whole = mem_available("\n".join(_lines(root / "proc/meminfo")))
    return min([*_groups_available(root), *([] if whole is None else [whole])], default=None)


def address_space_left() -> int | None:
    """Returns how many bytes this process may still map, including files, under RLIMIT_AS (setrlimit(2), `ulimit -v`).

    Returns None if there is no such limit, or if the kernel does not report what is mapped.
    """
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError, ValueError):  # Windows has none
        return None
    mapped = mapped_bytes()
    return None if limit == resource.RLIM_INFINITY or mapped is None else max(0, limit - mapped)


def mapped_bytes() -> int | None:
    """Returns VmSize of /proc/self/status, which is all memory that this process has mapped; None if it is not reported."""
    return next((int(line.split()[1]) * 1024 for line in _lines(Path("/proc/self/status")) if line.startswith("VmSize:")), None)


def mem_available(meminfo: str) -> int | None:
    """Returns MemAvailable in the text of /proc/meminfo, in bytes; None if it is missing."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            kilobytes = parse_integer(value.strip().removesuffix(" kB"))
            return None if kilobytes is None else kilobytes * 1024
    return None


def return_freed_memory() -> None:
    """Returns freed memory to the system, if the C library keeps it (glibc's malloc_trim(3))."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def share_one_arena() -> None:
    """Makes all threads allocate from one arena of the C library. Otherwise glibc reserves 64 MiB of address space per thread."""
    if sys.platform == "linux":
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_option is not None:
            set_option(_M_ARENA_MAX, 1)


def _groups_available(root: Path) -> Iterator[int]:
    """Yields the bytes left in each control group that limits this process. Cached file pages count as free, as they can be dropped."""
    groups = dict(_own_groups(root))
    for (mount, limits, use, files), group in ((kind, groups.get(kind[0])) for kind in _GROUPS):
        # In a container the path may be the host's, and only the mount itself exists here. The limits of all groups above apply as well.
        for path in () if group is None else (group, *group.parents):
            folder = root / mount / path
            used, *highest = (parse_integer(" ".join(_lines(folder / name))) for name in (use, *limits))
            reached = [limit for limit in highest if limit is not None]  # "max", or nearly 2**63, means no limit
            if used is not None and reached:
                stat = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat") if " " in line)
                droppable = sum(parse_integer(stat.get(name, "")) or 0 for name in files)
                yield max(0, min(reached) - used + droppable)


def _own_groups(root: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """Yields the mount of each hierarchy, and the process's group in it, from /proc/self/cgroup (cgroups(7))."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        group = PurePosixPath(*(part for part in path.split("/") if part not in ("", ".", "..")))
        if (number, controllers) == ("0", ""):
            yield _GROUPS[0][0], group
        elif "memory" in controllers.split(","):
            yield _GROUPS[1][0], group


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
