"""When a policy drafts although no draft seems to pay: an unlucky start, or wrongly computed costs, must not end drafting for good."""

from __future__ import annotations

# Rounds without a draft before the policy asks: at first, and the most after they were doubled again and again.
FIRST_WAIT, LONGEST_WAIT = 4, 32
# What a question may cost of a plain round; what costs more waits until it is the second share of the rounds before it.
ASK_SHARE, DEAR_SHARE = 0.35, 0.01
# The most tokens that are drafted to ask, and how many are where nothing was measured yet, whatever was computed.
ASK_LENGTH, START_LENGTH = 3, 2


class AskSchedule:
    """Counts the rounds without drafts: asks after 4, 8, 16 and then always 32 of them, and at once where a question brought tokens."""

    def __init__(self) -> None:
        self._quiet, self._wait = 0, FIRST_WAIT

    def is_due(self, cost: float, *, is_dear: bool) -> bool:
        """Whether to ask now, where that costs so many plain rounds; what `is_dear` waits until it is a small share of the rounds."""
        return self._quiet >= self._wait and (not is_dear or self._quiet * DEAR_SHARE >= cost)

    def begin_request(self) -> None:
        """Another text begins, of which the last one says little."""
        self._wait = min(self._wait, FIRST_WAIT)

    def count_plain(self) -> None:
        """Counts a round without a draft of the drafter."""
        self._quiet += 1

    def count_draft(self) -> None:
        """Counts a round that drafted because that pays."""
        self._quiet, self._wait = 0, FIRST_WAIT

    def count_question(self, accepted: int) -> None:
        """Counts a round that asked."""
        self._quiet, self._wait = 0, 0 if accepted else min(max(2 * self._wait, FIRST_WAIT), LONGEST_WAIT)
