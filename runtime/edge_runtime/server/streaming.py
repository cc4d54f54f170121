"""A request in the event loop: turns the worker's stream events into one response or into server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from edge_runtime.server.engine.jobs import Failed, Finished, Output, StreamEvent
from edge_runtime.server.engine.worker import Worker
from edge_runtime.server.errors import to_api_error
from edge_runtime.server.requests.completions import CompletionRequest
from edge_runtime.server.responses import Json, ResponseFormat, usage
from edge_runtime.text.channels import Event

Result = TypeVar("Result")


class ClientDisconnected(Exception):
    """The client closed the connection before the response was complete."""


class PendingResponse:
    """One submitted request. Call `wait_started`, then either `complete` or `stream` once; always call `cancel` at the end."""

    def __init__(self, worker: Worker, request: CompletionRequest, form: ResponseFormat) -> None:
        """Raises ApiError if the worker's queue is full."""
        self._request = request
        self._form = form
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._job = worker.submit(request, self._deliver)

    def cancel(self) -> None:
        """Ends the request early; has no effect on a finished one."""
        self._job.cancel()

    async def wait_started(self) -> None:
        """Waits until a session takes the request. Raises ApiError if it is refused."""
        await self._next()

    async def complete(self) -> Json:
        """Returns the complete answer in one object. Raises ApiError."""
        events: list[Event] = []
        while True:
            event = await self._next()
            if isinstance(event, Output):
                events += event.events
            elif isinstance(event, Finished):
                return self._form.complete(events, event.reason) | {"usage": usage(event.stats, event.energy)}

    async def stream(self) -> AsyncIterator[bytes]:
        """Yields the answer as server-sent events. A failure is the last event."""
        for chunk in self._form.first():
            yield self._chunk(chunk)
        while True:
            event = await self._events.get()
            if isinstance(event, Failed):
                yield _encoded(to_api_error(event.error).to_json())
                return
            if isinstance(event, Output):
                for chunk in self._form.chunks(event.events):
                    yield self._chunk(chunk, usage(event.stats))
            elif isinstance(event, Finished):
                final_usage = usage(event.stats, event.energy)
                yield self._chunk(self._form.last(event.reason), final_usage)
                if self._request.usage_at_end:
                    yield _encoded(self._form.usage_chunk() | {"usage": final_usage})
                yield b"data: [DONE]\n\n"
                return

    async def _next(self) -> StreamEvent:
        event = await self._events.get()
        if isinstance(event, Failed):
            raise to_api_error(event.error) from event.error
        return event

    def _chunk(self, chunk: Json, usage_so_far: Json | None = None) -> bytes:
        if self._request.usage_always:
            return _encoded(chunk | {"usage": usage_so_far})
        return _encoded(chunk | {"usage": None} if self._request.usage_at_end else chunk)

    def _deliver(self, event: StreamEvent) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so there is no client left
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


async def unless_disconnected(receive: Callable[[], Awaitable[MutableMapping[str, Any]]], work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`; cancels it and raises ClientDisconnected if the client disconnects first.

    The request's body must have been read before.
    """
    work_task, disconnect_task = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientDisconnected
        return work_task.result()
    finally:
        work_task.cancel()
        disconnect_task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


async def _disconnected(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _encoded(value: Json) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"
