"""Which request gets a session, and how much each client may use of a server that it shares with others."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from edge_devices.machine.memory import available_memory_bytes
from edge_runtime.interfaces import SavableTarget, Target
from edge_runtime.server.engine.jobs import ActiveRequest, Job
from edge_runtime.server.errors import ApiError
from edge_runtime.session.generation import reusable_prefix

Result = TypeVar("Result")
RETRY_SECONDS = 2


class Places:
    """The places of running and waiting requests. One stays reserved for each client that holds none. Any thread may use it."""

    def __init__(self, capacity: int, clients: int = 1) -> None:
        self._capacity, self._clients = capacity, clients
        self._lock = threading.Lock()
        self._held: Counter[int] = Counter()

    def total(self) -> int:
        with self._lock:
            return self._held.total()

    def take(self, client: int, requests: int = 1) -> None:
        """Takes places for all `requests` of a client, or none.

        Raises ApiError: 503 if too few are free, 429 if the free ones are reserved for other clients, 400 if that many are never free.
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
    """A thread pool that serves clients in turn, and the oldest work of each client first."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # in the order of the clients' turns

    def submit(self, client: int, work: Callable[[], Result]) -> Future[Result]:
        """Queues work for a client. Raises RuntimeError after `shutdown`."""
        future: Future[Result] = Future()
        with self._lock:
            self._waiting.setdefault(client, deque()).append((future, work))
        self._pool.submit(self._run_next)
        return future

    def shutdown(self) -> None:
        """Waits until all queued work has run."""
        self._pool.shutdown()

    def _run_next(self) -> None:
        future, work = self._next()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the future passes it to whoever waits for the result
                future.set_exception(error)
        del future, work  # an error's traceback keeps this frame

    def _next(self) -> tuple[Future[Any], Callable[[], Any]]:
        with self._lock:
            client = next(iter(self._waiting))
            queue = self._waiting.pop(client)
            oldest = queue.popleft()
            if queue:
                self._waiting[client] = queue
            return oldest


# A request may be as long as the context, so a session may not become free for minutes. If a client waits that has less than its share,
# a request of the client with the most sessions is suspended, the one that has run longest: its rows are copied out, and it continues
# later.

# A request that was passed over this often is served next.
MAX_PASSED_OVER = 4
# Before it is suspended, a request runs at least SWAP_SHARE times as long as suspending and resuming take, times the number of sessions,
# within these limits in seconds.
SWAP_SHARE = 10.0
SHORTEST_TURN, LONGEST_TURN = 0.25, 1.0
# The largest part of the available memory that the rows of one more suspended request may take.
_MEMORY_SHARE = 0.25


class Turns:
    """Whose turn it is, and for how many `seconds` a request keeps its session at least."""

    def __init__(self, sessions: int) -> None:
        self._sessions = sessions
        self._newest: dict[int, int] = {}
        self.seconds = SHORTEST_TURN

    def next_of(self, waiting: Iterable[int], held: Sequence[ActiveRequest]) -> int:
        """Returns the waiting client with the fewest sessions. Of equals, it is the one whose turn was longest ago, else the first."""
        counts = Counter(active.client for active in held)
        return min(waiting, key=lambda client: (counts[client], self._newest.get(client, 0)))

    def took(self, client: int) -> None:
        """Notes that a request of this client got a session."""
        self._newest[client] = 1 + max(self._newest.values(), default=0)

    def swapped(self, seconds: float) -> None:
        """Notes how long copying rows out and back took. No session runs during that time."""
        self.seconds = min(LONGEST_TURN, max(SHORTEST_TURN, SWAP_SHARE * self._sessions * seconds))

    def gives_way(self, held: Sequence[ActiveRequest], client: int, now: float) -> ActiveRequest | None:
        """Returns which of the `held` requests to suspend for the next `client`, if no session is free; None for none of them.

        A request that waits for its reader goes first, whoever its client is. Otherwise its client must have a session when `client` has
        none, or at least two more sessions than `client` has.
        """
        over = [active for active in held if now - active.since >= self.seconds]
        if stalled := [active for active in over if active.stalled]:
            return min(stalled, key=lambda active: active.since)
        counts = Counter(active.client for active in held)
        least = counts[client] + (2 if counts[client] else 1)
        owners = {owner for owner, count in counts.items() if owner != client and count >= least}
        mature = [active for active in over if active.client in owners]
        return min(mature, key=lambda active: (-counts[active.client], active.since), default=None)


def has_room(target: Target) -> bool:
    """Whether the rows in a target's cache can be copied, and enough memory is available for the copy."""
    if not isinstance(target, SavableTarget):
        return False
    available = available_memory_bytes()
    return available is None or target.length * sum(target.row_bytes) <= available * _MEMORY_SHARE


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A free session. `last_used` is a growing count, 0 if it was never used; `client` is the client whose rows it has."""

    number: int
    target: Target
    last_used: int
    client: int = 0


def choose_slot(slots: Sequence[Slot], waiting: Sequence[Job], may_reuse: Callable[[Job], bool]) -> tuple[Slot, Job]:
    """Returns the free session and the waiting request that share the longest prefix. `waiting` is oldest first; neither may be empty.

    A cache counts only if it holds at least half of the prompt. All chats share a few tokens; these are not worth discarding the cached
    rows of another conversation. If no cache counts, the least recently used session is chosen.
    """
    overdue = [job for job in waiting if job.passed_over >= MAX_PASSED_OVER]
    best = max(
        ((slot, job) for job in overdue[:1] or waiting for slot in slots),
        key=lambda pair: (_shared_prefix(pair[0], pair[1], may_reuse), -waiting.index(pair[1]), -pair[0].last_used),
    )
    for job in waiting[: waiting.index(best[1])]:
        job.passed_over += 1
    return best


def _shared_prefix(slot: Slot, job: Job, may_reuse: Callable[[Job], bool]) -> int:
    if not may_reuse(job) or job.client != slot.client:
        return 0
    shared = reusable_prefix(slot.target, job.ids[:-1])
    return shared if 2 * shared >= len(job.ids) else 0
