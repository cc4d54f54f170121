"""A server's worker that frees the model after a time without requests; the next request loads it again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack

from edge_devices.energy.live import SharedWatch
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.server.engine.worker import Worker, shutting_down
from edge_runtime.server.errors import ApiError
from edge_runtime.session.monitor import DecodeStats


class WorkerOnDemand:
    """Holds the running worker and the sessions that `load` opens. Frees them after `idle_seconds` without a request (None: never).

    Any thread may use it. `notify` gets a sentence when the model is freed, when it is loaded again, and when that fails.
    """

    def __init__(
        self,
        load: Callable[[], AbstractContextManager[Worker]],
        *,
        sessions: int = 1,
        idle_seconds: float | None = None,
        notify: Callable[[str], None] = lambda _: None,
        watch: SharedWatch | None = None,
    ) -> None:
        """Loads for the first time, and raises what `load` raises.

        `sessions` is the worker's number of sessions; `watch` measures its energy.
        """
        self.watch = watch
        self._load, self._sessions, self._idle, self._notify = load, sessions, idle_seconds, notify
        self._changing = threading.Lock()  # held while the model is loaded or freed
        self._counting = threading.Lock()
        self._held, self._since = 0, time.monotonic()
        self._stopped = threading.Event()
        self._open = ExitStack()
        self._worker: Worker | None = None
        self._enter()
        self._watcher = threading.Thread(target=self._free_when_idle, name="edge-mtp idle", daemon=True)
        if idle_seconds is not None:
            self._watcher.start()

    @property
    def loaded(self) -> bool:
        return self._worker is not None

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[Worker]:
        """Yields the worker, after loading it if necessary. Raises ApiError if that fails.

        The worker stays loaded until the block ends and everything submitted in it has run.
        """
        with self._counting:
            self._held += 1
        try:
            worker = self._worker
            if worker is None or self._changing.locked():
                worker = await asyncio.to_thread(self._again)
            yield worker
        finally:
            with self._counting:
                self._held -= 1
                self._since = time.monotonic()

    def load(self) -> tuple[int, int]:
        """Returns the numbers of running and waiting requests."""
        worker = self._worker
        return (0, 0) if worker is None else worker.load()

    def slots(self) -> list[DecodeStats | None]:
        """Returns the figures of the request on each session; None for a session that runs none."""
        worker = self._worker
        return [None] * self._sessions if worker is None else worker.slots()

    def stop(self) -> None:
        """Requests a shutdown, as `Worker.stop` does. Safe to call from a signal handler."""
        self._stopped.set()
        if self._worker is not None:
            self._worker.stop()

    def close(self) -> None:
        """Stops the worker and frees the model."""
        self.stop()
        with self._changing:
            self._leave()

    def _again(self) -> Worker:
        with self._changing:
            if self._stopped.is_set():
                raise shutting_down()
            if self._worker is None:
                begin = time.monotonic()
                try:
                    self._enter()
                except EdgeRuntimeError as error:
                    self._notify(f"the model was not loaded again: {error}")
                    raise ApiError(
                        503, "the model was not loaded again; try later, or see the server's output", code="not_loaded"
                    ) from error
                self._notify(f"loaded the model again in {time.monotonic() - begin:.1f} s")
            assert self._worker is not None
            return self._worker

    def _enter(self) -> None:
        with ExitStack() as stack:
            self._worker = stack.enter_context(self._load())
            self._open = stack.pop_all()

    def _leave(self) -> None:
        self._worker = None
        self._open.close()

    def _free_when_idle(self) -> None:
        assert self._idle is not None
        left = self._idle
        while not self._stopped.wait(left):
            with self._changing:
                with self._counting:
                    busy = self._held > 0 or self.load() != (0, 0)
                    if busy:
                        self._since = time.monotonic()
                    left = self._since + self._idle - time.monotonic()
                if self._worker is not None and left <= 0:
                    self._leave()
                    self._notify(f"freed the model after {self._idle:g} s without a request; the next one loads it again")
            left = max(left, 0.0) or self._idle
