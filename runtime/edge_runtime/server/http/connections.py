"""Limits on connections, and running uvicorn until a signal. The only module that imports uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edge_runtime.server.http.guard import App

# Grace period for clients that do not read: the worker's streams end after the current round anyway.
_SHUTDOWN_SECONDS = 5
# uvicorn has no time limit for a request's head, nor for a client that does not read its response. A few hundred such connections, which
# need no API key, would block all other clients.
HEAD_SECONDS = 30.0
UNREAD_SECONDS = 30.0
# Each line of a head and each chunk of a body costs the event loop as much time as kilobytes of plain data. A megabyte of tiny ones would
# take seconds, in which no other client is served.
MAX_HEAD_BYTES = 16 << 10
MAX_HEAD_LINES = 100
FREE_CHUNKS = 512
_CHUNK_BYTES = 1 << 10
# How many requests in a row a connection may pipeline, which means: send before the answer to the previous one. The answer to the last of
# them ends the connection.
MAX_PIPELINED = 16
# Connections that are accepted at once. asyncio accepts this many before it serves one, and where descriptors run out, logs as many errors.
_ACCEPTED = 32
_BACKLOG = 1024
# File descriptors for connections that are just being accepted or closed, for child processes and for files.
_OTHER_DESCRIPTORS = 192
_FEWEST = 8
_BOTH_LENGTHS = {b"content-length", b"transfer-encoding"}
_END_OF_HEAD = re.compile(rb"\n\r?\n")


class LimitedHttp(h11.Connection):
    """Refuses a head that is too large or has too many lines, a body with two lengths, and a body in very many small chunks."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Returns the next event. Raises h11.RemoteProtocolError."""
        if self.their_state is h11.IDLE:
            head = _END_OF_HEAD.split(self.trailing_data[0], 1)[0]
            if len(head) > MAX_HEAD_BYTES or head.count(b"\n") > MAX_HEAD_LINES:
                raise h11.RemoteProtocolError("a large head")
        event = super().next_event()
        if isinstance(event, h11.Request):
            if {name for name, _ in event.headers} >= _BOTH_LENGTHS:  # a proxy that uses the other one sees other requests
                raise h11.RemoteProtocolError("two lengths of a body")
            self._left = FREE_CHUNKS * _CHUNK_BYTES
        elif isinstance(event, h11.Data):
            self._left += len(event.data) - _CHUNK_BYTES * event.chunk_end
            if self._left < 0:
                raise h11.RemoteProtocolError("too many chunks")
        return event


class TimedProtocol(H11Protocol):
    """Closes a connection that does not send a complete request head in time, or does not read its response."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = LimitedHttp(h11.SERVER, MAX_HEAD_BYTES)
        # uvicorn's own limit would also count the tasks of closed connections, which end a few iterations of the event loop later.
        self._room, self.limit_concurrency = self.limit_concurrency, None
        self._head: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._since = 0.0  # when the wait began: for the head, for the body, or for the client to read the answer
        self._bytes_ahead = 0  # bytes of further requests that have arrived before this one is answered
        self._pipelined = 0  # requests in a row that were answered after the next one had already arrived
        self._discards = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the head timeout. At the connection limit, closes another connection first.

        It is the one that has been without a complete request for the longest time. If there is none, it is the one that has not read its
        answer for the longest time; if there is none, the one that has pipelined the most bytes. If all others just wait for an answer,
        this connection's request will get status 503.
        """
        super().connection_made(transport)
        if self._room is not None and len(self.connections) >= self._room and not self._close_another():
            self.limit_concurrency = 0
        self._start_head_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timeouts."""
        self._cancel_head_timeout()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Drops what arrives after the last answer."""
        if not self._discards:
            super().data_received(data)

    def handle_events(self) -> None:
        """Ends the head timeout once the head is complete; the body has its own time limit."""
        super().handle_events()
        self._bytes_ahead = len(self.conn.trailing_data[0]) if self.conn.their_state is h11.DONE else 0  # trailing_data is a copy
        if self._head is not None and self.cycle is not None and not self.cycle.response_complete:
            self._cancel_head_timeout()
            self._since = self.loop.time()
            self._pipelined = self._pipelined + 1 if self._bytes_ahead else 0

    def on_response_complete(self) -> None:
        """Starts the head timeout of the next request; unread bytes of the previous body do not extend it."""
        self._start_head_timeout()
        if self._pipelined < MAX_PIPELINED or self.transport.is_closing():
            super().on_response_complete()
        else:
            self._end()

    def _end(self) -> None:
        """Sends no more, and leaves closing to the client or to the head timeout.

        A socket that is closed with unread bytes may lose answers that are on their way.
        """
        self._discards = True
        self.transport.write_eof()
        self.flow.resume_reading()

    def pause_writing(self) -> None:
        """Starts the timeout for a client that does not read."""
        super().pause_writing()
        self._since = self.loop.time()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancels that timeout."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's own text does not say what to do
        """Answers a request that is not valid HTTP or exceeds a limit, and closes the connection."""
        limits = f"has a head of more than {MAX_HEAD_LINES} lines or {MAX_HEAD_BYTES} bytes"
        limits += ", both Content-Length and Transfer-Encoding, or a body in very many small chunks"
        super().send_400_response(f"the request is not valid HTTP, {limits}; send few headers, and the body with a Content-Length alone")

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing: the guard refuses these requests."""

    def _close_another(self) -> bool:
        """Closes the connection that `connection_made` names; returns whether there was one."""
        others = [other for other in self.connections if isinstance(other, TimedProtocol)]
        waiting = [other for other in others if other._awaits_request()] or [other for other in others if other._unread is not None]
        if waiting or (waiting := [other for other in others if other._bytes_ahead]):
            worst = max(waiting, key=lambda other: (other._bytes_ahead, -other._since))
            worst._cancel_head_timeout()
            self.connections.discard(worst)
            worst.transport.abort()
        return bool(waiting)

    def _awaits_request(self) -> bool:
        """Whether the head is incomplete, or a body that was not refused."""
        return self._head is not None or (self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete)

    def _start_head_timeout(self) -> None:
        self._cancel_head_timeout()
        self._since = self.loop.time()
        self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _cancel_head_timeout(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


def room_for(connections: int) -> int:
    """Returns for how many connections, at most `connections`, there are descriptors. Raises the process's limit if it is too low."""
    if find_spec("resource") is None:  # Windows
        return connections
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    with contextlib.suppress(OSError, ValueError):
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(_FEWEST, min(connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_DESCRIPTORS))


def server_config(app: App, connections: int) -> uvicorn.Config:
    """Returns the uvicorn configuration for at most `connections` simultaneous connections."""
    return uvicorn.Config(
        app,
        http=TimedProtocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        limit_concurrency=room_for(connections),
        backlog=_ACCEPTED,
    )


def run_server(config: uvicorn.Config, stop: Callable[[], None], listener: socket.socket) -> None:
    """Runs until a signal. Then `stop` is called first, because uvicorn would otherwise wait for all responses to end."""

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            listener.listen(_BACKLOG)  # asyncio has set the system's backlog to `_ACCEPTED`

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            stop()
            super().handle_exit(sig, frame)

    # uvicorn raises the signal again after its shutdown; it must have no second effect.
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        Server(config).run(sockets=[listener])
    finally:
        for number, action in previous.items():
            signal.signal(number, action)
