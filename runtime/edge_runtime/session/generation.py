"""One request while it runs: the rounds of the loop, their text and their figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edge_runtime.bundle.manifest import GenerationDefaults
from edge_runtime.decoding.acceptance_rules import DEFAULT_ACCEPTANCE, acceptance_rule
from edge_runtime.decoding.constrained_acceptance import constrained
from edge_runtime.decoding.logprobs import LogprobRule, TokenLogprob
from edge_runtime.decoding.loop import Decoding, Round, decode
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.drafting.policies import DraftLengthPolicy
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import Drafter, Target, Vocabulary
from edge_runtime.session.monitor import RequestMonitor
from edge_runtime.session.stats import DecodeStats
from edge_runtime.text.constraints import Constraint, ConstraintSource
from edge_runtime.text.stream import OutputText

GREEDY_PARAMS = SamplingParams(temperature=0.0)
# The default batch of llama.cpp, so that prefilling in pieces costs nothing and computes the same rows.
PREFILL_ROWS = 512
FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The options of a request. Raises RequestError for a limit below 1.

    `stop` strings end the text before them. `chunk_size` is the least number of tokens per piece of text, except for the last piece.
    `on_round` is called after each round, before its text is yielded. `reuse_prefix` keeps the cache's rows as far as the prompt begins
    with their tokens: fast in a chat, but rows that another request computed in batches of other sizes may differ in their last bits.
    `constraint` describes the valid texts. `logprobs` records each token's log probability and those of that many likeliest tokens.
    """

    max_tokens: int = 128
    sampling: SamplingParams = GREEDY_PARAMS
    acceptance: str = DEFAULT_ACCEPTANCE
    stop: Sequence[str] = ()
    chunk_size: int = 1
    on_round: Callable[[Round], None] | None = None
    reuse_prefix: bool = False
    constraint: ConstraintSource | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "chunk_size"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}; ask for at least 1")

    @property
    def repeatable(self) -> bool:
        """Whether the output is the same with and without drafts: greedy, or sampled with acceptance by match and a seed."""
        return self.sampling.temperature == 0 or (self.acceptance == "match" and self.sampling.seed is not None)


@dataclass(frozen=True, kw_only=True)
class LoadedPair:
    """The models that a request runs on, and what the target says about generation; `drafter` may be None."""

    target: Target
    drafter: Drafter | None
    vocabulary: Vocabulary
    generation: GenerationDefaults | None = None


