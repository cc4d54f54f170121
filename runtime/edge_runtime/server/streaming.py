"""A request in the event loop: turns the worker's stream events into a single response or a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from typing import Any, TypeVar

from edge_runtime.server.apis.response_format import ChoiceAnswer, ResponseFormat, UsageCount
from edge_runtime.server.engine.jobs import Failed, Finished, Output, Started, StreamEvent
from edge_runtime.server.engine.worker import Worker
from edge_runtime.server.errors import invalid, to_api_error
from edge_runtime.server.json_text import Json
from edge_runtime.server.requests.completions import ApiRequest
from edge_runtime.session.monitor import DecodeStats
from edge_runtime.text.channels import Event

Result = TypeVar("Result")
# The most log probabilities of an answer that is sent as a whole; they take about 10 MB.
MAX_LOGPROBS = 1 << 17
# A stream that is silent for longer looks broken to clients and proxies.
IDLE_SECONDS = 10.0


def check_logprobs(request: ApiRequest, context: int) -> None:
    """Raises ApiError if a whole answer may have too many log probabilities, rather than after minutes of computing it."""
    stated = [(choice.max_tokens, 1 + choice.logprobs) for choice in request.choices if choice.logprobs is not None]
    count = sum(min(tokens, context) * entries for tokens, entries in stated if tokens is not None)
    if count > MAX_LOGPROBS and not request.stream:
        reason = f"the answer may have {count} log probabilities, more than {MAX_LOGPROBS}"
        raise invalid(f"{reason}; stream it, or ask for fewer tokens or alternatives", "logprobs")


class ClientDisconnected(Exception):
    """The client closed the connection before the response was complete."""


class PendingResponse:
    """One submitted request of a client. Call `wait_started`, then `complete` or `stream` once. Always call `cancel` at the end.

    The request keeps its place in the queue until its answer is sent: `cancel` gives it back. If the client reads slowly, the worker
    pauses the request until the client has caught up.
    """

    def __init__(self, worker: Worker, request: ApiRequest, form: ResponseFormat, client: int) -> None:
        """Raises ApiError if the worker's queue is full."""
        self._form = form
        self._choices = len(request.choices)
        self._usage = UsageCount(self._choices, request.n)
        self._events: asyncio.Queue[tuple[int, StreamEvent]] = asyncio.Queue()
        self._prompt_tokens = 0
        self._loop = asyncio.get_running_loop()
        self._jobs = worker.submit(request.choices, self._deliver, client)

    @property
    def stats(self) -> DecodeStats:
        """The figures of the answers so far."""
        return self._usage.stats

    @property
    def media_type(self) -> str:
        return self._form.media_type

    def cancel(self) -> None:
        """Ends the request early, or releases the jobs of a finished one, which refer to this object."""
        for job in self._jobs:
            job.cancel()
        self._jobs = []

    async def wait_started(self) -> None:
        """Waits until a session takes the request's first choice. Raises ApiError if the request is refused."""
        _, event = await self._next()
        assert isinstance(event, Started)
        self._prompt_tokens = event.prompt_tokens

    async def complete(self) -> Json:
        """Returns the complete answer as one object. Raises ApiError."""
        events: list[list[Event]] = [[] for _ in range(self._choices)]
        logprobs = [self._form.logprobs() for _ in range(self._choices)]
        finished: dict[int, Finished] = {}
        count = 0
        while len(finished) < self._choices:
            choice, event = await self._next()
            self._count(choice, event)
            if isinstance(event, Output):
                await asyncio.sleep(0)  # gives other requests their turn when many events are waiting
                events[choice] += event.events
                logprobs[choice].add(event.logprobs)
                if (count := count + sum(1 + len(entry.top) for entry in event.logprobs)) > MAX_LOGPROBS:
                    raise invalid(f"the answer has more than {MAX_LOGPROBS} log probabilities; stream it, or ask for fewer", "logprobs")
            elif isinstance(event, Finished):
                finished[choice] = event
        answers = (ChoiceAnswer(events=events[i], logprobs=logprobs[i], finished=finished[i]) for i in range(self._choices))
        return self._form.complete([*answers])

    async def stream(self) -> AsyncIterator[bytes]:
        """Yields the answer in pieces. After a failure, the last piece is the error."""
        running = self._choices
        for piece in self._form.begin(self._prompt_tokens):
            yield piece
        while running:
            try:
                choice, event = await self._take(IDLE_SECONDS)
            except TimeoutError:
                for piece in self._form.idle():
                    yield piece
                continue
            self._count(choice, event)
            pieces: list[bytes] = []
            if isinstance(event, Failed):
                self.cancel()
                pieces, running = self._form.failed(to_api_error(event.error)), 0
            elif isinstance(event, Output):
                pieces = self._form.output(choice, event)
            elif isinstance(event, Finished):
                running -= 1
                self._jobs[choice].place.leave("reader")  # before the last piece: a client that has it finds the place free
                pieces = self._form.end(choice, event) + ([] if running else self._form.finish())
            for piece in pieces:
                yield piece

    def _count(self, choice: int, event: StreamEvent) -> None:
        if isinstance(event, Output | Finished):
            self._usage.update(choice, event.stats)

    async def _take(self, seconds: float | None = None) -> tuple[int, StreamEvent]:
        """Waits for the next event. Raises TimeoutError after `seconds` without one."""
        async with asyncio.timeout(seconds):
            choice, event = await self._events.get()
        self._jobs[choice].unread.take()
        return choice, event

    async def _next(self) -> tuple[int, StreamEvent]:
        choice, event = await self._take()
        if isinstance(event, Failed):
            try:
                raise to_api_error(event.error)
            finally:
                del event  # a frame that refers to its own error stays until garbage collection
        return choice, event

    def _deliver(self, choice: int, event: StreamEvent) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so there is no client left
            self._loop.call_soon_threadsafe(self._events.put_nowait, (choice, event))


async def result_of(future: Future[Result]) -> Result:
    """Returns the result of another thread's work. If the waiting task is cancelled, work that has not begun is cancelled too.

    `asyncio.wrap_future` would tie two futures to each other, so that each result stays in memory until garbage collection.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: Future[Result]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    try:
        await done.wait()
        return future.result()
    finally:
        future.cancel()
        del future  # its error's traceback refers to this frame


async def unless_disconnected(receive: Callable[[], Awaitable[MutableMapping[str, Any]]], work: Awaitable[Result]) -> Result:
    """Returns the result of `work`; cancels it and raises ClientDisconnected if the client disconnects first.

    The request's body must already have been read.
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
        del work, work_task, disconnect_task  # a task's error refers to this frame, which must not refer to the task


async def _disconnected(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
