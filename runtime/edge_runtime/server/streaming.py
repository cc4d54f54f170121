"""The event loop's side of a request: the worker's news made into a whole answer or a stream of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from edge_runtime.server.engine.jobs import Ended, Failed, Figures, News, Said
from edge_runtime.server.engine.worker import Worker
from edge_runtime.server.errors import told
from edge_runtime.server.requests.completions import Ask
from edge_runtime.server.responses import Form, Json, usage
from edge_runtime.text.channels import Event

Result = TypeVar("Result")


class ClientGone(Exception):
    """Nobody listens any more."""


class Reply:
    """One request at the worker; `cancel` it whatever happens. Use either `whole` or `stream`, once, after `begun`."""

    def __init__(self, worker: Worker, ask: Ask, form: Form) -> None:
        """Raises ApiError if the worker takes no more."""
        self._ask = ask
        self._form = form
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._job = worker.submit(ask, self._deliver)

    def cancel(self) -> None:
        """Ends the request early; harmless when it is over."""
        self._job.cancel()

    async def begun(self) -> None:
        """Waits until a session took the request. Raises ApiError if none will."""
        await self._next()

    async def whole(self) -> Json:
        """Returns the answer in one object. Raises ApiError."""
        events: list[Event] = []
        while True:
            news = await self._next()
            if isinstance(news, Said):
                events += news.events
            elif isinstance(news, Ended):
                return self._form.whole(events, news.finish) | {"usage": usage(news.figures)}

    async def stream(self) -> AsyncIterator[bytes]:
        """Yields the answer's server-sent events; a failure is one of them, and the last."""
        for chunk in self._form.first():
            yield self._sent(chunk)
        while True:
            news = await self._news.get()
            if isinstance(news, Failed):
                yield _event(told(news.error).to_json())
                return
            if isinstance(news, Said):
                for chunk in self._form.chunk(news.events):
                    yield self._sent(chunk, news.figures)
            elif isinstance(news, Ended):
                yield self._sent(self._form.last(news.finish), news.figures)
                if self._ask.usage_at_end:
                    yield _event(self._form.usage_only() | {"usage": usage(news.figures)})
                yield b"data: [DONE]\n\n"
                return

    async def _next(self) -> News:
        news = await self._news.get()
        if isinstance(news, Failed):
            raise told(news.error) from news.error
        return news

    def _sent(self, chunk: Json, figures: Figures | None = None) -> bytes:
        if self._ask.usage_always:
            return _event(chunk | {"usage": None if figures is None else usage(figures)})
        return _event(chunk | {"usage": None} if self._ask.usage_at_end else chunk)

    def _deliver(self, news: News) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all clients with it
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)


async def unless_gone(receive: Callable[[], Awaitable[MutableMapping[str, Any]]], work: Coroutine[Any, Any, Result]) -> Result:
    """Returns what `work` returns; raises ClientGone, and ends it, when the client leaves first. The request's body must be read."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(value: Json) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"
