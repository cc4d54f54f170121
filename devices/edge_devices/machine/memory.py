"""Memory: bytes that this process took and may take, how bytes are printed, and the bandwidth of reads."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 64 << 20  # per thread; larger than the caches of the machines this is for
# Reads of the block per round, so that some milliseconds between the threads' starts do not matter.
PASSES = 3
ROUNDS = 5
SPARE = 8  # least ratio of available memory to the probe's buffers
FILL, ABSENT = 1, 2


def read_bandwidth(threads: int, *, memory_available: int | None = None) -> float | None:
    """Returns bytes read per second by `threads` at once, the best of 5 rounds (some tenths of a second).

    None where less than 8 times the buffers' memory is available, so that the probe evicts nothing. Reads with the C library's memchr,
    which searches for a byte that does not occur.
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
            search(block, ABSENT, BLOCK)  # ctypes releases the interpreter lock

    workers = [threading.Thread(target=read, args=(block,), daemon=True) for block in blocks]
    for worker in workers:
        worker.start()
    start.wait()
    begin = time.perf_counter()
    for worker in workers:
        worker.join()
    return max(time.perf_counter() - begin, 1e-9)


_NO_LIMIT = 1 << 60


def peak_memory_bytes() -> int:
    """Returns the largest resident size this process ever had, mapped model files included, in bytes (getrusage(2) ru_maxrss)."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Returns how many bytes this process may still take; None where the kernel does not report it.

    MemAvailable of /proc/meminfo (proc(5)), or less where the process's control group has a limit (cgroup v2, memory.max).
    """
    free = [size for size in (mem_available("\n".join(_lines(root / "proc/meminfo"))), _group_available(root)) if size is not None]
    return min(free) if free else None


def mem_available(meminfo: str) -> int | None:
    """Returns MemAvailable of the text of /proc/meminfo in bytes, or None if it is missing."""
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if name == "MemAvailable" and words and words[0].isdecimal() and words[0].isascii():
            return int(words[0]) * 1024
    return None


def return_freed_memory() -> None:
    """Gives memory that was freed back to the system, where the C library keeps it (glibc's malloc_trim(3))."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def byte_text(count: int) -> str:
    """Returns a number of bytes as text: 512 B, 1.5 kB, 1.5 MB, 1.50 GB (decimal units)."""
    if count < 1000:
        return f"{count} B"
    for unit, size in (("kB", 1e3), ("MB", 1e6)):
        if count < size * 1000:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e9:.2f} GB"


@dataclass(frozen=True, kw_only=True)
class Resident:
    """Bytes of this process that are in memory now; `anonymous` are those without a file behind them, which are not shared."""

    total: int
    anonymous: int


def resident_bytes(root: Path = Path("/")) -> Resident | None:
    """Returns VmRSS and RssAnon of /proc/self/status (proc(5)), or None where there is none."""
    pairs = (line.partition(":") for line in _lines(root / "proc/self/status"))
    sizes = {name: int(value.split()[0]) * 1024 for name, _, value in pairs if name in ("VmRSS", "RssAnon")}
    return Resident(total=sizes["VmRSS"], anonymous=sizes["RssAnon"]) if len(sizes) == 2 else None


def _group_available(root: Path) -> int | None:
    """Returns the bytes left in the process's own control group. Pages of mapped files can be dropped, so they count as free."""
    group = next((line[3:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::/")), None)
    if group is None:
        return None
    folder = root / "sys/fs/cgroup" / group.lstrip("/")
    limit, used = (" ".join(_lines(folder / name)) for name in ("memory.max", "memory.current"))
    if not limit.isdecimal() or not used.isdecimal() or int(limit) >= _NO_LIMIT:
        return None
    files = next((line.split()[1] for line in _lines(folder / "memory.stat") if line.startswith("file ")), "0")
    return max(0, int(limit) - int(used) + int(files))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
