"""One request while it runs: rounds of the loop made into text, with its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edge_runtime.backends.base import Drafter, Target, Vocabulary
from edge_runtime.constrained_rules import constrained
from edge_runtime.constraint import Constraint, ConstraintSource
from edge_runtime.decode import Round, decode
from edge_runtime.errors import RequestError
from edge_runtime.policies import DraftLengthPolicy
from edge_runtime.rules import DEFAULT_ACCEPTANCE, acceptance_rule
from edge_runtime.sampling import SamplingParams
from edge_runtime.stats import DecodeStats
from edge_runtime.text import OutputText

GREEDY_PARAMS = SamplingParams(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """What a request asks for besides its prompt. Raises RequestError for a limit below 1.

    `stop` strings end the text before them. `chunk_size` is how many tokens at least make a piece of text, except for the last;
    `on_round` is called after each round, before its text is out. `constraint` says what the text must be.
    """

    max_tokens: int = 128
    sampling: SamplingParams = GREEDY_PARAMS
    acceptance: str = DEFAULT_ACCEPTANCE
    stop: Sequence[str] = ()
    chunk_size: int = 1
    on_round: Callable[[Round], None] | None = None
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
class OpenedPair:
    """What a request runs on; there may be no drafter."""

    target: Target
    drafter: Drafter | None
    vocabulary: Vocabulary


class Generation:
    """One request: iterate it for text pieces, each the moment its tokens are accepted; `stats` and `tokens` grow meanwhile.

    Nothing runs before the first piece is asked for; leaving the loop early ends the request.
    """

    def __init__(
        self, pair: OpenedPair, prompt: Sequence[int], policy: DraftLengthPolicy, options: GenerationOptions,
        constraint: Constraint | None = None,
    ) -> None:  # fmt: skip
        self.stats = DecodeStats(prompt_tokens=len(prompt))
        self.tokens: list[int] = []
        self.prompt = list(prompt)
        self.options = options
        self._pair = pair
        self._policy = policy
        self._constraint = constraint
        rule = acceptance_rule(options.sampling, options.acceptance, prompt)
        self._rule = rule if constraint is None else constrained(rule, constraint)
        self._text = OutputText(options.stop)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._text.stopped_by

    @property
    def whole(self) -> bool:
        """Whether the text so far is all that the request's constraint asks for; without one always. False after max_tokens cut it short."""
        return self._constraint is None or self._constraint.whole

    def __iter__(self) -> Iterator[str]:
        """Yields non-empty pieces of text until the request is done."""
        waiting = 0
        for one in self.rounds():
            if not self.options.stop:
                for token in one.tokens:
                    self._feed(token)
            waiting += len(one.tokens)
            if waiting >= self.options.chunk_size and (text := self._text.take()):
                yield text
                waiting = 0
        if text := self._text.finish():
            yield text

    def rounds(self) -> Iterator[Round]:
        """Yields rounds of token ids, for those who want no text. Use either this or the pieces, once."""
        target, stats = self._pair.target, self.stats
        begin = time.perf_counter()
        target.rollback(0)
        target.prefill(self.prompt[:-1])
        stats.prefill_seconds = time.perf_counter() - begin
        rounds = decode(
            target, self._pair.drafter, self.prompt[-1], self._policy,
            max_tokens=self.options.max_tokens, rule=self._rule, ends=self._ends,
        )  # fmt: skip
        while True:
            begin = time.perf_counter()  # only the loop's own time counts, not what the caller does with a round
            one = next(rounds, None)
            if one is None:
                return
            stats.decode_seconds += time.perf_counter() - begin
            if not stats.rounds:
                stats.first_token_seconds = stats.prefill_seconds + stats.decode_seconds
            stats.count_round(one.drafted, one.accepted, len(one.tokens))
            self.tokens += one.tokens
            if self.options.on_round:
                self.options.on_round(one)
            yield one

    def text(self) -> str:
        """Runs the request to its end and returns all text."""
        return "".join(self)

    def _feed(self, token: int) -> bool:
        return self._text.feed(self._pair.vocabulary.piece(token))

    def _ends(self, token: int) -> bool:
        # With stop strings the text is made token by token inside the loop, as plain decoding would: so they end the request at the
        # same token. Without them the loop does no text work, and its seconds hold none.
        stopped = bool(self.options.stop) and self._feed(token)
        closed = self._constraint is not None and self._constraint.advance(token)
        return stopped or closed or token in self._pair.vocabulary.eog_tokens
