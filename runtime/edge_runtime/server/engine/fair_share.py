"""What a client, which is a key, may take of a server that others use: places in the queue, turns in the threads that prepare requests."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from edge_runtime.server.errors import ApiError

Result = TypeVar("Result")
RETRY_SECONDS = 2


class Places:
    """The places of running and waiting requests. Each of several clients that has none keeps the chance of one. Any thread may use it."""

    def __init__(self, capacity: int, clients: int = 1) -> None:
        self._capacity, self._clients = capacity, clients
        self._lock = threading.Lock()
        self._held: Counter[int] = Counter()

    def total(self) -> int:
        with self._lock:
            return self._held.total()

    def take(self, client: int, requests: int = 1) -> None:
        """Takes places for a client, all or none.

        Raises ApiError: 503 if as many are not free, 429 if the free ones are for other clients, 400 if as many never will be.
        """
        limit = max(1, self._capacity - self._clients + 1)
        if requests > limit:
            raise ApiError(400, f"the request has {requests} answers; this server queues at most {limit}", param="n")
        with self._lock:
            total, held = self._held.total(), self._held[client]
            if total + requests > self._capacity:
                raise _busy(503, f"{total} requests are running or waiting, which is the limit", "queue_full")
            without = sum(not self._held[other] for other in range(self._clients) if other != client)
            if held + requests > 1 and total + requests + without > self._capacity:
                raise _busy(
                    429, f"{held} requests of this key are running or waiting; the free places are for other keys", "key_queue_full"
                )
            self._held[client] += requests

    def give_back(self, client: int) -> None:
        with self._lock:
            self._held[client] -= 1


def _busy(status: int, reason: str, code: str) -> ApiError:
    return ApiError(status, f"{reason}; try again soon", code=code, headers={"Retry-After": str(RETRY_SECONDS)})


class FairPool:
    """Threads that take work of each client in turn, the oldest of a client first."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # the client whose turn is next first

    def submit(self, client: int, work: Callable[[], Result]) -> Future[Result]:
        """Queues work of a client. Raises RuntimeError after `shutdown`."""
        future: Future[Result] = Future()
        with self._lock:
            self._waiting.setdefault(client, deque()).append((future, work))
        self._pool.submit(self._run_next)
        return future

    def shutdown(self) -> None:
        """Waits until all that is queued has run."""
        self._pool.shutdown()

    def _run_next(self) -> None:
        future, work = self._next()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - whoever waits for the result gets it
                future.set_exception(error)
        del future, work  # an error holds this frame

    def _next(self) -> tuple[Future[Any], Callable[[], Any]]:
        with self._lock:
            client = next(iter(self._waiting))
            queue = self._waiting.pop(client)
            oldest = queue.popleft()
            if queue:
                self._waiting[client] = queue
            return oldest
