"""The one thread that touches the sessions: it takes requests in, gives them to sessions, and runs their rounds in step."""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable

from edge_devices.energy.live import SharedWatch
from edge_runtime.errors import EdgeRuntimeError, RequestError
from edge_runtime.server.engine.active_request import Running
from edge_runtime.server.engine.jobs import Failed, Job, News
from edge_runtime.server.engine.slots import Seat, choose_slot
from edge_runtime.server.errors import ApiError
from edge_runtime.server.requests.completions import Ask
from edge_runtime.server.requests.messages import Conversation
from edge_runtime.session.generation import Generation
from edge_runtime.session.open import Sessions
from edge_runtime.text.chat_template import ChatTemplate

RETRY_SECONDS = 2


class Worker:
    """Serves requests on `sessions` until it is closed; `waiting` more than there are sessions may wait.

    Any thread may submit. `note` gets a sentence about what the client is not told; `watch` sees what energy each request took.
    """

    def __init__(
        self, sessions: Sessions, template: ChatTemplate, *, waiting: int, note: Callable[[str], None], watch: SharedWatch | None = None
    ) -> None:
        self._sessions = sessions.sessions
        self._lockstep = sessions.lockstep
        self._template = template
        self._capacity = len(self._sessions) + waiting
        self._note = note
        self._watch = watch
        # A SimpleQueue, because a signal's code may put into it at any time.
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stopping = False
        self._lock = threading.Lock()
        self._submitted = 0
        self._waiting: list[Job] = []
        self._running: dict[Generation, Running] = {}
        self._last_used = [0] * len(self._sessions)
        self._clock = 0
        self._thread = threading.Thread(target=self._run, name="edge-mtp worker", daemon=True)

    def start(self) -> None:
        """Begins to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Asks it to end: requests that are under way fail. Returns at once; a signal's code may call it."""
        self._stopping = True
        self._inbox.put(None)

    def close(self) -> None:
        """Ends it and waits for that."""
        self.stop()
        self._thread.join()

    def load(self) -> tuple[int, int]:
        """Returns how many requests run and how many wait."""
        running = len(self._running)
        return running, max(0, self._submitted - running)

    def submit(self, ask: Ask, deliver: Callable[[News], None]) -> Job:
        """Takes a request. Raises ApiError (503) if too many wait or it is ending."""
        with self._lock:
            if self._stopping:
                raise _ending()
            if self._submitted >= self._capacity:
                raise ApiError(
                    503,
                    f"{self._submitted} requests are running or waiting, as many as may; try again soon",
                    code="queue_full",
                    headers={"Retry-After": str(RETRY_SECONDS)},
                )
            self._submitted += 1
        job = Job(ask, deliver)
        self._inbox.put(job)
        return job

    def _run(self) -> None:
        while not self._stopping:
            self._receive()
            try:
                self._call_off()
                self._place()
                self._step()
            except Exception as error:  # noqa: BLE001 - whatever it was, the next request deserves an answer
                self._fail_all(error)
        self._receive()
        self._fail_all(_ending())

    def _receive(self) -> None:
        """Takes in what was submitted; waits for something if there is nothing to do."""
        with contextlib.suppress(queue.Empty):
            job = self._inbox.get(block=not (self._waiting or self._running or self._stopping))
            while True:
                if job is not None:
                    self._admit(job)
                job = self._inbox.get_nowait()

    def _admit(self, job: Job) -> None:
        try:
            job.ids = self._encode(job.ask)
        except Exception as error:  # noqa: BLE001 - a template is a program from outside: it may fail in its own ways
            self._fail(job, error)
        else:
            self._waiting.append(job)

    def _encode(self, ask: Ask) -> list[int]:
        """Returns the prompt's token ids. Raises RequestError if they do not fit."""
        session = self._sessions[0]
        if isinstance(ask.prompt, Conversation):
            talk = ask.prompt
            ids = self._template.encode(talk.messages, tools=talk.tools, thinking=talk.thinking)
        else:
            ids = session.vocabulary.encode(ask.prompt) if isinstance(ask.prompt, str) else list(ask.prompt)
        size = session.bundle.manifest.architecture.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            raise RequestError(f"the prompt has a token id outside 0..{size - 1}; check where it came from")
        if len(ids) >= session.target.context:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens, the context holds {session.target.context} with the answer; shorten it",
                code="context_length_exceeded",
            )
        return ids

    def _call_off(self) -> None:
        """Lets go of requests that nobody waits for."""
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            self._finished()
        for one in [one for one in self._running.values() if one.job.cancelled]:
            self._release(one)

    def _place(self) -> None:
        """Gives waiting requests to free sessions."""
        taken = {one.seat for one in self._running.values()}
        seats = [
            Seat(number=i, target=session.target, last_used=self._last_used[i])
            for i, session in enumerate(self._sessions)
            if i not in taken
        ]
        while seats and self._waiting:
            seat, job = choose_slot(seats, self._waiting)
            self._waiting.remove(job)
            try:
                one = Running(job, seat.number, self._sessions[seat.number], self._template, self._watch)
            except EdgeRuntimeError as error:
                self._fail(job, error)
                continue
            seats.remove(seat)
            self._running[one.generation] = one
            self._lockstep.join(one.generation)
            one.begin()

    def _step(self) -> None:
        for generation, one in self._lockstep.step():
            self._running[generation].take(one)
        for generation, error in self._lockstep.failures:
            self._release(failed := self._running[generation])
            self._fail(failed.job, error, counted=False)
        going = set(self._lockstep.running)
        for running in [one for one in self._running.values() if one.stopped or one.generation not in going]:
            self._release(running)  # first, so that who has an answer finds it counted and may ask again
            running.end()

    def _release(self, one: Running) -> None:
        """Frees a request's session; its rows stay for the next prompt that begins with them."""
        one.conclude()
        self._lockstep.remove(one.generation)
        del self._running[one.generation]
        self._clock += 1
        self._last_used[one.seat] = self._clock
        self._finished()
        try:
            self._sessions[one.seat].record(one.generation)
        except EdgeRuntimeError as error:
            self._note(str(error))

    def _finished(self) -> None:
        with self._lock:
            self._submitted -= 1

    def _fail(self, job: Job, error: Exception, *, counted: bool = True) -> None:
        if counted:
            self._finished()
        if not isinstance(error, RequestError | ApiError):
            self._note(str(error) if isinstance(error, EdgeRuntimeError) else "".join(traceback.format_exception(error)))
        job.deliver(Failed(error=error))

    def _fail_all(self, error: Exception) -> None:
        """Ends every request with `error`; the caches are not trusted any more."""
        for one in self._running.values():
            one.conclude()
        jobs = [*self._waiting, *(one.job for one in self._running.values())]
        self._waiting.clear()
        self._running.clear()
        for job in jobs:
            self._fail(job, error)
        with contextlib.suppress(EdgeRuntimeError):
            self._lockstep.clear()


def _ending() -> ApiError:
    return ApiError(503, "the server is ending; try again when it is back", code="shutting_down")
