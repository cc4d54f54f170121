"""Figures of requests: counts and seconds, from which rates and percentiles are derived, and how they are shown."""

from __future__ import annotations

import html
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_REPR_CHARACTERS = 40


@dataclass
class DecodeStats:
    """Counts of one request. `lengths` counts rounds by their verified and accepted drafts.

    `reused_tokens` of the prompt were already in the cache. Times are in seconds: `prefill_seconds` until the prompt is in the cache,
    `first_token_seconds` from the request until the first emitted token, `decode_seconds` from the end of the prefill until the last
    token; of these, `draft_seconds` are drafting and `verify_seconds` the target's forwards. `accepted_from` counts the accepted drafts of
    each source: the drafter, a grammar, the memory of the text. `media_rows` of the prompt are rows of images and sound that were
    computed now; their encoders took `encode_seconds` of the prefill, 0 where the rows were kept from earlier.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    media_rows: int = 0
    encode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accepted_from: Counter[str] = field(default_factory=Counter)

    def count_round(self, drafted: int, accepted: int, emitted: int, sources: Sequence[str] = ()) -> None:
        """Adds one round; `sources` names where each accepted draft came from."""
        for source in sources:
            self.accepted_from[source] += 1
        self.rounds += 1
        self.tokens += emitted
        self.drafted += drafted
        self.accepted += accepted
        self.lengths[drafted, accepted] = self.lengths.get((drafted, accepted), 0) + 1

    @property
    def drafted_at(self) -> list[int]:
        """For each position the rounds that drafted it."""
        longest = max((drafted for drafted, _ in self.lengths), default=0)
        return [sum(rounds for (drafted, _), rounds in self.lengths.items() if drafted > i) for i in range(longest)]

    @property
    def accepted_at(self) -> list[int]:
        """For each position that was drafted the rounds that accepted it."""
        return [sum(rounds for (_, accepted), rounds in self.lengths.items() if accepted > i) for i in range(len(self.drafted_at))]

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position i: rounds that accepted draft i / rounds that drafted it."""
        return [a / d for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens / target forwards while decoding: 1 is plain decoding."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens / decode seconds."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Counts, seconds and derived rates under stable keys."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "accepted_from": dict(self.accepted_from),
            "acceptance_rate": self.acceptance_rate,
            "acceptance_by_position": self.acceptance_by_position,
            "mean_acceptance_length": self.mean_acceptance_length,
            "tokens_per_second": self.tokens_per_second,
            "media_rows": self.media_rows,
            "encode_seconds": self.encode_seconds,
            "prefill_seconds": self.prefill_seconds,
            "time_to_first_token_seconds": self.first_token_seconds,
            "decode_seconds": self.decode_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
        }


class Latencies:
    """Latencies of single tokens: the seconds of a round divided by the tokens it emitted. Percentiles are of the last `keep` rounds."""

    def __init__(self, keep: int | None = None) -> None:
        self._rounds: deque[tuple[float, int]] = deque(maxlen=keep)
        self.seconds = 0.0
        self.count = 0

    def add(self, seconds: float, tokens: int = 1) -> None:
        """Adds a round that took `seconds` and emitted `tokens`."""
        if tokens > 0:
            self._rounds.append((seconds / tokens, tokens))
            self.seconds += seconds
            self.count += tokens

    def percentile(self, percent: int) -> float | None:
        """Returns the smallest latency that `percent` of the tokens do not exceed (nearest rank); None without tokens."""
        left = percent * sum(tokens for _, tokens in self._rounds)
        for latency, tokens in sorted(self._rounds):
            left -= 100 * tokens
            if left <= 0:
                return latency
        return None


def shortened(text: str) -> str:
    """Returns the repr of the text's beginning."""
    return repr(text if len(text) <= _REPR_CHARACTERS else text[:_REPR_CHARACTERS] + "…")


def figures(stats: DecodeStats) -> str:
    """Returns the figures of a request in a few words."""
    parts = [f"{stats.tokens} tokens", f"{stats.tokens_per_second:.1f} tok/s"]
    if stats.acceptance_rate is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of drafts accepted")
        parts.append(f"mean acceptance length {stats.mean_acceptance_length:.2f}")
    return ", ".join(parts)


def generation_html(text: str, stats: DecodeStats) -> str:
    """Returns the text and its figures as HTML; the text is escaped."""
    return f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre><small>{html.escape(figures(stats))}</small>"
