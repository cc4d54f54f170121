"""The one thread that uses the sessions: it accepts requests, assigns them to sessions and runs their rounds in lockstep."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from edge_devices.children import ChildBudget
from edge_devices.energy.live import SharedWatch
from edge_runtime.errors import EdgeRuntimeError, RequestError
from edge_runtime.server.engine.jobs import ActiveRequest, Failed, Job, QueuePlace, StreamEvent, Unread
from edge_runtime.server.engine.prompts import Prompts, is_short, media_of
from edge_runtime.server.engine.schedule import LONGEST_TURN, FairPool, Places, Slot, Turns, choose_slot, has_room
from edge_runtime.server.errors import ApiError, to_api_error
from edge_runtime.server.requests.completions import CompletionRequest, Prompt
from edge_runtime.server.requests.messages import Conversation, SentMedia
from edge_runtime.session.batch import Sessions
from edge_runtime.session.generation import Generation
from edge_runtime.session.monitor import DecodeStats
from edge_runtime.text.channels import after_thoughts
from edge_runtime.text.chat_template import ChatTemplate

Result = TypeVar("Result")
# Number of constraints that are compiled at the same time, each in its own process.
COMPILERS = 2
# Number of requests whose images and sound are decoded at the same time, each file in its own process. The seconds are processor time for
# all media of one request.
DECODERS = 2
DECODING_SECONDS = 30.0


class Worker:
    """Serves requests on `sessions` until it is closed. Beside one request per session, `waiting` more may wait.

    Any thread may submit. `notify` gets messages for the operator that clients do not see; `watch` measures each request's energy.
    """

    def __init__(
        self,
        sessions: Sessions,
        template: ChatTemplate,
        *,
        waiting: int,
        notify: Callable[[str], None],
        watch: SharedWatch | None = None,
        deterministic: bool = False,
        alone: bool = False,
        exact: bool = False,
        clients: Sequence[str] = ("",),
        max_tokens: int | None = None,
    ) -> None:
        """With `deterministic`, no answer depends on what other requests left in the caches. With `alone`, one request runs at a time.

        `exact` says that a row of the KV cache has the same bits however it was computed, so that reusing rows changes no answer. Each of
        several `clients`, given by their names, gets a fair share of queue, sessions and time, and its own prompts in the prompt cache. An
        answer has at most `max_tokens`.
        """
        self._client_names = clients
        self._deterministic, self._alone, self._exact = deterministic, alone, exact
        self._max_tokens = max_tokens
        self._sessions = sessions.sessions
        self._lockstep = sessions.decoder
        if len(clients) > 1 and exact:  # inexact rows would change with the length of a prompt's pieces
            self._lockstep.longest_piece = LONGEST_TURN
        self._template = template
        self._places = Places(len(self._sessions) + waiting, len(clients))
        self._notify = notify
        self.watch = watch
        # SimpleQueue.put is reentrant, so a signal handler may call it at any time.
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stopping = False
        self._lock = threading.Lock()
        self._children: weakref.WeakSet[ChildBudget] = weakref.WeakSet()
        self._waiting: list[Job] = []
        self._active: dict[Generation, ActiveRequest] = {}
        self._suspended: list[ActiveRequest] = []
        self._last_used = [0] * len(self._sessions)
        self._clients = [0] * len(self._sessions)
        self._turns, self._swap_seconds = Turns(len(self._sessions)), 0.0
        self._clock = 0
        self._thread = threading.Thread(target=self._run, name="edge-mtp worker", daemon=True)
        # Templates and tokenizers run in their own threads, so that a long prompt delays neither rounds nor other clients' short prompts.
        self._prompts = Prompts(sessions.sessions[0], template)
        self._readers = FairPool(1, "edge-mtp bodies")
        self._encoder = FairPool(1, "edge-mtp prompts")
        self._long_encoder = FairPool(1, "edge-mtp prompts, long")
        self._decoders = FairPool(DECODERS, "edge-mtp media")
        self._compilers = FairPool(COMPILERS, "edge-mtp constraints")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Requests a shutdown, which fails all requests in progress. Returns at once; safe to call from a signal handler."""
        self._stopping = True
        self._wake()

    def close(self) -> None:
        """Stops the worker and waits for its thread."""
        self.stop()
        self._thread.join()

    def load(self) -> tuple[int, int]:
        """Returns the numbers of running and of waiting requests."""
        running = len(self._active)
        return running, max(0, self._places.total() - running)

    def slots(self) -> list[DecodeStats | None]:
        """Returns the figures of the request on each session; None for a session that runs none."""
        running = {active.slot: active.generation.stats for active in list(self._active.values())}
        return [running.get(number) for number in range(len(self._sessions))]

    def read(self, work: Callable[[], Result], client: int) -> Future[Result]:
        """Runs `work`, which parses a large body, in another thread, because it would block the event loop. Errors as in `decode`."""
        return self._queued(work, self._readers, client)

    def encode(self, prompt: Prompt, client: int, *, special: bool = True) -> Future[list[int]]:
        """Returns a prompt's token ids, computed in another thread. Errors as in `decode`, and those of the template."""
        return self._queued(functools.partial(self._prompts.encode, prompt, special=special), self._encoder_of(prompt), client)

    def count(self, prompt: Prompt, client: int) -> Future[int]:
        """Counts a prompt's tokens, including those of its images and sound, in another thread. Errors as in `decode`."""
        pool = self._decoders if media_of(prompt) else self._encoder_of(prompt)
        children = ChildBudget(DECODING_SECONDS)
        with self._lock:
            self._children.add(children)
        return self._queued(lambda: self._prompts.count(prompt, client, children), pool, client)

    def decode(self, tokens: Sequence[int], client: int) -> Future[str]:
        """Returns the text of tokens, control tokens included, computed in the thread for prompts.

        If the future is cancelled before its turn, nothing is computed. It raises RequestError for ids outside the vocabulary. This call
        raises ApiError as `Places.take` does, and with status 503 if the server is shutting down.
        """
        return self._queued(functools.partial(self._prompts.decode, tokens), self._encoder, client)

    def submit(self, requests: Sequence[CompletionRequest], deliver: Callable[[int, StreamEvent], None], client: int = 0) -> list[Job]:
        """Accepts all `requests` of a client, or none. `deliver` gets each event with the index of its request.

        Raises ApiError as `decode` does.
        """
        with self._lock:
            self._accept(client, len(requests))
            children, unread = ChildBudget(DECODING_SECONDS), Unread(self._wake)
            self._children.add(children)
            jobs = [
                Job(
                    request,
                    functools.partial(deliver, number),
                    children,
                    client,
                    QueuePlace(functools.partial(self._places.give_back, client)),
                    unread,
                )
                for number, request in enumerate(requests)
            ]
            for _, group in itertools.groupby(jobs, lambda job: id(job.request.prompt)):
                same = list(group)
                encoder = self._encoder_of(same[0].request.prompt, same[0].request.prediction)
                encoder.submit(client, functools.partial(self._admit, same))
        return jobs

    def _encoder_of(self, prompt: Prompt, prediction: str = "") -> FairPool:
        return self._encoder if is_short(prompt, prediction) else self._long_encoder

    def _queued(self, work: Callable[[], Result], pool: FairPool, client: int) -> Future[Result]:
        """Queues work in `pool`; it counts as a request until it is done."""
        with self._lock:
            self._accept(client)
            future = pool.submit(client, work)
        future.add_done_callback(lambda _: self._places.give_back(client))
        return future

    def _accept(self, client: int, requests: int = 1) -> None:
        """Takes places for requests. Raises ApiError as `decode` does. The caller must hold the lock."""
        if self._stopping:
            raise shutting_down()
        self._places.take(client, requests)

    def _wake(self) -> None:
        """Makes the worker's thread look for changes."""
        self._inbox.put(None)

    def _run(self) -> None:
        while not self._stopping:
            self._receive()
            try:
                self._drop_cancelled()
                self._continue_stalled()
                self._assign()
                if self._lockstep.running:
                    self._step()
            except Exception as error:  # noqa: BLE001 - no failure of one request may end the worker
                self._fail_all(error)
        with self._lock:
            for children in self._children:
                children.cancel()
        for pool in (
            self._readers,
            self._encoder,
            self._long_encoder,
            self._decoders,
            self._compilers,
        ):  # in the order in which jobs pass through them
            pool.shutdown()
        self._receive()
        self._fail_all(shutting_down())

    def _receive(self) -> None:
        """Takes submitted jobs from the queue; blocks if there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            if self._lockstep.running or self._stopping:
                job = self._inbox.get_nowait()
            else:  # if all sessions are stalled, a waiting request may get one when its turn comes, without a message in the inbox
                job = self._inbox.get(timeout=self._turns.seconds if self._waiting or self._suspended else None)
            while True:
                if job is not None:
                    self._waiting.append(job)
                job = self._inbox.get_nowait()

    def _admit(self, jobs: Sequence[Job]) -> None:
        """Encodes the prompt and the prediction that the jobs share, in a thread for prompts, and passes the jobs on."""
        with self._or_fail(jobs):
            request, media = jobs[0].request, media_of(jobs[0].request.prompt)
            if self._still_wanted(jobs):
                if media:
                    self._sessions[0].check_media()
                ids, prediction = self._prompts.encode(request.prompt), self._prompts.predicted(request.prediction)
                for job in jobs:
                    job.prompt, job.prediction = ids, prediction
            if media:
                self._decoders.submit(jobs[0].client, functools.partial(self._decode, jobs, media))
            else:
                self._encoded(jobs)

    def _decode(self, jobs: Sequence[Job], media: Sequence[SentMedia]) -> None:
        """Adds images and sound to the prompt that the jobs share. It has its own threads, because a hostile file uses all its time."""
        with self._or_fail(jobs):
            if self._still_wanted(jobs):
                prompt = self._prompts.with_media(jobs[0].ids, [sent.decoded(jobs[0].children) for sent in media], jobs[0].client)
                for job in jobs:
                    job.prompt = prompt
            self._encoded(jobs)

    def _encoded(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.request.constraint is None:
                self._inbox.put(job)
            else:
                self._compilers.submit(job.client, functools.partial(self._compile, job))

    def _still_wanted(self, jobs: Sequence[Job]) -> bool:
        return not (self._stopping or all(job.cancelled for job in jobs))

    @contextlib.contextmanager
    def _or_fail(self, jobs: Sequence[Job]) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a chat template is a program of the bundle and may raise anything
            for job in jobs:
                self._fail(job, error)

    def _compile(self, job: Job) -> None:
        """Compiles a job's constraint. It has its own threads, because this may take seconds, in which other requests continue."""
        with self._or_fail([job]):
            if self._still_wanted([job]):
                session, prompt = self._sessions[0], job.request.prompt
                thinking = isinstance(prompt, Conversation) and prompt.thinking
                constraint = after_thoughts(job.request.constraint, session.vocabulary, job.ids, thinking=thinking)
                job.constraint = session.compile_constraint(constraint)
            self._inbox.put(job)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            job.place.leave("worker")
        for active in [active for active in (*self._active.values(), *self._suspended) if active.job.cancelled]:
            self._release(active)

    def _continue_stalled(self) -> None:
        """Continues stalled requests whose readers have caught up."""
        for active in self._active.values():
            if active.stalled and not active.job.unread.full:
                active.stalled = False
                self._lockstep.join(active.generation)

    def _assign(self) -> None:
        """Assigns waiting and suspended requests to free sessions. If none is free, suspends a request whose turn is over."""
        while ready := [*(active.client for active in self._ready()), *(job.client for job in self._waiting)]:
            held = [*self._active.values()]
            client = self._turns.next_of(ready, held)
            if slots := self._free_slots():
                self._turns.took(client)
                suspended = next((active for active in self._ready() if active.client == client), None)
                if suspended is not None:
                    self._resume(suspended, min(slots, key=lambda slot: slot.last_used))
                else:
                    self._begin(*choose_slot(slots, [job for job in self._waiting if job.client == client], self._may_reuse))
            elif (active := self._turns.gives_way(held, client, time.monotonic())) is None or not self._suspend(active):
                return

    def _ready(self) -> Iterator[ActiveRequest]:
        """The suspended requests whose readers have caught up."""
        return (active for active in self._suspended if not active.job.unread.full)

    def _free_slots(self) -> list[Slot]:
        if self._alone and self._active:
            return []
        used = {active.slot for active in self._active.values()}
        return [
            Slot(number=i, target=session.target, last_used=self._last_used[i], client=self._clients[i])
            for i, session in enumerate(self._sessions)
            if i not in used
        ]

    def _begin(self, slot: Slot, job: Job) -> None:
        self._waiting.remove(job)
        reuse, name = self._may_reuse(job), self._client_names[job.client]
        try:
            self._give(slot, job.client)
            active = ActiveRequest(
                job,
                slot.number,
                self._sessions[slot.number],
                self._template,
                self.watch,
                reuse_prefix=reuse,
                client=name,
                max_tokens=self._max_tokens,
            )
        except EdgeRuntimeError as error:
            self._fail(job, error)
            return
        self._active[active.generation] = active
        self._lockstep.join(active.generation)
        active.begin()

    def _may_reuse(self, job: Job) -> bool:
        """Whether a request may use rows that another one computed. With a seed, only exact rows: the answer must not change."""
        return not self._deterministic and (self._exact or not job.request.repeatable)

    def _give(self, slot: Slot, client: int) -> None:
        """Gives a session to a client. Another client's rows are dropped at once: `cached_tokens` and times would reveal them."""
        if client != slot.client:
            with self._sessions[slot.number].exclusive():
                slot.target.rollback(0)
            self._clients[slot.number] = client

    def _suspend(self, active: ActiveRequest) -> bool:
        """Frees a session: copies the rows of its request out. Returns whether that was possible."""
        begin = time.monotonic()
        if self._alone:
            return False
        try:
            if not has_room(active.generation.target):
                raise MemoryError
            active.generation.suspend()
        except (EdgeRuntimeError, MemoryError):
            active.since = begin  # it keeps its session for one more turn
            return False
        self._vacate(active)
        self._suspended.append(active)
        self._swap_seconds = time.monotonic() - begin
        return True

    def _resume(self, active: ActiveRequest, slot: Slot) -> None:
        begin = time.monotonic()
        self._suspended.remove(active)
        active.slot, active.stalled = slot.number, False
        try:
            self._give(slot, active.client)
            self._sessions[slot.number].resume(active.generation)
        except EdgeRuntimeError as error:
            self._end(active)
            self._fail(active.job, error)
            return
        self._active[active.generation] = active
        self._lockstep.join(active.generation)
        active.since = time.monotonic()
        self._turns.swapped(self._swap_seconds + active.since - begin)

    def _step(self) -> None:
        for generation, newest in self._lockstep.step():
            self._active[generation].take(newest)
        for generation, error in self._lockstep.failures:
            self._release(failed := self._active[generation])
            self._fail(failed.job, error)
        going = set(self._lockstep.running)
        ended = [active for active in self._active.values() if active.stopped or not (active.stalled or active.generation in going)]
        for running in ended:
            self._release(running)  # before the last event: a client that has its answer finds the slot free
            running.end()
        if not self._alone:
            for active in self._active.values():
                if active.job.unread.full and not active.stalled:
                    active.stalled = True
                    self._lockstep.remove(active.generation)

    def _release(self, active: ActiveRequest) -> None:
        """Frees a request's session. The KV cache is kept for the next prompt with the same prefix."""
        if active in self._suspended:
            self._suspended.remove(active)
        else:
            self._vacate(active)
        self._end(active)

    def _vacate(self, active: ActiveRequest) -> None:
        self._lockstep.remove(active.generation)
        del self._active[active.generation]
        self._clock += 1
        self._last_used[active.slot] = self._clock

    def _end(self, active: ActiveRequest) -> None:
        """Ends the measurements of a request that has left its session, and records its figures."""
        active.end_energy()
        active.job.place.leave("worker")
        try:
            self._sessions[active.slot].record(active.generation)
        except EdgeRuntimeError as error:
            self._notify(str(error))

    def _fail(self, job: Job, error: Exception) -> None:
        job.place.leave("worker")
        if not isinstance(error, RequestError | ApiError):
            self._notify(str(error) if isinstance(error, EdgeRuntimeError) else "".join(traceback.format_exception(error)))
        # Without its traceback, whose frames would keep the request, and the error itself, in memory.
        job.deliver(Failed(error=to_api_error(error).alone()))

    def _fail_all(self, error: Exception) -> None:
        """Fails every request with `error` and clears the caches, whose contents can no longer be trusted."""
        begun = [*self._active.values(), *self._suspended]
        for active in begun:
            active.end_energy()
        jobs = [*self._waiting, *(active.job for active in begun)]
        for requests in (self._waiting, self._active, self._suspended):
            requests.clear()
        for job in jobs:
            self._fail(job, error)
        with contextlib.suppress(EdgeRuntimeError):
            self._lockstep.clear()


def shutting_down() -> ApiError:
    """Returns the error for requests that arrive or wait while the server shuts down."""
    return ApiError(503, "the server is shutting down; try again when it is back", code="shutting_down")
