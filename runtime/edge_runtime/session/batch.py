"""Several requests at once: in each round, one draft call and one forward of the target serve all of them.

On a CPU, a forward of a few rows costs hardly more than one of a single row, because the weights are read once for all rows.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Self

from edge_devices.waiting import Waiting, silent_wait
from edge_runtime.calibration.measured import Notify
from edge_runtime.decoding.loop import Round
from edge_runtime.drafting.cost_model import MIN_SECONDS
from edge_runtime.errors import EdgeRuntimeError, RequestError
from edge_runtime.interfaces import DraftRequest, SequenceBatch
from edge_runtime.session.cache_claim import PairLock
from edge_runtime.session.generation import PREFILL_ROWS, Generation
from edge_runtime.session.row_equality import RowEquality
from edge_runtime.session.session import Session

# The longest time in seconds for a piece of a prompt between two rounds of other requests. If their rounds take longer, a piece may take as
# long as a round. Otherwise a prompt would need a hundred rounds on a slow or busy machine.
PIECE_SECONDS = 0.1
# The shortest piece in which a token costs as little as in a long one, even if threads wait long for each other.
SHORTEST_PIECE = 32
# How many of the newest pieces and rounds are considered. The fastest piece and the median round show the machine's undisturbed speed.
_NEWEST = 5


class PrefillPace:
    """How many prompt tokens to compute between two rounds of other requests, so that these wait `PIECE_SECONDS` or as long as a round."""

    def __init__(self) -> None:
        self.rows = SHORTEST_PIECE
        self._rates: deque[float] = deque(maxlen=_NEWEST)
        self._rounds: deque[float] = deque([0.0], maxlen=_NEWEST)

    def count_round(self, seconds: float) -> None:
        """Records the time of a round of the other requests."""
        self._rounds.append(seconds)

    def count(self, rows: int, seconds: float) -> None:
        """Records that a piece of `rows` tokens took `seconds`. At the end of a prompt, a piece may be shorter than requested."""
        self._rates.append(rows / max(seconds, MIN_SECONDS))
        fitting = max(self._rates) * max(PIECE_SECONDS, statistics.median(self._rounds))
        self.rows = int(max(SHORTEST_PIECE, min(fitting, 2 * self.rows, PREFILL_ROWS)))

    def rows_in(self, seconds: float) -> int:
        """Returns how many tokens fit into a piece of `seconds` when no other requests wait."""
        return int(max(SHORTEST_PIECE, min(max(self._rates, default=0.0) * seconds, PREFILL_ROWS)))


class BatchDecoder:
    """Runs requests on different sequences of one context. Requests may join and leave between two steps, from any thread."""

    def __init__(self, batch: SequenceBatch, lock: PairLock | None = None) -> None:
        """`lock` is the lock of the sessions on the context. None creates one, for a context that nothing else uses."""
        self._batch = batch
        self.longest_piece: float | None = None  # the most seconds of a prompt's piece if no other requests run; None for no limit
        self._lock = lock or PairLock()
        self._joining: dict[Generation, Iterator[int]] = {}
        self._pace = PrefillPace()
        self._running: list[Generation] = []
        self._failures: list[tuple[Generation, EdgeRuntimeError]] = []

    @property
    def running(self) -> Sequence[Generation]:
        """The requests that have not ended."""
        return tuple(generation for generation in (*self._running, *self._joining) if not generation.done)

    @property
    def failures(self) -> Sequence[tuple[Generation, EdgeRuntimeError]]:
        """The requests that failed in the newest step. They were removed; the others continue."""
        return tuple(self._failures)

    def add(self, generation: Generation) -> None:
        """Prefills a request's prompt. The request runs from the next step on. Raises RequestError if its sequence is in use."""
        with self._lock.held():
            self._require_free(generation)
            generation.prefill()
            self._begin(generation)

    def join(self, generation: Generation) -> None:
        """As `add`, but the prompt is prefilled in pieces, one per step, so that other requests do not wait for all of it.

        While other requests run, `PrefillPace` gives the length of a piece. Several prompts take turns, so that a short one does not wait
        for a long one. A request that was removed, or suspended and resumed, continues where it was.
        """
        with self._lock.held():
            self._require_free(generation)
            if generation.prefilled:
                self._begin(generation)
            else:
                self._joining[generation] = generation.prefilling(self._piece)

    def remove(self, generation: Generation) -> None:
        """Takes a request out; it may `join` again later. The others continue. Does nothing if it has ended."""
        with self._lock.held():
            self._joining.pop(generation, None)
            self._running = [other for other in self._running if other is not generation]
            self._failures = [(other, error) for other, error in self._failures if other is not generation]

    def clear(self) -> None:
        """Ends all requests and drops all rows, because no cache can be trusted after a failure of the backend."""
        with self._lock.held():
            self._joining.clear()
            self._running = []
            for target in self._batch.targets:
                target.rollback(0)

    def step(self) -> list[tuple[Generation, Round]]:
        """Runs one round of all running requests, with one draft call and one verify. Returns the round of each request.

        A request that cannot continue, because another one began on its session, is added to `failures`. An error of the backend ends all.
        """
        with self._lock.held():
            self._lock.require_open()
            self._failures = []
            self._prefill_a_piece()
            running = self._able_to_continue()
            if not running:
                return []
            with self._lock.computing():
                begin = time.perf_counter()
                try:
                    done = self._round(running)
                except BaseException as error:
                    self._running = []
                    for generation in running:
                        generation.fail(error)
                    raise
                seconds = time.perf_counter() - begin
            self._pace.count_round(seconds)
            self._running = [generation for generation, _ in done if not generation.done]
            for generation, round_done in done:
                generation.count(round_done, seconds)
            return done

    def run(self, generations: Sequence[Generation]) -> Iterator[tuple[Generation, Round]]:
        """Runs requests to their ends, as many at once as there are sequences. Yields each round when it is done.

        Several threads may each run their own requests. Raises the error of the first request that fails, and RequestError for a request
        that was removed.
        """
        waiting, yielded = list(generations), dict.fromkeys(generations, 0)
        while yielded:
            with self._lock.held():
                busy = {id(generation.target) for generation in self.running}
                for generation in list(waiting):
                    if id(generation.target) not in busy:
                        busy.add(id(generation.target))
                        waiting.remove(generation)
                        self.add(generation)
                self.step()
                failed = dict(self._failures)
                new = []
                for generation in list(yielded):
                    if generation in failed:
                        raise failed[generation]
                    new += [(generation, round_done) for round_done in generation.recorded(yielded[generation])]
                    yielded[generation] = generation.stats.rounds
                    if generation not in waiting and generation not in self.running:
                        del yielded[generation]
                        if not generation.done:
                            generation.require_claim()
                            raise RequestError("the request was removed before its end; run it again")
            yield from new

    def _require_free(self, generation: Generation) -> None:
        if not any(target is generation.target for target in self._batch.targets):
            raise RequestError("the request is of another bundle's session; run it with the sessions it was started on")
        if any(other.target is generation.target for other in self.running):
            raise RequestError("two requests cannot share a sequence; start each on its own session")
        generation.require_claim()

    def _begin(self, generation: Generation) -> None:
        if not generation.done:
            self._running.append(generation)

    def _piece(self) -> int:
        if self._running:
            return self._pace.rows
        return PREFILL_ROWS if self.longest_piece is None else self._pace.rows_in(self.longest_piece)

    def _prefill_a_piece(self) -> None:
        if self._joining:
            generation, pieces = next(iter(self._joining.items()))
            begin = time.perf_counter()
            del self._joining[generation]
            try:
                rows = next(pieces, None)
            except RequestError as error:
                self._failures.append((generation, error))
                return
            if rows is None:
                self._begin(generation)
                return
            self._joining[generation] = pieces  # the last in turn now
            if rows:
                self._pace.count(rows, time.perf_counter() - begin)

    def _able_to_continue(self) -> list[Generation]:
        """Returns the running requests that can continue, and drops the others."""
        able = []
        for generation in self._running:
            if generation.done:  # it was iterated to its end elsewhere; its rows may now belong to another request
                continue
            try:
                generation.require_claim()
            except EdgeRuntimeError as error:
                self._failures.append((generation, error))
            else:
                able.append(generation)
        self._running = able
        return able

    def _round(self, running: list[Generation]) -> list[tuple[Generation, Round]]:
        requests = [generation.decoding.draft_request(self._number(generation), len(running)) for generation in running]
        begin = time.perf_counter()
        drafts = self._drafts(requests)
        middle = time.perf_counter()
        batches = [
            (self._number(generation), generation.decoding.tokens_to_verify(draft))
            for generation, draft in zip(running, drafts, strict=True)
        ]
        logits = self._batch.verify_all(batches)
        first, *others = [generation.decoding for generation in running]
        timing = first.timing(middle - begin, time.perf_counter() - middle, *others)
        # The policies share one cost model, so only one request reports the timing: the first that learns from it and does not fail.
        learning = any(generation.decoding.learns_costs for generation in running)
        done: list[tuple[Generation, Round]] = []
        reported = False
        for generation, rows in zip(running, logits, strict=True):
            reports = not reported and generation.decoding.learns_costs == learning
            try:
                done.append((generation, generation.decoding.finish_round(rows, timing, report_timing=reports)))
                reported |= reports
            except EdgeRuntimeError as error:  # for example, no token is left to sample; other requests are not affected
                generation.fail(error)
                self._failures.append((generation, error))
                continue
            generation.record(done[-1][1])
        return done

    def _drafts(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        drafting = [i for i, request in enumerate(requests) if request.draft_length > 0]
        drafts: list[list[int]] = [[] for _ in requests]
        if drafting:
            for i, draft in zip(drafting, self._batch.draft_all([requests[i] for i in drafting]), strict=True):
                drafts[i] = draft
        return drafts

    def _number(self, generation: Generation) -> int:
        return next(i for i, target in enumerate(self._batch.targets) if target is generation.target)


class Sessions:
    """Sessions that share one context of one pair, so that their requests can run at once. May be used from any thread.

    A context manager; closing it ends all sessions. Closing one of several sessions ends only that one.
    """

    def __init__(self, sessions: Sequence[Session], batch: SequenceBatch) -> None:
        self.sessions = tuple(sessions)
        self._lock = self.sessions[0].claim.lock
        for session in self.sessions:
            session.claim.lock = self._lock
            session.claim.alone = len(self.sessions) == 1
        self.decoder = BatchDecoder(batch, self._lock)
        self._batch = batch

    def run(self, generations: Sequence[Generation]) -> Iterator[tuple[Generation, Round]]:
        """Runs requests of these sessions to their ends and yields their rounds. Requests of different sessions run at once."""
        return self.decoder.run(generations)

    def row_equality(self, notify: Notify = lambda _: None, waiting: Waiting = silent_wait) -> RowEquality:
        """As `Session.row_equality`, for rows of all sessions in one verify. Ends all requests."""
        with self._lock.held():
            self._lock.require_open()
            self._lock.require_idle()
            for session in self.sessions:
                session.claim.release()
            still_open = next((session for session in self.sessions if not session.claim.closed), self.sessions[0])
            return still_open.row_equality(notify, waiting, batch=self._batch)

    def close(self) -> None:
        """Saves the acceptance models, frees the pair and ends all sessions. Can be called twice."""
        with self._lock.held():
            self._lock.require_idle()
            if not self._lock.closed:
                for session in self.sessions:
                    session.save_learned()
                self._lock.closed = True
                self.sessions[0].close_prompt_cache()
                self._batch.close()

    def __repr__(self) -> str:
        state = "closed" if self._lock.closed else f"{len(self.decoder.running)} running"
        return f"<Sessions: {len(self.sessions)} of {self.sessions[0].bundle.folder.name}, {state}>"

    def __enter__(self) -> Self:
        self._lock.require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
