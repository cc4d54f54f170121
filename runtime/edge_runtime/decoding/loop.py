"""The speculative loop: draft, verify, accept, roll back. Token ids only; it knows no text and no backend.

A round has two halves around the target's forward, so that one forward can serve the rounds of several requests (edge_runtime/lockstep.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edge_runtime.decoding.acceptance_rules import GREEDY, AcceptanceRule
from edge_runtime.drafting.policies import DraftLengthPolicy, Timing
from edge_runtime.interfaces import Drafter, DraftRequest, Logits, Target


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round did. `tokens` are the emitted ones: the accepted drafts and the target's own token.

    The seconds are those of the drafting and of the verify, which other requests may have shared.
    """

    drafted: int
    accepted: int
    tokens: tuple[int, ...]
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


class Decoding:
    """One request between two rounds: how much it may draft, and what a verified draft makes of it.

    `last` is the newest token; all tokens before it are in the target's cache, and so they are again after every round. `ends` is
    asked once about each emitted token, in order; the one it says yes to is the last.
    """

    def __init__(
        self,
        target: Target,
        last: int,
        policy: DraftLengthPolicy,
        *,
        max_tokens: int,
        rule: AcceptanceRule = GREEDY,
        ends: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.last = last
        self.rule = rule
        self.ended = False
        self._target = target
        self._policy = policy
        self._start = self._room = self._asked = self._rows = 0
        self._drafts: list[int] = []
        self._heard: list[int] = []
        self._left = max_tokens
        self._ends = ends

    @property
    def done(self) -> bool:
        """Whether `max_tokens` tokens are out, `ends` said yes, or the context is full."""
        return self.ended or self._left <= 0 or self._target.length >= self._target.context

    def ask(self, sequence: int = 0, requests: int = 1) -> DraftRequest:
        """Begins a round that `requests` requests share: says what to draft, at most. A `draft_length` of 0 asks for nothing."""
        target = self._target
        self._start, self._asked = target.length, 0
        # A round emits at most one token more than it drafts, and needs a row for the newest token and for each draft.
        self._room = min(self._left - 1, target.context - target.length - 1, target.rewind_slack)
        length = min(self._policy.draft_length(requests, any_prefix=self.rule.any_prefix), self._room)
        # What is not verified must not be drawn either: the rule would wait for a verdict on it.
        sampler = None if self._policy.listening else self.rule.sampler
        return DraftRequest(
            sequence=sequence, last=self.last, draft_length=length, sampler=sampler, should_continue=self._policy.should_continue
        )

    def rows(self, drafts: list[int]) -> list[int]:
        """Takes the round's drafts; returns the tokens to verify: the newest, the drafts worth it, and padding that nobody looks at."""
        self._asked = len(drafts)
        self._heard = drafts[:1] if self._policy.listening else []
        drafts = [] if self._policy.listening else self.rule.admit(drafts)
        self._drafts = drafts[: self._policy.keep(len(drafts))]
        padding = max(0, min(self._policy.padding(len(self._drafts)), self._room - len(self._drafts)))
        self._rows = 1 + len(self._drafts) + padding
        return [self.last, *self._drafts, *[self.last] * padding]

    def timing(self, draft_seconds: float, verify_seconds: float, *others: Decoding) -> Timing:
        """What the round took: of this request and of `others`, which shared its forwards."""
        every = (self, *others)
        return Timing(
            length=sum(one._start for one in every),
            steps=sum(one._asked for one in every),
            draft_seconds=draft_seconds,
            rows=sum(one._rows for one in every),
            verify_seconds=verify_seconds,
            requests=len(every),
        )

    def settle(self, logits: Logits, timing: Timing, *, tell: bool = True) -> Round:
        """Ends the round on the logits of verifying `rows`, and rolls the cache back. `tell` the policy what the round took."""
        drafts = self._drafts
        verdict = self.rule.accept(drafts, logits)
        tokens, self.ended = _until_end((*drafts[: verdict.accepted], verdict.next_token), self._ends)
        self._target.rollback(self._start + len(tokens))  # all emitted tokens but the newest, and the one that came before them
        if self._heard:
            self._policy.hear(self._heard[0] == tokens[0])
        if tell:
            self._policy.timed(timing)
        self._policy.observe(len(drafts), verdict.accepted)
        self.last, self._left = tokens[-1], self._left - len(tokens)
        accepted = min(verdict.accepted, len(tokens))
        return Round(
            drafted=len(drafts),
            accepted=accepted,
            tokens=tokens,
            draft_seconds=timing.draft_seconds,
            verify_seconds=timing.verify_seconds,
        )


def decode(target: Target, drafter: Drafter | None, decoding: Decoding) -> Iterator[Round]:
    """Yields rounds until `decoding` is done.

    What is emitted is the target's own, token for token or in distribution as the rule has it, whatever the drafter proposes. Method:
    Leviathan et al. 2023 (arXiv 2211.17192), with Gemma 4's drafter, which reads the target's own rows.
    """
    while not decoding.done:
        begin = time.perf_counter()
        ask = decoding.ask()
        wanted = drafter is not None and ask.draft_length > 0
        drafts = drafter.draft(ask.last, ask.draft_length, ask.sampler, ask.should_continue) if drafter and wanted else []
        middle = time.perf_counter()
        logits = target.verify(decoding.rows(drafts))
        yield decoding.settle(logits, decoding.timing(middle - begin, time.perf_counter() - middle))


def _until_end(tokens: tuple[int, ...], ends: Callable[[int], bool]) -> tuple[tuple[int, ...], bool]:
    """Cuts after the token that ends the request, exactly where plain decoding ends; tells whether there is one."""
    for i, token in enumerate(tokens):
        if ends(token):
            return tokens[: i + 1], True
    return tokens, False
