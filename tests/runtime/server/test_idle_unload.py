"""A model that is freed after a time without requests, and loaded again by the next one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chat_server import HI, Child, ask, client_of, scripted_worker, send
from edge_runtime.errors import BackendError
from edge_runtime.server.engine.idle import WorkerOnDemand
from edge_runtime.server.engine.worker import Worker
from edge_runtime.server.errors import ApiError
from polling import wait

IDLE = 0.2


class Loads:
    """Counts how often a worker was opened and is open; fails from the time on that is given."""

    def __init__(self, fails_at: int = 100) -> None:
        self.opened = self.closed = 0
        self._fails_at = fails_at

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Worker]:
        if self.opened + 1 >= self._fails_at:
            raise BackendError("the memory does not suffice")
        self.opened += 1
        worker, _, _ = scripted_worker("Hello.")
        worker.start()
        try:
            yield worker
        finally:
            worker.close()
            self.closed += 1


async def works(workers: WorkerOnDemand, goes_on: Callable[[], object] = lambda: None) -> None:
    """Uses a worker until `goes_on` returns."""
    async with workers.working() as worker:
        assert worker.load() == (0, 0)
        await asyncio.to_thread(goes_on)


def test_what_waits_is_freed_and_what_works_is_not() -> None:
    loads, notes = Loads(), []  # type: Loads, list[str]
    with contextlib.closing(WorkerOnDemand(loads, idle_seconds=IDLE, notify=notes.append)) as workers:
        asyncio.run(works(workers, lambda: time.sleep(4 * IDLE)))
        assert (loads.opened, loads.closed, workers.loaded) == (1, 0, True)
        assert wait(lambda: loads.closed == 1)
        assert (workers.loaded, workers.load(), workers.slots()) == (False, (0, 0), [None])
        asyncio.run(works(workers))
        assert loads.opened == 2
    assert loads.closed == 2
    assert notes[0] == "freed the model after 0.2 s without a request; the next one loads it again"
    assert notes[1].startswith("loaded the model again in ")


def test_requests_that_come_together_load_it_once() -> None:
    loads = Loads()
    with contextlib.closing(WorkerOnDemand(loads, idle_seconds=IDLE)) as workers:
        assert wait(lambda: not workers.loaded)
        met = threading.Barrier(4, timeout=60)
        threads = [threading.Thread(target=lambda: asyncio.run(works(workers, met.wait))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert loads.opened == 2


def test_a_model_that_cannot_be_loaded_again_is_told() -> None:
    notes: list[str] = []
    with contextlib.closing(WorkerOnDemand(Loads(fails_at=2), idle_seconds=IDLE, notify=notes.append)) as workers:
        assert wait(lambda: not workers.loaded)
        with pytest.raises(ApiError, match="not loaded again") as error:
            asyncio.run(works(workers))
        assert error.value.status == 503
        assert notes[-1] == "the model was not loaded again: the memory does not suffice"


def test_a_served_model_comes_back(exported_pair: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    child = Child(exported_pair, "--context", "256", "--idle-unload", "1", EDGE_MTP_CACHE=str(tmp_path))
    request.addfinalizer(lambda: child.end())
    client = client_of(child.url)
    loaded: Callable[[], bool] = lambda: send(child.url, "GET", "/health")[2]["loaded"]  # noqa: E731
    first = ask(client, messages=HI, max_tokens=8)
    assert wait(lambda: not loaded(), seconds=30)
    again = ask(client, messages=HI, max_tokens=8)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert loaded()
    assert b"edge_mtp_requests_total 2" in send(child.url, "GET", "/metrics")[2], "what was counted before goes on"
