"""Who may use a loaded pair: one thread at a time, and only the newest request of each sequence.

A session runs one request at a time. A request that begins claims the sequence's cache. If the request before it has not ended, it raises
RequestError when it is continued, because the rows in the cache are no longer its own.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

from edge_runtime.errors import RequestError

SUPERSEDED = (
    "another request began on this session before this one ended, so this one cannot continue;"
    " run one after the other, or several at once with open_sessions"
)
CLOSED = "the session is closed; open the bundle again"


class PairLock:
    """Serializes the use of one loaded pair by all threads and sessions. A thread may take it again while it holds it."""

    def __init__(self) -> None:
        self.closed = False
        self._lock = threading.RLock()
        self._computing = False
        self._round = _Computing(self)

    def held(self) -> AbstractContextManager[Any]:
        """Returns a context in which only this thread uses the pair. Entering it waits for other threads."""
        return self._lock

    def computing(self) -> AbstractContextManager[None]:
        """As `held`, around work that must not be entered again: a callback inside it that uses the pair is refused."""
        return self._round

    def require_idle(self) -> None:
        """Raises RequestError during a forward, that is, in a callback or a signal handler that interrupts it."""
        if self._computing:
            raise RequestError("a callback cannot use the session while its request computes; do it after the step")

    def require_open(self) -> None:
        """Raises RequestError if the pair is closed."""
        if self.closed:
            raise RequestError(CLOSED)


class _Computing(AbstractContextManager[None]):
    """A reusable context manager, so that no generator is created for each round."""

    def __init__(self, lock: PairLock) -> None:
        self._pair = lock

    def __enter__(self) -> None:
        pair = self._pair
        pair._lock.acquire()
        try:
            pair.require_idle()
            pair.require_open()
            pair._computing = True
        except BaseException:
            pair._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._pair._computing = False
        self._pair._lock.release()


class CacheClaim:
    """The claim to the cache of one sequence. The sessions of a pair share a lock; `alone` is False if there are several of them."""

    def __init__(self) -> None:
        self.lock = PairLock()
        self.alone = True
        self.closed = False
        self._owner: weakref.ref[object] | None = None  # weak, so that a request is freed as soon as nothing else needs it

    def claim(self, owner: object) -> None:
        self._owner = weakref.ref(owner)

    def release(self) -> None:
        """Takes the cache from its owner, which then cannot continue."""
        self._owner = None

    def holds(self, owner: object) -> bool:
        """Whether `owner` made the newest claim."""
        return self._owner is not None and self._owner() is owner

    def require_open(self) -> None:
        """Raises RequestError if the session is closed."""
        self.lock.require_open()
        if self.closed:
            raise RequestError(CLOSED)
