"""A request on its way through the worker, and the stream events that it delivers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from edge_devices.children.running import ChildBudget
from edge_devices.energy.live import RunEnergy
from edge_runtime.media.soft_rows import MediaPrompt
from edge_runtime.server.requests.completions import CompletionRequest
from edge_runtime.session.stats import DecodeStats
from edge_runtime.text.channels import Event
from edge_runtime.text.grammar import Constraint

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Started:
    """A session took the request: it is valid and fits. Always the first event, unless the request failed."""

    prompt_tokens: int


@dataclass(frozen=True, kw_only=True)
class OutputLogprob:
    """A token of the answer as bytes, its log probability, and the likeliest tokens of its position with theirs."""

    piece: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output since the previous event. `stats` is a snapshot whose `tokens` end where the visible answer does.

    `logprobs` are those of the tokens whose text begins in `events`, if the request wants them. `draft_spans` are the places (begin, end;
    in characters) of accepted drafts in the text of `events`.
    """

    events: tuple[Event, ...]
    stats: DecodeStats
    logprobs: tuple[OutputLogprob, ...] = ()
    draft_spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The last event of an answer. `stats` as in `Output`; `energy` is None without a meter. `thought_tokens` are among the tokens.

    `stop_string` is the one of the request that ended the answer, if one did.
    """

    reason: FinishReason
    stats: DecodeStats
    energy: RunEnergy | None
    thought_tokens: int = 0
    stop_string: str | None = None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The last event of a request that got no answer, or an incomplete one."""

    error: Exception


StreamEvent = Started | Output | Finished | Failed


# Events that wait for the reader of a response: each is a round or a part of one, some kilobytes.
MAX_UNREAD = 128


class Unread:
    """Counts the events of a response that its reader has not taken. Any thread may use it.

    It is `full` from `MAX_UNREAD` on until the reader has taken half of them. `wake` has the worker look again: it is called then.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self.wake = wake
        self._lock = threading.Lock()
        self._count = 0
        self.full = False

    def add(self) -> None:
        with self._lock:
            self._count += 1
            self.full = self.full or self._count >= MAX_UNREAD

    def take(self) -> None:
        with self._lock:
            self._count -= 1
            woken = self.full and self._count <= MAX_UNREAD // 2
            self.full = self.full and not woken
        if woken:
            self.wake()


class QueuePlace:
    """A request's place in the queue, given back once both the worker and the reader are done with it. Any thread may use it."""

    def __init__(self, give_back: Callable[[], None] = lambda: None) -> None:
        self._give_back = give_back
        self._lock = threading.Lock()
        self._holders = {"worker", "reader"}

    def leave(self, holder: Literal["worker", "reader"]) -> None:
        """One of them is done; it may say so more than once."""
        with self._lock:
            last = self._holders == {holder}
            self._holders.discard(holder)
        if last:
            self._give_back()


class Job:
    """A request in the worker's queue. The worker sets `prompt`, `prediction` and the compiled `constraint`.

    `children` is what decoding its media may take, shared by all answers to one request, and `unread` what of them its reader has not
    taken. `client` is the place of the client's key.
    """

    def __init__(
        self,
        request: CompletionRequest,
        deliver: Callable[[StreamEvent], None],
        children: ChildBudget | None = None,
        client: int = 0,
        place: QueuePlace | None = None,
        unread: Unread | None = None,
    ) -> None:
        self.request = request
        self.client = client
        self.prompt: list[int] | MediaPrompt = []
        self.prediction: list[int] = []
        self.constraint: Constraint | None = None
        self.passed_over = 0
        self.cancelled = False
        self.children = children or ChildBudget()
        self.place, self.unread = place or QueuePlace(), unread or Unread()
        self._deliver = deliver

    @property
    def ids(self) -> list[int]:
        """The prompt's token ids; those of soft rows are negative."""
        return self.prompt.ids if isinstance(self.prompt, MediaPrompt) else self.prompt

    def deliver(self, event: StreamEvent) -> None:
        """Hands an event to the reader."""
        self.unread.add()
        self._deliver(event)

    def cancel(self) -> None:
        """Ends the request after the current round, and the decoding of its media at once. Safe to call from any thread."""
        self.cancelled = True
        self.children.cancel()
        self.place.leave("reader")
        self.unread.wake()
