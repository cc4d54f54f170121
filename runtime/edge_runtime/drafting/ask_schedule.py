"""When a policy asks whether drafts pay although none seem to: before the first draft, and again and again while nothing is drafted."""

from __future__ import annotations

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH

# Rounds without a draft before a question: at first, and the most after it was doubled again and again.
FIRST_WAIT, LONGEST_WAIT = 4, 32
# What a question drafts at most: tokens, and what these may cost of a plain round. It goes on while all drafts are right by this chance.
ASK_LENGTH, ASK_SHARE, ASK_CHANCE = 3, 0.35, 0.3
# The same of the first draft of a pair that was never tried here: at least so many tokens as long as they cost at most two plain rounds.
START_LENGTH, START_SHARE = 4, 1.2
START_LEAST, START_LEAST_SHARE = 2, 2.0


class AskSchedule:
    """Counts the rounds without drafts.

    `longest` limits drafts until one of a pair that was never tried is right: an error of what was computed must not cost much.
    """

    def __init__(self, *, untried: bool) -> None:
        """`untried`: the pair was never run here, so what is known of it was computed or measured elsewhere."""
        self.untried = untried
        self.longest = START_LENGTH if untried else MAX_DRAFT_LENGTH
        self._quiet, self._wait = 0, FIRST_WAIT

    @property
    def is_due(self) -> bool:
        """Whether to ask now."""
        return self.untried or self._quiet >= self._wait

    def begin_request(self) -> None:
        """Another text begins, about which the last one says less: asks sooner."""
        self._quiet, self._wait = 0, max(FIRST_WAIT, self._wait // 4)

    def count_draft(self, accepted: int) -> None:
        """Counts a round that drafted because that pays."""
        self._limit(accepted)
        self._quiet, self._wait = 0, FIRST_WAIT

    def count_answer(self, accepted: int, longest_wait: int = LONGEST_WAIT) -> None:
        """Counts a round that asked; where a draft was right, the next one asks again."""
        self._limit(accepted)
        self._quiet, self._wait = 0, 0 if accepted else min(max(2 * self._wait, FIRST_WAIT), longest_wait)

    def count_plain(self) -> None:
        """Counts a round without a draft of the drafter."""
        self._quiet += 1

    def _limit(self, accepted: int) -> None:
        self.untried = False
        if accepted:
            self.longest = MAX_DRAFT_LENGTH
        elif self.longest < MAX_DRAFT_LENGTH:
            self.longest = max(1, self.longest // 2)
