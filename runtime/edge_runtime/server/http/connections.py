"""How long a connection may take, and uvicorn until a signal. The only module that imports uvicorn."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edge_runtime.server.http.guard import App

# Streams end with a round, once the worker is told; this is for those that do not read.
_PATIENCE_SECONDS = 5
# uvicorn waits for ever for the end of a request's head, and for a client that does not read: a few hundred such connections, which
# need no key, would keep everybody else out.
HEAD_SECONDS = 30.0
UNREAD_SECONDS = 30.0


class TimedProtocol(H11Protocol):
    """Breaks a connection off that has no request under way and sends no whole head in time, or that does not read its answer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the first request; where there is no room, in the place of the one that has waited longest for one."""
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._make_room()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits for nothing any more."""
        self._end_wait()
        self.resume_writing()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """A request whose head is whole has its own limit: the body's."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_wait()

    def on_response_complete(self) -> None:
        """Waits for the next request; bytes of a body that nobody asked for do not put that off."""
        self._await_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client has much unread."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read on."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _make_room(self) -> None:
        waiting = [(other._head.when(), other) for other in self.connections if isinstance(other, TimedProtocol) and other._head]
        if waiting:
            _, oldest = min(waiting, key=lambda pair: pair[0])
            oldest._end_wait()
            self.connections.discard(oldest)
            oldest.transport.abort()

    def _await_head(self) -> None:
        self._end_wait()
        self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _end_wait(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


def server_config(app: App, connections: int) -> uvicorn.Config:
    """Returns how uvicorn runs an application for so many connections at once."""
    return uvicorn.Config(
        app,
        http=TimedProtocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_PATIENCE_SECONDS,
        limit_concurrency=connections,
    )


def run_server(config: uvicorn.Config, stop: Callable[[], None], listener: socket.socket) -> None:
    """Runs until a signal; `stop` is called first, or uvicorn would wait for answers to their ends."""

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            stop()
            super().handle_exit(sig, frame)

    # uvicorn raises the signal again when it is done; by then it has had its effect.
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        Server(config).run(sockets=[listener])
    finally:
        for number, action in previous.items():
            signal.signal(number, action)
