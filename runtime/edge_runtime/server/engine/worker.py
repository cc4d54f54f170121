"""The one thread that uses the sessions: accepts requests, assigns them to sessions and runs their rounds in lockstep."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from edge_devices.children.running import ChildBudget
from edge_devices.energy.live import SharedWatch
from edge_runtime.errors import EdgeRuntimeError, RequestError
from edge_runtime.interfaces import Target
from edge_runtime.server.engine.active_request import ActiveRequest
from edge_runtime.server.engine.fair_share import FairPool, Places
from edge_runtime.server.engine.jobs import Failed, Job, StreamEvent
from edge_runtime.server.engine.prompts import Prompts, is_short, media_of
from edge_runtime.server.errors import ApiError, to_api_error
from edge_runtime.server.requests.completions import CompletionRequest, Prompt
from edge_runtime.server.requests.messages import SentMedia
from edge_runtime.session.batch import Sessions
from edge_runtime.session.generation import Generation, reusable_prefix
from edge_runtime.session.stats import DecodeStats
from edge_runtime.text.chat_template import ChatTemplate

Result = TypeVar("Result")
# Constraints that are compiled at the same time, each in a process of its own.
COMPILERS = 2
# Requests whose images and sound are decoded at the same time, each file in a process of its own, and the processor time for all of one
# request's.
DECODERS = 2
DECODING_SECONDS = 30.0
# A request that was passed over this often is served next.
MAX_PASSED_OVER = 4


class Worker:
    """Serves requests on `sessions` until it is closed; `waiting` requests may wait beyond one per session.

    Any thread may submit. `notify` gets messages for the operator that clients do not get; `watch` measures each request's energy.
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
    ) -> None:
        """With `deterministic`, no answer depends on what other requests left in the caches; with `alone`, one request runs at a time.

        `exact` says that rows have the same bits however they were computed: then rows that are there already change no answer.
        Each of several `clients`, by their names, has its share of the queue and of the turns, and prompts of its own in the prompt cache.
        """
        self._client_names = clients
        self._deterministic, self._alone, self._exact = deterministic, alone, exact
        self._sessions = sessions.sessions
        self._lockstep = sessions.decoder
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
        self._last_used = [0] * len(self._sessions)
        self._clients = [0] * len(self._sessions)
        self._turns: dict[int, int] = {}
        self._clock = 0
        self._thread = threading.Thread(target=self._run, name="edge-mtp worker", daemon=True)
        # Templates and tokenizers have threads of their own, so that a long prompt delays neither rounds nor the short prompts of others.
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
        self._inbox.put(None)

    def close(self) -> None:
        """Stops the worker and waits for its thread."""
        self.stop()
        self._thread.join()

    def load(self) -> tuple[int, int]:
        """Returns the numbers of running and of waiting requests."""
        running = len(self._active)
        return running, max(0, self._places.total() - running)

    def slots(self) -> list[DecodeStats | None]:
        """Returns the figures of the request that each session runs; None where it runs none."""
        running = {active.slot: active.generation.stats for active in list(self._active.values())}
        return [running.get(number) for number in range(len(self._sessions))]

    def read(self, work: Callable[[], Result], client: int) -> Future[Result]:
        """Queues the parsing of a large body, as `decode` the text of ids: it would stop the event loop."""
        return self._beside(work, self._readers, client)

    def encode(self, prompt: Prompt, client: int, *, special: bool = True) -> Future[list[int]]:
        """Returns the token ids of a prompt, as `decode` the text of ids."""
        return self._beside(functools.partial(self._prompts.encode, prompt, special=special), self._encoder_of(prompt), client)

    def count(self, prompt: Prompt, client: int) -> Future[int]:
        """Returns how many tokens a prompt has, as `decode` the text of ids."""
        pool = self._decoders if media_of(prompt) else self._encoder_of(prompt)
        children = ChildBudget(DECODING_SECONDS)
        with self._lock:
            self._children.add(children)
        return self._beside(lambda: self._prompts.count(prompt, client, children), pool, client)

    def decode(self, tokens: Sequence[int], client: int) -> Future[str]:
        """Returns the text of tokens, control tokens included, from the thread for prompts; cancelled before its turn, nothing is computed.

        The result raises RequestError for ids that are not in the vocabulary. Raises ApiError as `Places.take` does, and 503 if the server
        is shutting down.
        """
        return self._beside(functools.partial(self._prompts.decode, tokens), self._encoder, client)

    def submit(self, requests: Sequence[CompletionRequest], deliver: Callable[[int, StreamEvent], None], client: int = 0) -> list[Job]:
        """Accepts requests of a client, all or none; `deliver` gets the place of each among them with its events.

        Raises ApiError as `decode` does.
        """
        with self._lock:
            self._accept(client, len(requests))
            children = ChildBudget(DECODING_SECONDS)
            self._children.add(children)
            jobs = [Job(request, functools.partial(deliver, number), children, client) for number, request in enumerate(requests)]
            for _, group in itertools.groupby(jobs, lambda job: id(job.request.prompt)):
                same = list(group)
                encoder = self._encoder_of(same[0].request.prompt, same[0].request.prediction)
                encoder.submit(client, functools.partial(self._admit, same))
        return jobs

    def _encoder_of(self, prompt: Prompt, prediction: str = "") -> FairPool:
        return self._encoder if is_short(prompt, prediction) else self._long_encoder

    def _beside(self, work: Callable[[], Result], pool: FairPool, client: int) -> Future[Result]:
        """Queues work in a thread apart, counted as a request."""
        with self._lock:
            self._accept(client)
            future = pool.submit(client, work)
        future.add_done_callback(lambda _: self._places.give_back(client))
        return future

    def _accept(self, client: int, requests: int = 1) -> None:
        """Counts requests in. Raises ApiError as `decode` does; the caller holds the lock."""
        if self._stopping:
            raise _shutting_down()
        self._places.take(client, requests)

    def _run(self) -> None:
        while not self._stopping:
            self._receive()
            try:
                self._drop_cancelled()
                self._assign()
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
        ):  # in the order in which jobs pass them
            pool.shutdown()
        self._receive()
        self._fail_all(_shutting_down())

    def _receive(self) -> None:
        """Takes submitted jobs from the queue; blocks if there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            job = self._inbox.get(block=not (self._waiting or self._active or self._stopping))
            while True:
                if job is not None:
                    self._waiting.append(job)
                job = self._inbox.get_nowait()

    def _admit(self, jobs: Sequence[Job]) -> None:
        """Encodes the prompt and the prediction that jobs share, in a thread for prompts, and hands the jobs on."""
        with self._or_fail(jobs):
            request, media = jobs[0].request, media_of(jobs[0].request.prompt)
            if self._goes_on(jobs):
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
        """Adds images and sound to the prompt that jobs share, in a thread of its own: hostile ones take as long as they may."""
        with self._or_fail(jobs):
            if self._goes_on(jobs):
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

    def _goes_on(self, jobs: Sequence[Job]) -> bool:
        return not (self._stopping or all(job.cancelled for job in jobs))

    @contextlib.contextmanager
    def _or_fail(self, jobs: Sequence[Job]) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a chat template is a program of the bundle and may raise anything
            for job in jobs:
                self._fail(job, error)

    def _compile(self, job: Job) -> None:
        """Compiles a job's constraint, in a thread of its own: that may take seconds, in which other requests go on."""
        with self._or_fail([job]):
            if self._goes_on([job]):
                job.constraint = self._sessions[0].compile_constraint(job.request.constraint)
            self._inbox.put(job)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._waiting if job.cancelled]:
            self._waiting.remove(job)
            self._places.give_back(job.client)
        for active in [active for active in self._active.values() if active.job.cancelled]:
            self._release(active)

    def _assign(self) -> None:
        """Assigns waiting requests to free sessions."""
        used = {active.slot for active in self._active.values()}
        slots = [
            Slot(number=i, target=session.target, last_used=self._last_used[i], client=self._clients[i])
            for i, session in enumerate(self._sessions)
            if i not in used
        ]
        while slots and self._waiting and not (self._alone and self._active):
            slot, job = choose_slot(slots, self._of_next_client(), self._may_reuse)
            self._waiting.remove(job)
            try:
                session = self._sessions[slot.number]
                if job.client != slot.client:
                    self._empty_for(job.client, slot.number)
                name = self._client_names[job.client]
                reuse = self._may_reuse(job)
                active = ActiveRequest(job, slot.number, session, self._template, self.watch, reuse_prefix=reuse, client=name)
            except EdgeRuntimeError as error:
                self._fail(job, error)
                continue
            slots.remove(slot)
            self._turns[job.client] = 1 + max(self._turns.values(), default=0)
            self._active[active.generation] = active
            self._lockstep.join(active.generation)
            active.begin()

    def _may_reuse(self, job: Job) -> bool:
        """Whether a request may use rows that another one computed. With a seed that must not change the answer."""
        return not self._deterministic and (self._exact or not job.request.repeatable)

    def _of_next_client(self) -> list[Job]:
        """Returns the waiting requests, of which there are some, of the client whose turn was longest ago."""
        client = min((job.client for job in self._waiting), key=lambda client: self._turns.get(client, 0))
        return [job for job in self._waiting if job.client == client]

    def _empty_for(self, client: int, slot: int) -> None:
        """Gives a session to another client, at once without the rows of the one before: `cached_tokens` and times would reveal them."""
        with self._sessions[slot].exclusive():
            self._sessions[slot].target.rollback(0)
        self._clients[slot] = client

    def _step(self) -> None:
        for generation, newest in self._lockstep.step():
            self._active[generation].take(newest)
        for generation, error in self._lockstep.failures:
            self._release(failed := self._active[generation])
            self._fail(failed.job, error, counted=False)
        going = set(self._lockstep.running)
        for running in [active for active in self._active.values() if active.stopped or active.generation not in going]:
            self._release(running)  # before the last event: a client that has its answer finds the slot free
            running.end()

    def _release(self, active: ActiveRequest) -> None:
        """Frees a request's session. The KV cache is kept for the next prompt with the same prefix."""
        active.end_energy()
        self._lockstep.remove(active.generation)
        del self._active[active.generation]
        self._clock += 1
        self._last_used[active.slot] = self._clock
        self._places.give_back(active.job.client)
        try:
            self._sessions[active.slot].record(active.generation)
        except EdgeRuntimeError as error:
            self._notify(str(error))

    def _fail(self, job: Job, error: Exception, *, counted: bool = True) -> None:
        if counted:
            self._places.give_back(job.client)
        if not isinstance(error, RequestError | ApiError):
            self._notify(str(error) if isinstance(error, EdgeRuntimeError) else "".join(traceback.format_exception(error)))
        # Only the message: the frames of a traceback hold the request, and the error in them.
        job.deliver(Failed(error=to_api_error(error).alone()))

    def _fail_all(self, error: Exception) -> None:
        """Fails every request with `error` and clears the caches, whose contents are no longer trusted."""
        for active in self._active.values():
            active.end_energy()
        jobs = [*self._waiting, *(active.job for active in self._active.values())]
        self._waiting.clear()
        self._active.clear()
        for job in jobs:
            self._fail(job, error)
        with contextlib.suppress(EdgeRuntimeError):
            self._lockstep.clear()


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down; try again when it is back", code="shutting_down")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A free session: its number, its target, when it was last used (a growing count; 0 for never), and whose rows it has."""

    number: int
    target: Target
    last_used: int
    client: int = 0


def choose_slot(slots: Sequence[Slot], waiting: Sequence[Job], may_reuse: Callable[[Job], bool]) -> tuple[Slot, Job]:
    """Returns the free session and the waiting request that share the longest prefix. `waiting` is oldest first; neither may be empty.

    A cache counts only if it holds at least half of the prompt: a few shared tokens, as all chats have, are not worth discarding the
    cached rows of another conversation. If no cache counts, the least recently used session is chosen.
    """
    overdue = [job for job in waiting if job.passed_over >= MAX_PASSED_OVER]
    best = max(
        ((slot, job) for job in overdue[:1] or waiting for slot in slots),
        key=lambda pair: (_shared_prefix(pair[0], pair[1], may_reuse), -waiting.index(pair[1]), -pair[0].last_used),
    )
    for job in waiting[: waiting.index(best[1])]:
        job.passed_over += 1
    return best


def _shared_prefix(slot: Slot, job: Job, may_reuse: Callable[[Job], bool]) -> int:
    if not may_reuse(job) or job.client != slot.client:
        return 0
    shared = reusable_prefix(slot.target, job.ids[:-1])
    return shared if 2 * shared >= len(job.ids) else 0
