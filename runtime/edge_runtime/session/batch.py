"""Several requests at once: in each round one forward of the drafter and one of the target serve all of them.

On a CPU a forward of a few rows costs hardly more than one of a single row, because the weights are read once for all rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from edge_runtime.decoding.loop import Round
from edge_runtime.errors import EdgeRuntimeError, RequestError
from edge_runtime.interfaces import Drafter, DraftRequest, Logits, SequenceBatch, Target
from edge_runtime.session.generation import Generation
from edge_runtime.session.session import Session

_END = object()


class SingleSequence:
    """A `SequenceBatch` of one sequence, for backends that run one request at a time."""

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.targets = (target,)
        self._drafter = drafter

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Drafts for the one sequence."""
        if (drafter := self._drafter) is None:
            return [[] for _ in requests]
        return [drafter.draft(one.last, one.draft_length, one.sampler, one.should_continue) for one in requests]

    def verify_all(self, batches: Sequence[tuple[int, Sequence[int]]]) -> list[Logits]:
        """Verifies for the one sequence."""
        return [self.targets[0].verify(tokens) for _, tokens in batches]

    def close(self) -> None:
        """Frees the models."""
        if self._drafter is not None:
            self._drafter.close()
        self.targets[0].close()


class BatchDecoder:
    """Runs requests of different sequences of one context. Requests may join and leave between two steps."""

    def __init__(self, together: SequenceBatch) -> None:
        self._together = together
        self._joining: dict[Generation, Iterator[None]] = {}
        self._running: list[Generation] = []
        self._failures: list[tuple[Generation, EdgeRuntimeError]] = []

    @property
    def running(self) -> Sequence[Generation]:
        """The requests that have not ended."""
        return (*self._running, *self._joining)

    @property
    def failures(self) -> Sequence[tuple[Generation, EdgeRuntimeError]]:
        """The requests that failed in the newest step. They were removed; the others continue."""
        return tuple(self._failures)

    def add(self, generation: Generation) -> None:
        """Prefills a request's prompt; the request runs from the next step on. Raises RequestError if its sequence is in use."""
        self._require_free(generation)
        generation.prefill()
        self._begin(generation)

    def join(self, generation: Generation) -> None:
        """As `add`, but the prompt is prefilled in pieces, one per step, so that other requests do not wait for all of it."""
        self._require_free(generation)
        self._joining[generation] = generation.prefilling()

    def remove(self, generation: Generation) -> None:
        """Ends a request early; the others continue. Does nothing if it has ended."""
        self._joining.pop(generation, None)
        self._running = [other for other in self._running if other is not generation]

    def clear(self) -> None:
        """Ends all requests and drops all rows: after a failure of the backend no cache can be trusted."""
        self._joining.clear()
        self._running = []
        for target in self._together.targets:
            target.rollback(0)

    def step(self) -> list[tuple[Generation, Round]]:
        """Runs one round of all running requests, with one draft call and one verify. Returns the round of each request."""
        self._failures = []
        self._prefill_a_piece()
        running = self._running
        if not running:
            return []
        begin = time.perf_counter()
        drafts = self._drafts(running)
        middle = time.perf_counter()
        batches = [(self._number(one), one.decoding.tokens_to_verify(draft)) for one, draft in zip(running, drafts, strict=True)]
        logits = self._together.verify_all(batches)
        first, *others = [one.decoding for one in running]
        timing = first.timing(middle - begin, time.perf_counter() - middle, *others)
        done = []
        for one, rows in zip(running, logits, strict=True):
            try:  # one request reports the timing: their policies share one cost model
                done.append((one, one.decoding.finish_round(rows, timing, report_timing=one is running[0])))
            except EdgeRuntimeError as error:  # such as no token left to sample; the other requests are not affected
                one.target.rollback(0)
                self._failures.append((one, error))
                continue
            one.count(done[-1][1], time.perf_counter() - begin)
        self._running = [one for one, _ in done if not one.decoding.done]
        return done

    def run(self, generations: Sequence[Generation]) -> Iterator[tuple[Generation, Round]]:
        """Runs requests to their ends, as many at once as there are sequences; yields each round as it is done.

        Raises the error of the first request that fails.
        """
        waiting = list(generations)
        while waiting or self._running:
            taken = {id(one.target) for one in self._running}
            for one in list(waiting):
                if id(one.target) not in taken:
                    taken.add(id(one.target))
                    waiting.remove(one)
                    self.add(one)
            yield from self.step()
            for _, error in self._failures:
                raise error

    def _require_free(self, generation: Generation) -> None:
        if any(other.target is generation.target for other in self.running):
            raise RequestError("two requests cannot share a sequence; start each on its own session")

    def _begin(self, generation: Generation) -> None:
        if not generation.decoding.done:
            self._running.append(generation)

    def _prefill_a_piece(self) -> None:
        if self._joining:
            generation, pieces = next(iter(self._joining.items()))
            if next(pieces, _END) is _END:
                del self._joining[generation]
                self._begin(generation)

    def _drafts(self, running: Sequence[Generation]) -> list[list[int]]:
        requests = [one.decoding.draft_request(self._number(one), len(running)) for one in running]
        wanted = [i for i, request in enumerate(requests) if request.draft_length > 0]
        drafts: list[list[int]] = [[] for _ in running]
        if wanted:
            for i, draft in zip(wanted, self._together.draft_all([requests[i] for i in wanted]), strict=True):
                drafts[i] = draft
        return drafts

    def _number(self, generation: Generation) -> int:
        return next(i for i, target in enumerate(self._together.targets) if target is generation.target)


class Sessions:
    """Sessions that share one context of one pair, so that their requests can run at once. Not thread-safe.

    Close this object, not its sessions, or use it as a context manager.
    """

    def __init__(self, sessions: Sequence[Session], together: SequenceBatch) -> None:
        self.sessions = tuple(sessions)
        self.decoder = BatchDecoder(together)
        self._together = together

    def run(self, generations: Sequence[Generation]) -> Iterator[tuple[Generation, Round]]:
        """Runs requests of these sessions to their ends, those of different sessions at once; yields their rounds."""
        return self.decoder.run(generations)

    def close(self) -> None:
        """Saves the acceptance models, frees the pair and ends all sessions."""
        for session in self.sessions:
            session.save_acceptance()
        self._together.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
