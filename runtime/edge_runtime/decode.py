"""The speculative loop: draft, verify, accept, roll back. Token ids only; it knows no text, no backend and no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from edge_runtime.acceptance import accept_greedy
from edge_runtime.backends.base import Drafter, Target
from edge_runtime.policies import DraftLengthPolicy


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round did. `tokens` are the emitted ones: the accepted drafts and the target's own token."""

    drafted: int
    accepted: int
    tokens: tuple[int, ...]


def decode(
    target: Target, drafter: Drafter | None, last: int, policy: DraftLengthPolicy, *, max_tokens: int, stop: Collection[int] = ()
) -> Iterator[Round]:
    """Yields rounds of greedy decoding until `max_tokens` tokens are out, a token of `stop` came, or the context is full.

    `last` is the newest token; all tokens before it are in the target's cache, and so they are again after every round. The
    emitted tokens equal the target's own greedy output, whatever the drafter proposes; a token of `stop` is emitted as the last
    one. Method: Leviathan et al. 2023 (arXiv 2211.17192), greedy case, with Gemma 4's drafter, which reads the target's own rows.
    """
    left = max_tokens
    while left > 0 and target.length < target.context:
        # A round emits at most one token more than it drafts, and needs a row for the newest token and for each draft.
        room = min(policy.draft_length(), left - 1, target.context - target.length - 1, target.rewind_slack)
        drafts = drafter.draft(last, room) if drafter is not None and room > 0 else []
        start = target.length
        verdict = accept_greedy(drafts, target.verify([last, *drafts]))
        tokens = _until_stop((*drafts[: verdict.accepted], verdict.next_token), stop)
        target.rollback(start + len(tokens))  # all emitted tokens but the newest, and the one that came before them
        policy.observe(len(drafts), verdict.accepted)
        yield Round(drafted=len(drafts), accepted=min(verdict.accepted, len(tokens)), tokens=tokens)
        last, left = tokens[-1], left - len(tokens)
        if last in stop:
            return


def _until_stop(tokens: tuple[int, ...], stop: Collection[int]) -> tuple[int, ...]:
    """Cuts after the first stop token, exactly where plain decoding ends."""
    for i, token in enumerate(tokens):
        if token in stop:
            return tokens[: i + 1]
    return tokens
