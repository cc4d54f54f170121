"""A request on its way through the worker: its inputs, the stream events that it delivers, and its rounds on a session."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from edge_devices.children import ChildBudget
from edge_devices.energy.live import RunEnergy, Share, SharedWatch
from edge_runtime.decoding.acceptance import TokenLogprob
from edge_runtime.decoding.loop import Round
from edge_runtime.decoding.sampling import MODEL_SAMPLING, default_sampling, over_defaults
from edge_runtime.media.soft_rows import MediaPrompt
from edge_runtime.server.requests.completions import CompletionRequest
from edge_runtime.server.requests.messages import Conversation
from edge_runtime.session.generation import Generation
from edge_runtime.session.monitor import DecodeStats
from edge_runtime.session.session import Session
from edge_runtime.text.channels import ChannelParser, Event, Place, Text, merged
from edge_runtime.text.chat_template import ChatTemplate
from edge_runtime.text.grammar import Constraint
from edge_runtime.text.tool_calls import QUOTE, ToolCall

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Started:
    """A session took the request, so it is valid and fits the context. Always the first event, unless the request failed."""

    prompt_tokens: int


@dataclass(frozen=True, kw_only=True)
class OutputLogprob:
    """A token of the answer, as bytes, and its log probability. `top` has the likeliest tokens at its position with theirs."""

    piece: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output since the previous event. `stats` is a snapshot; its `tokens` do not count tokens after the end of the visible answer.

    `logprobs` has the tokens whose text begins in `events`, if the request asks for them. `draft_spans` has the (begin, end) character
    positions of accepted drafts in the text of `events`.
    """

    events: tuple[Event, ...]
    stats: DecodeStats
    logprobs: tuple[OutputLogprob, ...] = ()
    draft_spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The last event of an answer. `stats` is as in `Output`; `energy` is None without a meter.

    `thought_tokens` of the tokens are thoughts. `stop_string` is the request's stop string that ended the answer, if one did.
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


# The most events that wait for the reader of a response. Each is a round or a part of one, a few kilobytes.
MAX_UNREAD = 128


class Unread:
    """Counts the events of a response that its reader has not taken. Any thread may use it.

    It is `full` from `MAX_UNREAD` events on, until the reader has taken half of them. It then calls `wake`, so that the worker continues.
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
    """A request's place in the queue. It is given back once the worker and the reader are both done with it. Any thread may use it."""

    def __init__(self, give_back: Callable[[], None] = lambda: None) -> None:
        self._give_back = give_back
        self._lock = threading.Lock()
        self._holders = {"worker", "reader"}

    def leave(self, holder: Literal["worker", "reader"]) -> None:
        """Notes that a holder is done. Further calls for the same holder have no effect."""
        with self._lock:
            last = self._holders == {holder}
            self._holders.discard(holder)
        if last:
            self._give_back()


class Job:
    """A request in the worker's queue. The worker sets `prompt`, `prediction` and the compiled `constraint`.

    `children` limits the processor time for decoding media, and `unread` counts events that the reader has not taken. All answers to one
    request share both. `client` is the index of the client's key.
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
        """The prompt's token ids; soft rows have negative ids."""
        return self.prompt.ids if isinstance(self.prompt, MediaPrompt) else self.prompt

    def deliver(self, event: StreamEvent) -> None:
        """Passes an event to the reader."""
        self.unread.add()
        self._deliver(event)

    def cancel(self) -> None:
        """Ends the request after the current round, and the decoding of its media at once. Safe to call from any thread."""
        self.cancelled = True
        self.children.cancel()
        self.place.leave("reader")
        self.unread.wake()


