"""How fast this machine moves memory: the figure that bounds decoding."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

BLOCK = 32 << 20  # per thread and buffer; larger than the caches of the machines this is for
ROUNDS = 4


def copy_bandwidth(threads: int, *, memory_available: int | None = None, clock: Callable[[], float] = time.perf_counter) -> float | None:
    """Returns bytes read and written per second by `threads` copying at once, the best of 4 rounds (a few tenths of a second).

    None where less than 8 times the buffers' memory is left: a probe must not push others out.
    """
    if memory_available is not None and memory_available < 8 * 2 * BLOCK * threads:
        return None
    buffers = [(ctypes.create_string_buffer(BLOCK), ctypes.create_string_buffer(BLOCK)) for _ in range(threads)]
    for source, target in buffers:
        ctypes.memset(source, 1, BLOCK)  # pages must be there before they are timed
        ctypes.memset(target, 2, BLOCK)
    return max(2 * BLOCK * threads / _round_seconds(buffers, clock) for _ in range(ROUNDS))


def _round_seconds(buffers: list[tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]], clock: Callable[[], float]) -> float:
    start = threading.Barrier(len(buffers) + 1)

    def copy(target: ctypes.Array[ctypes.c_char], source: ctypes.Array[ctypes.c_char]) -> None:
        start.wait()
        ctypes.memmove(target, source, BLOCK)  # a foreign call: the interpreter's lock is free meanwhile

    workers = [threading.Thread(target=copy, args=(t, s), daemon=True) for s, t in buffers]
    for worker in workers:
        worker.start()
    start.wait()
    begin = clock()
    for worker in workers:
        worker.join()
    return max(clock() - begin, 1e-9)
