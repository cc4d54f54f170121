"""The figures of a request in one line for a person."""

from __future__ import annotations

from edge_runtime.drafting.drafter_kinds import DrafterKind
from edge_runtime.session.stats import DecodeStats


def summary(stats: DecodeStats, drafter: DrafterKind) -> str:
    """One line of figures; `drafter` is named where it drafted."""
    parts = [f"{stats.tokens} tokens", f"{stats.tokens_per_second:.1f} tok/s", f"mean acceptance length {stats.mean_acceptance_length:.2f}"]
    if stats.acceptance_rate is not None:
        by_position = " ".join(f"{share:.0%}" for share in stats.acceptance_by_position)
        parts.append(f"{stats.acceptance_rate:.1%} of {drafter} drafts accepted (by position {by_position})")
    parts.append(f"first token after {stats.first_token_seconds * 1000:.0f} ms")
    return ", ".join(parts)
