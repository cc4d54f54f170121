"""A plain processor load, to see how a meter follows one and to mark times on an external meter's recording."""

from __future__ import annotations

import hashlib
import threading
from types import TracebackType

BLOCK = bytes(1 << 20)  # hashing blocks this large leaves the interpreter's lock free, so every thread keeps a core busy


class BusyLoad:
    """Keeps `threads` processors busy inside a with block."""

    def __init__(self, threads: int = 1) -> None:
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._work, name=f"busy-load-{i}", daemon=True) for i in range(threads)]

    def __enter__(self) -> BusyLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while not self._ended.is_set():
            hashlib.sha256(BLOCK).digest()