class ActiveRequest:
    """A request that runs on the session number `slot`. Turns its decoding rounds into stream events.

    `since` is when it got the session, in seconds of the monotonic clock. While it is suspended, `slot` is its former session. While it
    is `stalled`, it runs no rounds, because too many events wait for its reader.
    """

    def __init__(
        self,
        job: Job,
        slot: int,
        session: Session,
        template: ChatTemplate,
        watch: SharedWatch | None = None,
        *,
        reuse_prefix: bool = True,
        client: str = "",
        max_tokens: int | None = None,
    ) -> None:
        """Prepares the generation; computes nothing yet. `watch` measures its energy. Raises RequestError as `Session.generate` does.

        With `reuse_prefix`, it uses rows that other requests left in the cache. `client` names the client whose cached prompts it may use.
        An answer has at most `max_tokens`; None allows as many as fit the context.
        """
        self.job = job
        self.slot, self.since = slot, time.monotonic()
        self.stalled = False
        request = job.request
        longest = session.target.context if max_tokens is None else max_tokens
        self.generation: Generation = session.generate(
            job.prompt,
            max_tokens=min(request.max_tokens or longest, longest),
            min_tokens=request.min_tokens,
            sampling=over_defaults(
                request.sampling, request.sampling_fields, default_sampling(session.bundle.manifest.generation, MODEL_SAMPLING)
            ),
            reuse_prefix=reuse_prefix,
            constraint=request.constraint,
            logprobs=request.logprobs,
            compiled=job.constraint,
            draft_length=request.draft_length,
            prediction=job.prediction,
            client=client,
        )
        is_chat = isinstance(request.prompt, Conversation)
        self._parser = ChannelParser(
            session.vocabulary,
            (*request.stop, *(template.stop if is_chat else ())),
            prompt=job.ids,
            channels=is_chat,
            calls=request.max_calls != 0,
            pieces=request.call_pieces,
        )
        self._chunk_size = session.settings.chunk_size
        self._pending: list[Event] = []
        self._tokens = self._delivered = self._thoughts = self._calls = 0
        self._spans: list[tuple[int, int]] = []
        self._characters = 0
        self._logprobs = _AnswerLogprobs(session)
        self._watch = watch
        self._energy: RunEnergy | None = None
        self._share: Share | None = watch.begin() if watch else None

    def begin(self) -> None:
        """Delivers `Started`."""
        self.job.deliver(Started(prompt_tokens=len(self.job.ids)))

    @property
    def client(self) -> int:
        """The index of the client's key."""
        return self.job.client

    @property
    def stopped(self) -> bool:
        """Whether a stop string, or the last call that the request allows, has ended the answer."""
        return self._parser.stopped_by is not None or 0 < self._calls == self.job.request.max_calls

    def take(self, newest: Round) -> None:
        """Parses a round's tokens; delivers output once `chunk_size` tokens are pending."""
        first = len(self.generation.tokens) - len(newest.tokens)
        for i, token in enumerate(newest.tokens):
            if not self.stopped:
                self._tokens += 1
                self._add(self._parser.feed(token), drafted=i < newest.accepted)
                self._thoughts += self._parser.place in ("name", "thought")
                if self.generation.logprobs:
                    self._logprobs.add(self.generation.logprobs[first + i], self._parser.place)
        if self._tokens - self._delivered >= self._chunk_size:
            self._flush()

    def end_energy(self) -> None:
        """Ends the energy measurement. Must be called once per request, however it ended."""
        if self._watch and self._share:
            self._energy = self._watch.end(self._share, self._tokens)
            self._share = None

    def end(self) -> None:
        """Delivers the remaining output and the reason for the end."""
        stopped = self.stopped or self.generation.finish_reason == "stop"
        self._add(self._parser.finish(ended=stopped), drafted=False)
        self._logprobs.end_call()
        self._flush()
        reason: FinishReason = "stop" if stopped else "length"
        by = self._parser.stopped_by
        self.job.deliver(
            Finished(
                reason=reason,
                stats=self._stats(),
                energy=self._energy,
                thought_tokens=self._thoughts,
                stop_string=by if by in self.job.request.stop else None,
            )
        )

    def _add(self, events: list[Event], *, drafted: bool) -> None:
        """Adds the events that a token completed. Text that several tokens make up counts as drafted if the last of them was."""
        for event in events:
            self._pending.append(event)
            if isinstance(event, ToolCall):
                self._calls += 1
                self._logprobs.drop_call()
            if isinstance(event, Text):
                begin, self._characters = self._characters, self._characters + len(event.text)
                if drafted and self._spans and self._spans[-1][1] == begin:
                    begin = self._spans.pop()[0]
                if drafted:
                    self._spans.append((begin, self._characters))

    def _flush(self) -> None:
        if self._pending:
            logprobs = self._logprobs.take(sum(len(event.text.encode()) for event in self._pending if isinstance(event, Text)))
            spans = tuple(self._spans)
            self.job.deliver(Output(events=merged(self._pending), stats=self._stats(), logprobs=logprobs, draft_spans=spans))
            self._pending.clear()
            self._spans.clear()
            self._characters = 0
            self._delivered = self._tokens

    def _stats(self) -> DecodeStats:
        return replace(self.generation.stats, tokens=self._tokens)


class _AnswerLogprobs:
    """Holds the log probabilities of the answer's tokens until their text is delivered; those of a stop string never are.

    Entries of a possible call are kept apart until it is known whether it is a call or plain text.
    """

    def __init__(self, session: Session) -> None:
        self._vocabulary = session.vocabulary
        self._control = frozenset(session.vocabulary.control_tokens.values())
        self._quote = session.vocabulary.control_tokens.get(QUOTE)
        self._held: deque[OutputLogprob] = deque()
        self._call: list[OutputLogprob] = []
        self._missing = 0

    def add(self, entry: TokenLogprob, place: Place) -> None:
        """Adds the newest token, unless it is a thought, a control token, or has no text."""
        if place != "call":
            self.end_call()
        quotes = place == "call" and entry.token == self._quote
        piece = self._vocabulary.piece(entry.token, special=quotes)
        if place in ("answer", "call") and piece and (quotes or entry.token not in self._control):
            top = tuple((self._vocabulary.piece(token, special=True), logprob) for token, logprob in entry.top)
            (self._call if place == "call" else self._held).append(OutputLogprob(piece=piece, logprob=entry.logprob, top=top))

    def drop_call(self) -> None:
        """Drops the entries of a complete call: responses have none for calls."""
        self._call.clear()

    def end_call(self) -> None:
        """Adds the entries that were kept apart: what looked like a call is text."""
        self._held += self._call
        self._call.clear()

    def take(self, size: int) -> tuple[OutputLogprob, ...]:
        """Returns the entries of the tokens that begin within the next `size` bytes of the answer."""
        entries = []
        self._missing += size
        while self._missing > 0 and self._held:
            entries.append(self._held.popleft())
            self._missing -= len(entries[-1].piece)
        return tuple(entries)
