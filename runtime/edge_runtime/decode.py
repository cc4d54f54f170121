"""The speculative loop: draft, verify, accept, roll back. Token ids only; it knows no text, no backend and no clock.

A round has two halves around the target's forward, so that one forward can serve the rounds of several requests (edge_runtime/lockstep.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edge_runtime.backends.base import Drafter, Logits, Target
from edge_runtime.policies import DraftLengthPolicy
from edge_runtime.rules import GREEDY, AcceptanceRule


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round did. `tokens` are the emitted ones: the accepted drafts and the target's own token."""

    drafted: int
    accepted: int
    tokens: tuple[int, ...]


class Decoding:
    """One request between two rounds: how much it may draft, and what a verified draft makes of it.

    `last` is the newest token; all tokens before it are in the target's cache, and so they are again after every round. `ends` is
    asked once about each emitted token, in order; the one it says yes to is the last.
    """

    def __init__(
        self, target: Target, last: int, policy: DraftLengthPolicy, *, max_tokens: int,
        rule: AcceptanceRule = GREEDY, ends: Callable[[int], bool] = lambda _: False,
    ) -> None:  # fmt: skip
        self.last = last
        self.rule = rule
        self.ended = False
        self._target = target
        self._policy = policy
        self._left = max_tokens
        self._ends = ends

    @property
    def done(self) -> bool:
        """Whether `max_tokens` tokens are out, `ends` said yes, or the context is full."""
        return self.ended or self._left <= 0 or self._target.length >= self._target.context

    def draft_length(self) -> int:
        """Returns how many tokens may be drafted now, 0 for a round without drafts. Asks the policy: once a round."""
        target = self._target
        # A round emits at most one token more than it drafts, and needs a row for the newest token and for each draft.
        return min(self._policy.draft_length(), self._left - 1, target.context - target.length - 1, target.rewind_slack)

    def admit(self, drafts: list[int]) -> list[int]:
        """Returns the drafts that are worth verifying; asked once a round."""
        return self.rule.admit(drafts)

    def settle(self, drafts: Sequence[int], logits: Logits) -> Round:
        """Judges `drafts` on the `logits` [len(drafts) + 1, vocabulary] of verifying [last, *drafts], and rolls the cache back."""
        start = self._target.length - len(drafts) - 1
        verdict = self.rule.accept(drafts, logits)
        tokens, self.ended = _until_end((*drafts[: verdict.accepted], verdict.next_token), self._ends)
        self._target.rollback(start + len(tokens))  # all emitted tokens but the newest, and the one that came before them
        self._policy.observe(len(drafts), verdict.accepted)
        self.last, self._left = tokens[-1], self._left - len(tokens)
        return Round(drafted=len(drafts), accepted=min(verdict.accepted, len(tokens)), tokens=tokens)


def decode(target: Target, drafter: Drafter | None, decoding: Decoding) -> Iterator[Round]:
    """Yields rounds until `decoding` is done.

    What is emitted is the target's own, token for token or in distribution as the rule has it, whatever the drafter proposes. Method:
    Leviathan et al. 2023 (arXiv 2211.17192), with Gemma 4's drafter, which reads the target's own rows.
    """
    while not decoding.done:
        length = decoding.draft_length()
        drafts = drafter.draft(decoding.last, length, decoding.rule.choose) if drafter is not None and length > 0 else []
        drafts = decoding.admit(drafts)
        yield decoding.settle(drafts, target.verify([decoding.last, *drafts]))


def _until_end(tokens: tuple[int, ...], ends: Callable[[int], bool]) -> tuple[tuple[int, ...], bool]:
    """Cuts after the token that ends the request, exactly where plain decoding ends; tells whether there is one."""
    for i, token in enumerate(tokens):
        if ends(token):
            return tokens[: i + 1], True
    return tokens, False
