"""The speculative loop: draft, verify, accept, roll back. It handles token ids only, and knows neither text nor backends.

A round is split in two around the target's forward, so that one forward can serve several requests (`edge_runtime.session.batch`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.decoding.acceptance import GREEDY, AcceptanceRule
from edge_runtime.drafting.policies import DraftLengthPolicy, RoundPlan, RoundResult, Timing, WeighingPolicy
from edge_runtime.drafting.sources import MODEL, NO_PROPOSAL, Proposal, Proposals
from edge_runtime.interfaces import Drafter, DraftRequest, Logits, Target


class Round(NamedTuple):
    """The outcome of a round. `tokens` are the emitted tokens: the accepted drafts, then the target's own token.

    `drafted` counts the verified drafts; `sources` names the source of each accepted one (see `drafting.sources`). The seconds are those of
    the forwards, which other requests may have shared.
    """

    drafted: int
    accepted: int
    tokens: tuple[int, ...]
    sources: tuple[str, ...] = ()
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


class Decoding:
    """The state of one request between two rounds.

    - `last`: the newest token. After every round, all tokens before it are in the target's cache.
    - `is_stop`: called once for each emitted token, in order; the first token for which it returns True is the last one emitted.
    - `suppressed`: tokens that are never emitted; `held_back`: tokens that are not among the first `min_tokens` ones.
    - `proposals`: drafts from another source than the drafter, for a policy that can weigh them (`WeighingPolicy`).
    """

    def __init__(
        self,
        target: Target,
        last: int,
        policy: DraftLengthPolicy,
        *,
        max_tokens: int,
        rule: AcceptanceRule = GREEDY,
        is_stop: Callable[[int], bool] = lambda _: False,
        suppressed: Sequence[int] = (),
        held_back: Sequence[int] = (),
        min_tokens: int = 0,
        proposals: Proposals | None = None,
    ) -> None:
        self.last = last
        self.rule = rule
        self.stopped = False
        self._target = target
        self._policy = policy
        self._offer = policy.offer if isinstance(policy, WeighingPolicy) else None
        self._is_stop = is_stop
        self.suppressed = np.array(suppressed, np.intp)
        self._held_back = np.array(held_back, np.intp)
        self.min_tokens = min_tokens if held_back else 0
        self._left = max_tokens
        self._plan = RoundPlan(0)
        self._start = self._room = self._steps = self._rows = 0
        self._drafts: list[int] = []
        self._left_out: int | None = None
        self._began = 0.0  # time at which the round began
        self._proposals = proposals
        self._proposal = NO_PROPOSAL
        self._sources: list[str] = []

    def move(self, target: Target, policy: DraftLengthPolicy | None) -> None:
        """Continues with another target, whose cache holds the same tokens, and with another policy unless `policy` is None."""
        self._target = target
        if policy is not None:
            self._policy = policy
            self._offer = policy.offer if isinstance(policy, WeighingPolicy) else None

    @property
    def learns_costs(self) -> bool:
        """Whether the policy weighs drafts by their costs, and so learns from the timings of rounds."""
        return self._offer is not None

    @property
    def done(self) -> bool:
        """Whether `max_tokens` tokens were emitted, `is_stop` returned True, or the context is full."""
        return self.stopped or self._left <= 0 or self._target.length >= self._target.context

    def draft_request(self, sequence: int = 0, requests: int = 1) -> DraftRequest:
        """Begins a round that `requests` requests share; returns the draft to make. A `draft_length` of 0 means no draft."""
        target, rule = self._target, self.rule
        self._began = time.perf_counter()
        self._start = target.length
        # A round emits at most one token more than its drafts, and needs a row for the newest token and one for each draft.
        self._room = min(self._left - 1, target.context - target.length - 1, target.rewind_slack)
        self._proposal = self._propose([])
        if self._proposal.chances and self._offer is not None:
            self._offer(self._proposal.chances)
        self._plan = plan = self._policy.plan(requests, any_prefix=rule.any_prefix)
        return DraftRequest(
            sequence=sequence,
            last=self.last,
            draft_length=min(plan.draft_length, self._room),
            # A shadow draft is not verified, but some rules expect that every draft they sampled is.
            sampler=None if plan.shadow and not rule.any_prefix else rule.sampler,
            should_continue=plan.should_continue,
        )

    def tokens_to_verify(self, drafts: list[int]) -> list[int]:
        """Takes the drafts of the round. Returns the tokens to verify: the newest token, drafts, and padding, whose logits are ignored."""
        self._steps, drafted = len(drafts), drafts
        if self._plan.shadow:
            # `cut` also makes a constrained rule forget the drafts that it picked in this round.
            drafted, drafts = self.rule.cut(drafts), []
        elif self._plan.offered:
            drafts = list(self._proposal.guess.tokens[: self._plan.offered])
            self._sources = [self._proposal.guess.source] * len(drafts)
        else:
            drafted = drafts = self.rule.cut(drafts)
            self._sources = [MODEL] * len(drafts)
            drafts = drafts + self._extension(drafts)
        verified, padding = self._plan.to_verify(len(drafts))
        self._drafts = drafts[:verified]
        self._left_out = drafted[verified] if verified < len(drafted) else None
        padding = max(0, min(padding, self._room - len(self._drafts)))
        self._rows = 1 + len(self._drafts) + padding
        return [self.last, *self._drafts, *[self.last] * padding]

    def _propose(self, drafts: list[int]) -> Proposal:
        """Returns what the source of the request expects after `drafts`, limited to what the rule allows."""
        if self._proposals is None:
            return NO_PROPOSAL
        # No policy verifies more than MAX_DRAFT_LENGTH tokens, so longer guesses could not be compared.
        guess, chances = self._proposals.propose(drafts, min(self._room, MAX_DRAFT_LENGTH) - len(drafts))
        if not guess.tokens:
            return NO_PROPOSAL
        allowed = len(self.rule.cut([*drafts, *guess.tokens])) - len(drafts)
        if allowed < len(guess.tokens):
            return Proposal(guess._replace(tokens=guess.tokens[:allowed]), chances[:allowed])
        return Proposal(guess, chances)

    def _extension(self, drafts: list[int]) -> list[int]:
        if self._proposals is None or self._plan.extend is None:
            return []
        guess, chances = self._propose(drafts)
        tokens = list(guess.tokens[: self._plan.extend(len(drafts), chances)])
        self._sources += [guess.source] * len(tokens)
        return tokens

    def timing(self, draft_seconds: float, verify_seconds: float, *others: Decoding) -> Timing:
        """Returns the timing of the round, for this request and the `others` that shared its forwards."""
        if not others:
            return Timing(self._start, self._steps, draft_seconds, self._rows, verify_seconds)
        sharing = (self, *others)
        return Timing(
            length=sum(decoding._start for decoding in sharing),
            steps=sum(decoding._steps for decoding in sharing),
            draft_seconds=draft_seconds,
            rows=sum(decoding._rows for decoding in sharing),
            verify_seconds=verify_seconds,
            requests=len(sharing),
        )

    def _whole_round(self, timing: Timing) -> Timing:
        """Counts the whole round except drafting as verify time: with a small pair, planning and choosing tokens are a large part."""
        return timing._replace(verify_seconds=max(timing.verify_seconds, time.perf_counter() - self._began - timing.draft_seconds))

    def finish_round(self, logits: Logits, timing: Timing, *, report_timing: bool = True) -> Round:
        """Ends the round with the logits of `tokens_to_verify`, and rolls the cache back.

        Requests that share a round also share a cost model, so only one of them reports the timing to its policy.
        """
        if self.suppressed.size:
            # Changes the backend's own memory before anything reads it, so it affects greedy, sampled and constrained choices alike.
            logits[:, self.suppressed] = -np.inf
        if self.min_tokens > 0:
            logits[: self.min_tokens, self._held_back] = -np.inf
        result, drafts = self.rule.accept(self._drafts, logits), self._drafts
        tokens, self.stopped = _until_stop((*drafts[: result.accepted], result.next_token), self._is_stop)
        self._target.rollback(self._start + len(tokens))  # keeps the old `last` and all emitted tokens except the newest
        if self._proposals is not None:
            self._proposals.observe(tokens)
        is_known = self._left_out is not None and result.accepted == len(drafts)
        self._policy.observe(
            RoundResult(
                verified=len(drafts),
                accepted=result.accepted,
                left_out_right=self._left_out == result.next_token if is_known else None,
                timing=self._whole_round(timing) if report_timing else None,
            )
        )
        self.last, self._left, self.min_tokens = tokens[-1], self._left - len(tokens), self.min_tokens - len(tokens)
        return Round(
            drafted=len(drafts),
            accepted=min(result.accepted, len(tokens)),
            tokens=tokens,
            sources=tuple(self._sources[: min(result.accepted, len(tokens))]),
            draft_seconds=timing.draft_seconds,
            verify_seconds=timing.verify_seconds,
        )


def decode(target: Target, drafter: Drafter | None, decoding: Decoding) -> Iterator[Round]:
    """Yields rounds until `decoding` is done.

    The output equals the target's own, token for token or in distribution, as the acceptance rule promises; the drafter changes only the
    speed. Method: Leviathan et al. 2023 (arXiv 2211.17192), with Gemma 4's drafter, which reads the target's hidden rows.
    """
    while not decoding.done:
        request = decoding.draft_request()
        begin = time.perf_counter()
        drafts: list[int] = []
        if drafter is not None and request.draft_length > 0:
            drafts = drafter.draft(request.last, request.draft_length, request.sampler, request.should_continue)
        middle = time.perf_counter()
        logits = target.verify(decoding.tokens_to_verify(drafts))
        yield decoding.finish_round(logits, decoding.timing(middle - begin, time.perf_counter() - middle))


def _until_stop(tokens: tuple[int, ...], is_stop: Callable[[int], bool]) -> tuple[tuple[int, ...], bool]:
    """Cuts `tokens` after the first stop token, where plain decoding would stop too. Also returns whether there is one."""
    for i, token in enumerate(tokens):
        if is_stop(token):
            return tokens[: i + 1], True
    return tokens, False
