"""One request while it runs: the rounds of the decoding loop, their text and their figures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from edge_runtime.backends.kernels.loader import native_race
from edge_runtime.bundle.manifest import GenerationDefaults
from edge_runtime.decoding.acceptance import MAX_TOP_LOGPROBS, LogprobRule, TokenLogprob, acceptance_rule, constrained, keeps_text
from edge_runtime.decoding.loop import Decoding, Round, decode
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.drafting.policies import DraftLengthPolicy
from edge_runtime.drafting.sources import Proposals
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Drafter, KvRows, MediaTarget, SavableTarget, Target, Vocabulary, inside_image
from edge_runtime.media.soft_rows import MediaPrompt, pieces
from edge_runtime.session.cache_claim import SUPERSEDED, CacheClaim
from edge_runtime.session.monitor import DecodeStats, RequestMonitor, generation_html, shortened
from edge_runtime.session.prompt_cache import CachedPrompt
from edge_runtime.text.channels import ChannelParser, Event, Text
from edge_runtime.text.constraints import ConstraintSource
from edge_runtime.text.grammar import Constraint

GREEDY_PARAMS = SamplingParams(temperature=0.0)
# The default batch size of llama.cpp. Prefilling in pieces of this size therefore costs nothing and computes the same rows.
PREFILL_ROWS = 512
FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The options of a request. Raises RequestError for a value that is out of range or of the wrong type.

    No end token is drawn before `min_tokens` tokens, unless the text satisfies a `constraint`. The text ends before the first of the `stop`
    strings. `chunk_size` is the least number of tokens per piece of text, except for the last piece. `on_round` is called after each
    round, before its text is yielded. With `reuse_prefix`, the cache's rows are kept for the longest prefix that they share with the
    prompt. This makes a chat fast, but on standard kernels such rows may differ in their last bits, because another request computed them
    in batches of other sizes. `constraint` describes the valid texts. `logprobs` is how many likeliest tokens to record with each token,
    all with their log probabilities.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    sampling: SamplingParams = GREEDY_PARAMS
    acceptance: str | None = None
    stop: Sequence[str] = ()
    chunk_size: int = 1
    on_round: Callable[[Round], None] | None = None
    reuse_prefix: bool = False
    constraint: ConstraintSource | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("min_tokens", 0), ("chunk_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise RequestError(f"{name} is {value!r}, not a whole number; give an int")
            if value < least:
                raise RequestError(f"{name} is {value}; ask for at least {least}")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not isinstance(self.stop, Sequence) or not all(isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop is {self.stop!r}; give texts")
        if self.logprobs is not None and (type(self.logprobs) is not int or not 0 <= self.logprobs <= MAX_TOP_LOGPROBS):
            raise RequestError(f"logprobs is {self.logprobs!r}; ask for 0 to {MAX_TOP_LOGPROBS} of the likeliest tokens, or None for none")
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError(f"sampling is of type {type(self.sampling).__name__}; give SamplingParams")
        if self.on_round is not None and not callable(self.on_round):
            raise RequestError(f"on_round is of type {type(self.on_round).__name__}; give a function that takes a Round")

    @property
    def repeatable(self) -> bool:
        """Whether the text is the same each time, with or without drafts: it is greedy, or has a seed and uses shared noise."""
        return self.sampling.temperature == 0 or (self.sampling.seed is not None and keeps_text(self.sampling, self.acceptance))


def sampled(sampling: SamplingParams, keywords: Mapping[str, Any]) -> SamplingParams:
    """Returns `sampling` with the fields in `keywords` replaced. Raises RequestError for a filter at temperature 0."""
    if not keywords or not isinstance(sampling, SamplingParams):
        return sampling
    chosen = replace(sampling, **keywords)
    filters = [name for name in ("top_k", "top_p", "min_p") if name in keywords]
    if chosen.temperature == 0 and filters:
        raise RequestError(f"{filters[0]} has no effect at temperature 0, which is greedy; give a temperature too")
    return chosen


@dataclass(frozen=True, kw_only=True)
class LoadedPair:
    """The models that a request runs on, and the target's generation defaults; `drafter` may be None.

    All requests and sessions on the target's cache share `claim`.
    """

    target: Target
    drafter: Drafter | None
    vocabulary: Vocabulary
    generation: GenerationDefaults | None = None
    claim: CacheClaim = field(default_factory=CacheClaim)


class _Detokenizer:
    """Turns a request's tokens into text and finds the token that ends the request.

    It is separate from Generation because the loop calls `is_stop`. A reference cycle between the request and its loop would keep both in
    memory until the next garbage collection.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str], constraint: Constraint | None, end_tokens: Sequence[int] = ()) -> None:
        self.ends = vocabulary.eog_tokens | frozenset(end_tokens)
        self.parser = ChannelParser(vocabulary, stop, channels=False)
        self.constraint = constraint
        self._stops = bool(stop)
        self._fed = 0
        self._ready: list[Event] = []

    def feed_rest(self, tokens: Sequence[int]) -> None:
        """Detokenizes the tokens that have not been fed yet."""
        for token in tokens[self._fed :]:
            self._feed(token)

    def is_stop(self, token: int) -> bool:
        """Returns whether the newest token ends the request."""
        # Stop strings are searched token by token inside the loop, so that a request ends at the same token as in plain decoding.
        # Without stop strings the loop detokenizes nothing, and its seconds contain no text work.
        stopped = self._stops and self._feed(token)
        closed = self.constraint is not None and self.constraint.advance(token)
        return stopped or closed or token in self.ends

    def _feed(self, token: int) -> bool:
        self._fed += 1
        self._ready += self.parser.feed(token)
        return self.parser.stopped_by is not None

    def take(self) -> str:
        """Returns the text that became final since the last call."""
        text = "".join(event.text for event in self._ready if isinstance(event, Text))
        self._ready.clear()
        return text

    def finish(self) -> str:
        """Returns the rest of the text after the last token, including text held back, unless a stop string ended it."""
        self._ready += self.parser.finish()
        return self.take()


