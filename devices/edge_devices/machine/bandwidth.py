"""Memory read bandwidth, which bounds the speed of decoding."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
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
