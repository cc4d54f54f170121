"""How many tokens to draft next. A policy sees counts, never tokens or logits."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import ShouldContinue

COUNTING_POLICIES = ("fixed", "rolling", "stepped")
POLICIES = ("profit", *COUNTING_POLICIES)
WINDOW_ROUNDS = 10


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a round took, in seconds: `steps` drafted tokens, and a verify of `rows` rows after `length` tokens.

    Where several requests share the forwards, all three are their sums.
    """

    length: int
    steps: int
    draft_seconds: float
    rows: int
    verify_seconds: float
    requests: int = 1


class DraftLengthPolicy(Protocol):
    """Decides before each round, and if it likes after each draft; is told what became of it."""

    @property
    def should_continue(self) -> ShouldContinue | None:
        """Asked by the drafter after each draft whether to draft another; None: always."""

    @property
    def listening(self) -> bool:
        """Whether this round's drafts are not to be verified, only compared with what plain decoding brings (`hear`)."""

    def draft_length(self, requests: int = 1, *, any_prefix: bool = True) -> int:
        """Returns how many tokens to draft at most in the next round; 0 is plain decoding. Asked once a round, first of all.

        `requests` is how many share the round's forwards, this one among them. `any_prefix`: drafts may be left unverified (`keep`).
        """

    def keep(self, drafted: int) -> int:
        """Returns how many of the drafts to verify, the first ones; all where `any_prefix` was not given. Asked once, after drafting."""

    def padding(self, drafted: int) -> int:
        """Returns how many rows to verify beyond these drafts, for the only reason that the larger batch is the cheaper one."""

    def hear(self, right: bool) -> None:
        """Learns, where it was listening, whether the first draft was the token that came. Before `observe`."""

    def timed(self, timing: Timing) -> None:
        """Learns what the round took. Before `observe`; of requests that share a round, one is told."""

    def observe(self, drafted: int, accepted: int) -> None:
        """Learns what became of those of the last round's drafts that were verified."""


class CountingPolicy:
    """What policies have in common that decide before a round, by counts alone."""

    should_continue = None
    listening = False

    def keep(self, drafted: int) -> int:
        """All."""
        return drafted

    def padding(self, drafted: int) -> int:  # noqa: ARG002
        """None."""
        return 0

    def hear(self, right: bool) -> None:
        """It never listens."""

    def timed(self, timing: Timing) -> None:
        """Time is of no interest."""


@dataclass(frozen=True)
class Fixed(CountingPolicy):
    """The same draft length every round. `Fixed(0)` is plain decoding on the same path."""

    length: int

    def __post_init__(self) -> None:
        if not 0 <= self.length <= MAX_DRAFT_LENGTH:
            raise RequestError(f"draft length {self.length} is outside 0..{MAX_DRAFT_LENGTH}; choose one inside")

    def draft_length(self, requests: int = 1, *, any_prefix: bool = True) -> int:  # noqa: ARG002
        """Returns the fixed length."""
        return self.length

    def observe(self, drafted: int, accepted: int) -> None:
        """A fixed length learns nothing."""


class RecentAcceptance:
    """Accepted / drafted over the last `window` rounds that drafted anything."""

    def __init__(self, window: int) -> None:
        if window < 1:
            raise RequestError(f"the window is {window} rounds; it must be at least 1")
        self._rounds: deque[tuple[int, int]] = deque(maxlen=window)

    def add(self, drafted: int, accepted: int) -> None:
        """Counts one round."""
        if drafted:
            self._rounds.append((drafted, accepted))

    @property
    def rate(self) -> float | None:
        """None before anything was drafted."""
        drafted = sum(d for d, _ in self._rounds)
        return sum(a for _, a in self._rounds) / drafted if drafted else None


class Rolling(CountingPolicy):
    """After each round one token more if the acceptance of the last `window` rounds is above `threshold`, `penalty` tokens less if below.

    The length stays within [shortest, longest]; a `penalty` may be a fraction, the length is rounded down. 0 is not reached: a
    policy that drafts nothing would never learn that drafts pay again.
    """

    def __init__(
        self, start: int, *, shortest: int = 1, longest: int = 8, threshold: float = 0.7, penalty: float = 1.0, window: int = WINDOW_ROUNDS
    ) -> None:
        if not 1 <= shortest <= longest <= MAX_DRAFT_LENGTH:
            raise RequestError(f"draft lengths from {shortest} to {longest} are no range within 1..{MAX_DRAFT_LENGTH}")
        if not shortest <= start <= longest:
            raise RequestError(f"the first draft length {start} is outside {shortest}..{longest}; choose one inside")
        if not 0 <= threshold <= 1:
            raise RequestError(f"the acceptance threshold is {threshold}; it must be 0 to 1")
        if not (penalty > 0 and math.isfinite(penalty)):
            raise RequestError(f"the rejection penalty is {penalty}; it must be a number of tokens above 0")
        self._length = float(start)
        self._bounds = (shortest, longest)
        self._threshold = threshold
        self._penalty = penalty
        self._recent = RecentAcceptance(window)

    def draft_length(self, requests: int = 1, *, any_prefix: bool = True) -> int:  # noqa: ARG002
        """Returns the present length."""
        return int(self._length)

    def observe(self, drafted: int, accepted: int) -> None:
        """Lengthens, shortens, or leaves the length at exactly the threshold and after a round that drafted nothing."""
        self._recent.add(drafted, accepted)
        rate = self._recent.rate
        if not drafted or rate is None or rate == self._threshold:
            return
        shortest, longest = self._bounds
        self._length = min(max(self._length + (1 if rate > self._threshold else -self._penalty), shortest), longest)


class Stepped(CountingPolicy):
    """6 tokens where the acceptance of the last `window` rounds is above 0.9, 4 above 0.7, else 2; 2 before anything is known.

    Steps outside [shortest, longest] are moved to its nearer end.
    """

    def __init__(self, *, shortest: int = 1, longest: int = MAX_DRAFT_LENGTH, window: int = WINDOW_ROUNDS) -> None:
        if not 1 <= shortest <= longest <= MAX_DRAFT_LENGTH:
            raise RequestError(f"draft lengths from {shortest} to {longest} are no range within 1..{MAX_DRAFT_LENGTH}")
        self._bounds = (shortest, longest)
        self._recent = RecentAcceptance(window)

    def draft_length(self, requests: int = 1, *, any_prefix: bool = True) -> int:  # noqa: ARG002
        """Returns the step of the present acceptance."""
        rate = self._recent.rate or 0.0
        shortest, longest = self._bounds
        return min(max(6 if rate > 0.9 else 4 if rate > 0.7 else 2, shortest), longest)

    def observe(self, drafted: int, accepted: int) -> None:
        """Counts the round."""
        self._recent.add(drafted, accepted)


def draft_length_policy(
    name: str, start: int, *, shortest: int = 1, longest: int = 8, threshold: float = 0.7, penalty: float = 1.0, window: int = WINDOW_ROUNDS
) -> DraftLengthPolicy:
    """Returns the policy of that name, but for `profit`, which needs costs (see `Session`). `start` is the length of `fixed` and the first one of `rolling`; `fixed` has no range.

    `threshold` and `penalty` are those of `rolling`; `window` is in rounds.
    """
    if name == "fixed":
        return Fixed(start)
    if name == "rolling":
        return Rolling(start, shortest=shortest, longest=longest, threshold=threshold, penalty=penalty, window=window)
    if name == "stepped":
        return Stepped(shortest=shortest, longest=longest, window=window)
    raise RequestError(f"policy {name!r} is not known; choose one of {', '.join(COUNTING_POLICIES)}")
