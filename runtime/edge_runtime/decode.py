"""The speculative loop: draft, verify, accept, roll back. Token ids only; it knows no text, no backend and no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from edge_runtime.backends.base import Drafter, Target
from edge_runtime.policies import DraftLengthPolicy
from edge_runtime.rules import GREEDY, AcceptanceRule


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round did. `tokens` are the emitted ones: the accepted drafts and the target's own token."""

    drafted: int
    accepted: int
    tokens: tuple[int, ...]


def decode(
    target: Target, drafter: Drafter | None, last: int, policy: DraftLengthPolicy, *, max_tokens: int,
    rule: AcceptanceRule = GREEDY, ends: Callable[[int], bool] = lambda _: False,
) -> Iterator[Round]:  # fmt: skip
    """Yields rounds until `max_tokens` tokens are out, `ends` said yes, or the context is full.

    `last` is the newest token; all tokens before it are in the target's cache, and so they are again after every round. What is
    emitted is the target's own, token for token or in distribution as `rule` has it, whatever the drafter proposes. `ends` is asked
    once about each emitted token, in order; the one it says yes to is the last. Method: Leviathan et al. 2023 (arXiv 2211.17192),
    with Gemma 4's drafter, which reads the target's own rows.
    """
    left, ended = max_tokens, False
    while left > 0 and not ended and target.length < target.context:
        # A round emits at most one token more than it drafts, and needs a row for the newest token and for each draft.
        room = min(policy.draft_length(), left - 1, target.context - target.length - 1, target.rewind_slack)
        drafts = rule.admit(drafter.draft(last, room, rule.choose)) if drafter is not None and room > 0 else []
        start = target.length
        verdict = rule.accept(drafts, target.verify([last, *drafts]))
        tokens, ended = _until_end((*drafts[: verdict.accepted], verdict.next_token), ends)
        target.rollback(start + len(tokens))  # all emitted tokens but the newest, and the one that came before them
        policy.observe(len(drafts), verdict.accepted)
        yield Round(drafted=len(drafts), accepted=min(verdict.accepted, len(tokens)), tokens=tokens)
        last, left = tokens[-1], left - len(tokens)


def _until_end(tokens: tuple[int, ...], ends: Callable[[int], bool]) -> tuple[tuple[int, ...], bool]:
    """Cuts after the token that ends the request, exactly where plain decoding ends; tells whether there is one."""
    for i, token in enumerate(tokens):
        if ends(token):
            return tokens[: i + 1], True
    return tokens, False