class Generation:
    """One request. Iterating yields each piece of text as soon as its tokens are accepted; `stats` and `tokens` grow meanwhile.

    Nothing runs before the first piece is requested. Leaving a loop early only pauses the request: iterating again yields the text from its
    beginning, and computes further where it paused. `async for` works too, and computes in another thread.
    When another request begins on the same session, this one ends, and raises RequestError when it is continued. So does a request that an
    error or Ctrl-C interrupted during a forward. May be used from any thread.
    """

    def __init__(
        self,
        pair: LoadedPair,
        prompt: Sequence[int] | MediaPrompt,
        *,
        policy: DraftLengthPolicy,
        options: GenerationOptions,
        monitor: RequestMonitor,
        constraint: Constraint | None = None,
        proposals: Proposals | None = None,
        cached: CachedPrompt | None = None,
        shares_policy: bool = False,
    ) -> None:
        """`cached` is the prompt cache's view of this prompt, only with `reuse_prefix`. With `shares_policy`, all requests of the session
        use the same `policy` object."""
        self.prompt_input = prompt
        self._spans = prompt.spans if isinstance(prompt, MediaPrompt) else ()
        ids = prompt.ids if isinstance(prompt, MediaPrompt) else prompt
        self.stats = DecodeStats(prompt_tokens=len(ids))
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []  # of `tokens`, if the options ask for them
        self.prompt = list(ids)
        self.options = options
        self.monitor = monitor
        self._pair = pair
        self._cached = cached
        self.shares_policy = shares_policy
        self._reading: Iterator[int] = iter(())
        defaults = pair.generation or GenerationDefaults()
        self._detokenizer = _Detokenizer(pair.vocabulary, options.stop, constraint, defaults.end_tokens)
        self._chunk_start = 0
        self._rounds: list[Round] = []
        self._pieces: list[str] = []
        self._text_ended = False
        self._prefilled: int | None = None  # number of prompt tokens with rows in the cache; None before the request begins
        self._copied: tuple[list[int], KvRows] | None = None  # tokens and rows of a request that is suspended
        self._failure: str | None = None
        text_ids = prompt.text_ids if isinstance(prompt, MediaPrompt) else prompt
        rule = acceptance_rule(options.sampling, options.acceptance, text_ids, place=len(ids), race=native_race())
        if constraint is not None:
            rule = constrained(rule, constraint)
        if options.logprobs is not None:
            rule = LogprobRule(rule, options.logprobs)
        self.decoding = Decoding(
            pair.target,
            self.prompt[-1],
            policy,
            max_tokens=options.max_tokens,
            rule=rule,
            is_stop=self._detokenizer.is_stop,
            suppressed=defaults.suppress_tokens,
            held_back=() if constraint is not None else sorted(self._detokenizer.ends),
            min_tokens=options.min_tokens,
            proposals=proposals,
        )
        self._decode = decode(pair.target, pair.drafter, self.decoding)

    @property
    def target(self) -> Target:
        """The target whose cache the request writes to."""
        return self._pair.target

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._detokenizer.parser.stopped_by

    @property
    def complete(self) -> bool:
        """Whether the text so far satisfies the request's constraint; always true without one. False if `max_tokens` cut it short."""
        constraint = self._detokenizer.constraint
        return constraint is None or constraint.complete

    @property
    def done(self) -> bool:
        """Whether the request has ended and all its tokens are known."""
        return self.finish_reason is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it runs."""
        if self.decoding.stopped:
            return "stop"
        if len(self.tokens) >= self.options.max_tokens:
            return "length"
        return "context" if self._full else None

    @property
    def prefilled(self) -> bool:
        """Whether the cache has the rows of the prompt, except for its last token."""
        return self._prefilled is not None and self._prefilled >= len(self.prompt) - 1

    @property
    def _full(self) -> bool:
        """Whether prompt and answer fill the context. Does not ask the cache, which may have another request's rows by now."""
        return len(self.prompt) - 1 + len(self.tokens) >= self._pair.target.context

    def __iter__(self) -> Iterator[str]:
        """Yields non-empty pieces of text until the request is done."""
        number = 0
        while (piece := self._piece(number)) is not None:
            number += 1
            yield piece

    async def __aiter__(self) -> AsyncIterator[str]:
        """As `__iter__`, but each piece is computed in another thread, so that the event loop is not blocked."""
        import asyncio  # imports ssl and logging, which most programs do not need

        number = 0
        while (piece := await asyncio.to_thread(self._piece, number)) is not None:
            number += 1
            yield piece

    def rounds(self) -> Iterator[Round]:
        """Yields rounds of token ids instead of text, beginning with the first one."""
        number = 0
        while number < len(self._rounds) or self._advance():
            yield self._rounds[number]
            number += 1

    def recorded(self, first: int = 0) -> list[Round]:
        """Returns the rounds so far, from number `first` on."""
        return self._rounds[first:]

    def text(self) -> str:
        """Runs the request to its end and returns all of its text. Other threads that use the session wait meanwhile."""
        with self._pair.claim.lock.held():
            return "".join(self)

    def prefill(self) -> None:
        """Computes the prompt's rows, except for its last token's. With `reuse_prefix`, keeps matching rows in the cache."""
        for _ in self.prefilling():
            pass

    def prefilling(self, longest: Callable[[], int] = lambda: PREFILL_ROWS) -> Iterator[int]:
        """Prefills in pieces. Yields after each piece the number of computed tokens; 0 if it came from a file of the prompt cache.

        A piece ends at the next multiple of `PREFILL_ROWS`, and has at most `longest()` tokens. An image whose rows attend to each other is
        always one piece. Between two pieces, requests on other sequences may run.
        """
        while not self.prefilled:
            with self._pair.claim.lock.computing(), self.guarded():
                rows = self._prefill_piece(longest())
            yield rows

    def require_claim(self) -> None:
        """Raises RequestError if the request cannot continue: it failed, another one began on its session, or the session is closed."""
        claim = self._pair.claim
        claim.require_open()
        if self._failure is not None:
            raise RequestError(f"the request was interrupted ({self._failure}) and cannot continue; start it again")
        if self._prefilled is not None and not claim.holds(self):
            raise RequestError(SUPERSEDED)

    def suspend(self) -> None:
        """Copies the rows out of the cache, so that another request may use it. `Session.resume` puts them back and continues the request.

        Raises RequestError if the request cannot continue or the backend cannot copy rows, BackendError and MemoryError. After an error,
        nothing has changed.
        """
        self.require_claim()
        target = self._pair.target
        if not isinstance(target, SavableTarget):
            raise RequestError("this backend cannot copy the cache of a request; let it run to its end")
        if self._prefilled is not None and target.length:
            self._copied = target.tokens.tolist(), target.state()
        self._pair.claim.release()

    def resume(self, pair: LoadedPair, policy: DraftLengthPolicy | None = None) -> None:
        """Puts the rows of a suspended request into the cache of `pair`, its former pair or another one of the same context.

        The first round then has no drafts. `policy` replaces the one that the request shares with the requests of its former session.
        Raises RequestError or BackendError if the rows cannot be put back; then the request cannot continue.
        """
        self._pair, copied, self._copied = pair, self._copied, None
        target = pair.target
        self.decoding.move(target, policy)
        self._decode = decode(target, pair.drafter, self.decoding)
        if self._prefilled is None:
            return
        pair.claim.claim(self)
        with self.guarded():
            target.rollback(0)
            if copied is not None and isinstance(target, SavableTarget):
                target.restore(*copied)
            if self._cached is not None and isinstance(target, SavableTarget):
                self._cached.target = target
                self._reading = self._cached.reading(self._prefilled)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Wraps work on the cache. Checks the claim first; after an error drops the rows, which may no longer match the tokens."""
        self.require_claim()
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Ends the request after an error during a forward, and drops its rows."""
        self._failure = str(error) or type(error).__name__  # not the error itself, whose traceback refers to this object
        self._pair.claim.release()
        with contextlib.suppress(Exception):
            self._pair.target.rollback(0)

    def record(self, round_done: Round) -> None:
        """Adds a round to the request's tokens, before any callback runs."""
        self._rounds.append(round_done)
        self.tokens += round_done.tokens
        if isinstance(self.decoding.rule, LogprobRule):
            self.logprobs += self.decoding.rule.take(len(round_done.tokens))
        self.stats.count_round(round_done.drafted, round_done.accepted, len(round_done.tokens), round_done.sources)
        if self.done:  # now, because the vocabulary may be closed later
            self._detokenizer.feed_rest(self.tokens)
            if self._cached is not None:
                self._cached.keep(0, 0.0, complete=True)

    def count(self, round_done: Round, seconds: float) -> None:
        """Adds the times of a recorded round that took `seconds`, and calls the callbacks."""
        stats = self.stats
        stats.decode_seconds += seconds
        if stats.rounds == 1:
            stats.first_token_seconds = stats.prefill_seconds + stats.decode_seconds
        stats.draft_seconds += round_done.draft_seconds
        stats.verify_seconds += round_done.verify_seconds
        self.monitor.record_round(round_done, stats)
        if self.options.on_round:
            self.options.on_round(round_done)

    def _prefill_piece(self, longest: int) -> int:
        """Reads a piece from the prompt cache, or computes it. Returns the number of computed tokens."""
        target, stats, prompt, start = self._pair.target, self.stats, self.prompt[:-1], time.perf_counter()
        if self._prefilled is None:
            self._pair.claim.claim(self)
            stats.reused_tokens = self._prefilled = reusable_prefix(target, prompt) if self.options.reuse_prefix else 0
            target.rollback(stats.reused_tokens)
            self._reading = self._cached.reading(self._prefilled) if self._cached is not None else iter(())
        if (length := next(self._reading, None)) is not None:
            stats.reused_tokens = self._prefilled = length
            rows = 0
        else:
            rows = self._compute_piece(prompt, longest)
        stats.prefill_seconds += time.perf_counter() - start
        return rows

    def _compute_piece(self, prompt: Sequence[int], longest: int) -> int:
        target, stats, first, begin = self._pair.target, self.stats, self._prefilled or 0, time.perf_counter()
        piece = next(pieces(first, len(prompt), self._spans, PREFILL_ROWS - first % PREFILL_ROWS), None)
        if piece is None:
            return 0
        _, whole, span = piece
        end = whole if span is not None and span.whole else min(whole, first + longest)
        if span is None:
            target.prefill(prompt[first:end], rows_read=int(end == len(prompt)))
        elif isinstance(target, MediaTarget):
            rows = span.rows()
            stats.encode_seconds += time.perf_counter() - begin
            stats.media_rows += end - first
            target.prefill_rows(prompt[first:end], rows[first - span.first : end - span.first], whole=span.whole)
        else:
            raise RequestError("this model takes text only; leave the images and sounds out")
        self._prefilled = end
        if self._cached is not None:
            self._cached.keep(end - first, time.perf_counter() - begin, complete=end == whole)
        return end - first

    def _advance(self) -> bool:
        """Runs one round, and the prefill before the first one. Returns False if the request has ended."""
        lock = self._pair.claim.lock
        with lock.held():
            if self.done:
                return False
            lock.require_idle()
            if not self._rounds:
                self.prefill()
            with lock.computing():
                self.require_claim()
                begin = time.perf_counter()  # measures the loop's own time, not what the caller does with a round
                try:
                    round_done = next(self._decode, None)
                    seconds = time.perf_counter() - begin
                    if round_done is None:
                        return False
                    self.record(round_done)
                except BaseException as error:
                    self.fail(error)
                    raise
            self.count(round_done, seconds)
            return True

    def _piece(self, number: int) -> str | None:
        """Returns piece `number` of the text, after running as many rounds as it needs; None after the last piece."""
        with self._pair.claim.lock.held():
            while number >= len(self._pieces) and not self._text_ended:
                if text := self._take():
                    self._pieces.append(text)
                elif not self._advance():
                    self._text_ended = True
                    self._detokenizer.feed_rest(self.tokens)
                    if text := self._detokenizer.finish():
                        self._pieces.append(text)
            return self._pieces[number] if number < len(self._pieces) else None

    def _take(self) -> str:
        """Returns the new text once it has `chunk_size` tokens; text that a stop string may still cut is held back."""
        if len(self.tokens) - self._chunk_start < self.options.chunk_size:
            return ""
        self._detokenizer.feed_rest(self.tokens)
        if text := self._detokenizer.take():
            self._chunk_start = len(self.tokens)
        return text

    def __repr__(self) -> str:
        state = self.finish_reason or ("running" if self.tokens else "not begun")
        return f"<Generation {state}: {self.stats.tokens} tokens after {len(self.prompt)}, {shortened(''.join(self._pieces))}>"

    def _repr_html_(self) -> str:
        return generation_html("".join(self._pieces), self.stats)


def reusable_prefix(target: Target, prompt: Sequence[int]) -> int:
    """Returns how many tokens at the beginning of `prompt` are in the cache; 0 if the cache cannot be rolled back to that length."""
    length = min(target.length, len(prompt))
    same = target.tokens[:length] == np.asarray(prompt[:length], np.int64)
    kept = length if same.all() else int(same.argmin())
    if isinstance(target, MediaTarget) and target.whole_rows:
        while inside_image(target.tokens, kept):
            kept -= 1
    return kept if kept >= target.rollback_floor else 0
