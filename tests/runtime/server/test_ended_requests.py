"""However a request ends, what it held goes with it: nothing waits for Python's garbage collector, which an idle server never runs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from chat_server import HI, Scripted, asked, scripted_server, send, settled
from edge_runtime.errors import BackendError
from edge_runtime.server.engine.jobs import Job
from edge_runtime.server.requests.completions import CompletionRequest
from edge_runtime.server.requests.messages import Conversation
from edge_runtime.session.generation import Generation
from polling import wait

PREDICTION = {"type": "content", "content": "predicted " * 1000}
CHAT: dict[str, Any] = {"messages": HI, "temperature": 0, "prediction": PREDICTION}
CONSTRAINED = CHAT | {"response_format": {"type": "json_object"}, "max_tokens": 4}
LONG = [{"role": "user", "content": "a" * 5000}]
PICTURE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}]}]
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
End = Callable[[Scripted], None]


def answered(status: int, body: Any, path: str = "/v1/chat/completions") -> End:
    def end(server: Scripted) -> None:
        assert send(server, "POST", path, body)[0] == status

    return end


def streamed(words: bytes) -> End:
    """A stream in which these come."""

    def end(server: Scripted) -> None:
        connection = asked(server, CHAT | {"stream": True})
        assert words in connection.getresponse().read()
        connection.close()

    return end


def failing(after: int, ended: End) -> End:
    """A request during which a forward fails."""

    def end(server: Scripted) -> None:
        rounds = itertools.count()

        def fail() -> None:
            if next(rounds) >= after:
                raise BackendError("the forward failed")

        server.batch.before_forward = fail
        try:
            ended(server)
        finally:
            server.batch.before_forward = lambda: None

    return end


def left(*, stream: bool) -> End:
    """A client that leaves while it is answered."""

    def end(server: Scripted) -> None:
        server.batch.before_forward = lambda: time.sleep(0.02)
        try:
            connection = asked(server, CHAT | {"stream": stream})
            if stream:
                connection.getresponse().read(10)
            connection.close()
        finally:
            settled(server)
            server.batch.before_forward = lambda: None

    return end


ENDS: dict[str, End] = {
    "done": answered(200, CHAT),
    "several": answered(200, CHAT | {"n": 3}),
    "streamed": streamed(b"[DONE]"),
    "refused": answered(400, CHAT | {"messages": LONG}),
    "refused with its media": answered(400, CHAT | {"messages": PICTURE}),
    "failed": failing(0, answered(500, CHAT)),
    "failed in its stream": failing(2, streamed(b"error")),
    "gone": left(stream=False),
    "gone in its stream": left(stream=True),
    "constrained": answered(200, CONSTRAINED),
    "constrained and refused": answered(400, CONSTRAINED | {"response_format": NO_SCHEMA}),
    "tokenized": answered(200, {"messages": HI}, "/tokenize"),
    "refused tokens": answered(400, {"messages": LONG}, "/tokenize"),
    "refused ids": answered(400, {"tokens": [1 << 40]}, "/detokenize"),
    "refused with a large body": answered(400, CHAT | {"user": "a" * 100_000, "n": 0}),
    "refused with a deep body": answered(400, b"[" * 100_000),
}


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Returns the names of what requests made and is still there; the garbage collector is off meanwhile."""
    made: list[weakref.ref[Any]] = []
    for kind in (Job, CompletionRequest, Generation, Conversation, Future):
        begin = kind.__init__

        def noted(self: Any, *values: Any, begin: Any = begin, **options: Any) -> None:
            begin(self, *values, **options)
            made.append(weakref.ref(self))

        monkeypatch.setattr(kind, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        yield lambda: [type(thing).__name__ for reference in made if (thing := reference()) is not None]
    finally:
        gc.enable()


def held() -> tuple[int, int]:
    """The descriptors and the child processes of this process, those of its hosts included."""
    parents = {int(path.parent.name): int(stat.rpartition(")")[2].split()[1]) for path, stat in readable_stats()}
    mine, result = {os.getpid()}, True
    while result:
        result = {child for child, parent in parents.items() if parent in mine} - mine
        mine |= result
    return len(list(Path("/proc/self/fd").iterdir())), len(mine)


def readable_stats() -> list[tuple[Path, str]]:
    """Each process's file and its text, read once: a process may end at any moment."""
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            stats.append((path, path.read_text()))
    return stats


@pytest.mark.parametrize("end", ENDS)
def test_nothing_of_an_ended_request_is_left(end: str, alive: Callable[[], list[str]]) -> None:
    if "constrained" in end:
        pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
    with scripted_server("Hello there. " * 8) as server:
        for _ in range(3):
            ENDS[end](server)
        settled(server)
        assert wait(lambda: not alive()), alive()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_neither_children_nor_descriptors_are_left(alive: Callable[[], list[str]]) -> None:
    pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
    with scripted_server("Hello there. " * 8) as server:
        for end in ENDS.values():
            end(server)  # starts the hosts
        settled(server)
        before = held()
        for _ in range(2):
            for end in ENDS.values():
                end(server)
        settled(server)
        assert wait(lambda: held() <= before), (held(), before)


def test_requests_that_a_stopping_server_refuses_are_freed(alive: Callable[[], list[str]]) -> None:
    with scripted_server("Hello there. " * 8) as server:
        server.batch.before_forward = lambda: time.sleep(0.05)
        connections = [asked(server, CHAT | {"stream": stream}) for stream in (False, True, False)]
        assert wait(lambda: sum(server.worker.load()) == 3)
        server.worker.close()
        for connection in connections:
            connection.getresponse().read()
            connection.close()
        assert wait(lambda: not alive()), alive()
