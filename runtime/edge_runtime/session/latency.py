"""Seconds per token and their percentiles. A token's latency is the seconds of its round divided by the tokens the round gave."""

from __future__ import annotations

from collections import deque


class Latencies:
    """Latencies of single tokens, kept per round; with `keep` only those of the last so many rounds count in percentiles."""

    def __init__(self, keep: int | None = None) -> None:
        self._rounds: deque[tuple[float, int]] = deque(maxlen=keep)
        self.seconds = 0.0
        self.count = 0

    def add(self, seconds: float, tokens: int = 1) -> None:
        """Adds a round of `seconds` that gave `tokens`, each of which took its share."""
        if tokens > 0:
            self._rounds.append((seconds / tokens, tokens))
            self.seconds += seconds
            self.count += tokens

    def percentile(self, percent: int) -> float | None:
        """Returns the least latency that `percent` of the tokens do not exceed (nearest rank); None without tokens."""
        left = percent * sum(tokens for _, tokens in self._rounds)
        for latency, tokens in sorted(self._rounds):
            left -= 100 * tokens
            if left <= 0:
                return latency
        return None
