"""One request while it runs: rounds of the loop made into text, with its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edge_runtime.decoding.acceptance_rules import DEFAULT_ACCEPTANCE, acceptance_rule
from edge_runtime.decoding.constrained_acceptance import constrained
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
# As many as a batch of llama.cpp has by default, so pieces cost nothing and compute the same rows.
PREFILL_ROWS = 512
FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What a request asks for besides its prompt. Raises RequestError for a limit below 1.

    `stop` strings end the text before them. `chunk_size` is how many tokens at least make a piece of text, except for the last;
    `on_round` is called after each round, before its text is out. `reuse_prefix` keeps the cache's rows as far as the prompt begins
    with their tokens: quick in a chat; rows that another request computed in batches of other sizes may differ in their last bits.
    `constraint` says what the text must be.
    """

    max_tokens: int = 128
    sampling: SamplingParams = GREEDY_PARAMS
    acceptance: str = DEFAULT_ACCEPTANCE
    stop: Sequence[str] = ()
    chunk_size: int = 1
    on_round: Callable[[Round], None] | None = None
    reuse_prefix: bool = False
    constraint: ConstraintSource | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "chunk_size"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}; ask for at least 1")

    @property
    def repeatable(self) -> bool:
        """Whether the output is the same with any drafts and with none: greedy, or drawn by match with a seed."""
        return self.sampling.temperature == 0 or (self.acceptance == "match" and self.sampling.seed is not None)


@dataclass(frozen=True, kw_only=True)
class LoadedPair:
    """The models that a request runs on; `drafter` may be None."""

    target: Target
    drafter: Drafter | None
    vocabulary: Vocabulary


class _Spelling:
    """A request's tokens as text, and whether one of them ends it.

    Apart from Generation, because the loop calls `is_stop`: a request that held a loop that holds the request would be kept in memory until
    garbage is collected.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str], constraint: Constraint | None) -> None:
        self.text = OutputText(stop)
        self.constraint = constraint
        self._vocabulary = vocabulary
        self._stops = bool(stop)
        self._fed = 0

    def feed_rest(self, tokens: Sequence[int]) -> None:
        """Takes those of the request's tokens that are not text yet."""
        for token in tokens[self._fed :]:
            self._feed(token)

    def is_stop(self, token: int) -> bool:
        """Returns whether the newest token is the last."""
        # With stop strings the text is made token by token inside the loop, as plain decoding would: so they end the request at the
        # same token. Without them the loop does no text work, and its seconds hold none.
        stopped = self._stops and self._feed(token)
        closed = self.constraint is not None and self.constraint.advance(token)
        return stopped or closed or token in self._vocabulary.eog_tokens

    def _feed(self, token: int) -> bool:
        self._fed += 1
        return self.text.feed(self._vocabulary.piece(token))


class Generation:
    """One request: iterate it for text pieces, each the moment its tokens are accepted; `stats` and `tokens` grow meanwhile.

    Nothing runs before the first piece is asked for; leaving the loop early ends the request.
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
        self.prompt = list(prompt)
        self.options = options
        self.monitor = monitor
        self._pair = pair
        self._spelling = _Spelling(pair.vocabulary, options.stop, constraint)
        self._taken = 0
        rule = acceptance_rule(options.sampling, options.acceptance, prompt)
        if constraint is not None:
            rule = constrained(rule, constraint)
        self.decoding = Decoding(
            pair.target, self.prompt[-1], policy, max_tokens=options.max_tokens, rule=rule, is_stop=self._spelling.is_stop
        )

    @property
    def target(self) -> Target:
        """The target whose cache the request writes to."""
        return self._pair.target

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._spelling.text.stopped_by

    @property
    def whole(self) -> bool:
        """Whether the text so far is all that the request's constraint asks for; without one always. False after max_tokens cut it short."""
        constraint = self._spelling.constraint
        return constraint is None or constraint.whole

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request is over; None while it is not."""
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
        """Yields rounds of token ids, for those who want no text. Use either this or the pieces, once."""
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
        """Puts the prompt, all but its last token, into the cache; keeps the rows that are there already if the options say so."""
        for _ in self.prefilling():
            pass

    def prefilling(self) -> Iterator[None]:
        """Prefills in pieces of at most `PREFILL_ROWS` tokens: between two of them others may use their sequences."""
        target, stats, prompt = self._pair.target, self.stats, self.prompt[:-1]
        stats.reused_tokens = reusable_prefix(target, prompt) if self.options.reuse_prefix else 0
        target.rollback(stats.reused_tokens)
        for first in range(stats.reused_tokens, len(prompt), PREFILL_ROWS):
            begin = time.perf_counter()
            target.prefill(prompt[first : first + PREFILL_ROWS])
            stats.prefill_seconds += time.perf_counter() - begin
            yield

    def count(self, one: Round, seconds: float) -> None:
        """Adds a round that took `seconds` to the request's figures and text."""
        stats = self.stats
        stats.decode_seconds += seconds
        if not stats.rounds:
            stats.first_token_seconds = stats.prefill_seconds + stats.decode_seconds
        stats.count_round(one.drafted, one.accepted, len(one.tokens))
        stats.draft_seconds += one.draft_seconds
        stats.verify_seconds += one.verify_seconds
        self.tokens += one.tokens
        self.monitor.record_round(one, stats)
        if self.options.on_round:
            self.options.on_round(one)

    def take(self) -> str:
        """Returns the text that became certain, once there are `chunk_size` tokens of it."""
        if len(self.tokens) - self._taken < self.options.chunk_size:
            return ""
        self._spelling.feed_rest(self.tokens)
        if text := self._spelling.text.take():
            self._taken = len(self.tokens)
        return text

    def finish(self) -> str:
        """Returns the rest of the text, once no token follows."""
        self._spelling.feed_rest(self.tokens)
        return self._spelling.text.finish()

    def text(self) -> str:
        """Runs the request to its end and returns all text."""
        return "".join(self)


def reusable_prefix(target: Target, prompt: Sequence[int]) -> int:
    """Returns how many tokens at the beginning of `prompt` are the cache's own, 0 where it cannot go back to them."""
    length = min(target.length, len(prompt))
    same = target.tokens[:length] == np.asarray(prompt[:length], np.int64)
    kept = length if same.all() else int(same.argmin())
    return kept if kept >= target.rollback_floor else 0