class _Detokenizer:
    """Turns a request's tokens into text and finds the token that ends the request.

    It is apart from Generation because the loop calls `is_stop`: a reference cycle between the request and its loop would keep both in
    memory until the next garbage collection.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str], constraint: Constraint | None, end_tokens: Sequence[int] = ()) -> None:
        self._ends = vocabulary.eog_tokens | frozenset(end_tokens)
        self.text = OutputText(stop)
        self.constraint = constraint
        self._vocabulary = vocabulary
        self._stops = bool(stop)
        self._fed = 0

    def feed_rest(self, tokens: Sequence[int]) -> None:
        """Detokenizes the tokens that were not fed yet."""
        for token in tokens[self._fed :]:
            self._feed(token)

    def is_stop(self, token: int) -> bool:
        """Returns whether the newest token is the last."""
        # Stop strings are searched token by token inside the loop, so that a request ends at the same token as in plain decoding.
        # Without them the loop detokenizes nothing, and its seconds contain no text work.
        stopped = self._stops and self._feed(token)
        closed = self.constraint is not None and self.constraint.advance(token)
        return stopped or closed or token in self._ends

    def _feed(self, token: int) -> bool:
        self._fed += 1
        return self.text.feed(self._vocabulary.piece(token))


class Generation:
    """One request: iterating yields each piece of text as soon as its tokens are accepted; `stats` and `tokens` grow meanwhile.

    Nothing runs before the first piece is requested; leaving the loop early ends the request.
    """

    def __init__(
        self,
        pair: LoadedPair,
        prompt: Sequence[int],
        *,
        policy: DraftLengthPolicy,
        options: GenerationOptions,
        monitor: RequestMonitor,
        constraint: Constraint | None = None,
    ) -> None:
        self.stats = DecodeStats(prompt_tokens=len(prompt))
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []  # of `tokens`, if the options ask for them
        self.prompt = list(prompt)
        self.options = options
        self.monitor = monitor
        self._pair = pair
        defaults = pair.generation or GenerationDefaults()
        self._detokenizer = _Detokenizer(pair.vocabulary, options.stop, constraint, defaults.end_tokens)
        self._taken = 0
        rule = acceptance_rule(options.sampling, options.acceptance, prompt)
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
        )

    @property
    def target(self) -> Target:
        """The target whose cache the request writes to."""
        return self._pair.target

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._detokenizer.text.stopped_by

    @property
    def complete(self) -> bool:
        """Whether the text so far satisfies the request's constraint; always true without one. False if max_tokens cut it short."""
        constraint = self._detokenizer.constraint
        return constraint is None or constraint.complete

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it runs."""
        if self.decoding.stopped:
            return "stop"
        if len(self.tokens) >= self.options.max_tokens:
            return "length"
        return "context" if self.decoding.done else None

    def __iter__(self) -> Iterator[str]:
        """Yields non-empty pieces of text until the request is done."""
        for _ in self.rounds():
            if text := self.take():
                yield text
        if text := self.finish():
            yield text

    def rounds(self) -> Iterator[Round]:
        """Yields rounds of token ids instead of text. Iterate either the rounds or the request, once."""
        self.prefill()
        rounds = decode(self._pair.target, self._pair.drafter, self.decoding)
        while True:
            begin = time.perf_counter()  # only the loop's own time counts, not what the caller does with a round
            one = next(rounds, None)
            if one is None:
                return
            self.count(one, time.perf_counter() - begin)
            yield one

    def prefill(self) -> None:
        """Puts the prompt, all but its last token, into the cache; with `reuse_prefix` rows that match are kept."""
        for _ in self.prefilling():
            pass

    def prefilling(self) -> Iterator[None]:
        """Prefills in pieces of at most `PREFILL_ROWS` tokens; between two of them, requests on other sequences may run."""
        target, stats, prompt = self._pair.target, self.stats, self.prompt[:-1]
        stats.reused_tokens = reusable_prefix(target, prompt) if self.options.reuse_prefix else 0
        target.rollback(stats.reused_tokens)
        for first in range(stats.reused_tokens, len(prompt), PREFILL_ROWS):
            begin = time.perf_counter()
            target.prefill(prompt[first : first + PREFILL_ROWS])
            stats.prefill_seconds += time.perf_counter() - begin
            yield

    def count(self, one: Round, seconds: float) -> None:
        """Adds a round that took `seconds` to the request's tokens and figures."""
        stats = self.stats
        stats.decode_seconds += seconds
        if not stats.rounds:
            stats.first_token_seconds = stats.prefill_seconds + stats.decode_seconds
        stats.count_round(one.drafted, one.accepted, len(one.tokens))
        stats.draft_seconds += one.draft_seconds
        stats.verify_seconds += one.verify_seconds
        self.tokens += one.tokens
        if isinstance(self.decoding.rule, LogprobRule):
            self.logprobs += self.decoding.rule.take(len(one.tokens))
        self.monitor.record_round(one, stats)
        if self.options.on_round:
            self.options.on_round(one)

    def take(self) -> str:
        """Returns the new text once it has `chunk_size` tokens; text that a stop string may still cut is held back."""
        if len(self.tokens) - self._taken < self.options.chunk_size:
            return ""
        self._detokenizer.feed_rest(self.tokens)
        if text := self._detokenizer.text.take():
            self._taken = len(self.tokens)
        return text

    def finish(self) -> str:
        """Returns the rest of the text, after the last token."""
        self._detokenizer.feed_rest(self.tokens)
        return self._detokenizer.text.finish()

    def text(self) -> str:
        """Runs the request to its end and returns all of its text."""
        return "".join(self)


def reusable_prefix(target: Target, prompt: Sequence[int]) -> int:
    """Returns how many tokens at the beginning of `prompt` are in the cache, 0 if the cache cannot be rolled back to them."""
    length = min(target.length, len(prompt))
    same = target.tokens[:length] == np.asarray(prompt[:length], np.int64)
    kept = length if same.all() else int(same.argmin())
    return kept if kept >= target.rollback_floor else 0
