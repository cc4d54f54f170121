"""Draft-length policies: how many tokens to draft in each round. A policy gets counts and timings, never tokens or logits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import ShouldContinue

WINDOW_ROUNDS = 10


class Timing(NamedTuple):
    """Durations of a round: `steps` drafted tokens, and a verify of `rows` rows after `length` tokens.

    Where several requests share the forwards, all three counts are sums over them.
    """

    length: int
    steps: int
    draft_seconds: float
    rows: int
    verify_seconds: float
    requests: int = 1


def verify_all(drafted: int) -> tuple[int, int]:
    """The default of `RoundPlan.to_verify`: every draft, no padding."""
    return drafted, 0


class RoundPlan(NamedTuple):
    """What to do in a round.

    - `draft_length`: the most tokens to draft; 0 is plain decoding.
    - `shadow`: do not verify the draft; only compare it with the token that plain decoding emits.
    - `should_continue`: called by the drafter after each draft; None: never stop early.
    - `offered`: how many tokens of the offered proposal to verify instead of a draft; then `draft_length` is 0.
    - `extend`: called after drafting with the number of drafts and the probabilities of tokens that could follow them; returns how many
      of these to verify as well. None: none.
    - `to_verify`: called once after both with the number of drafts, 0 for a shadow draft. Returns how many of them to verify, from the
      first on, and how many padding rows to add, because a larger batch can be the cheaper one.
    """

    draft_length: int
    shadow: bool = False
    should_continue: ShouldContinue | None = None
    to_verify: Callable[[int], tuple[int, int]] = verify_all
    offered: int = 0
    extend: Callable[[int, Sequence[float]], int] | None = None


class RoundResult(NamedTuple):
    """What came of a round: `accepted` of `verified` drafts.

    `left_out_right` is whether the first draft that was not verified, such as a shadow draft, is the target's own next token; None where
    that is not known. `timing` is None where another request that shares the round reports it.
    """

    verified: int
    accepted: int
    left_out_right: bool | None = None
    timing: Timing | None = None


class DraftLengthPolicy(Protocol):
    """Plans each round and learns from its result. The loop calls both methods once a round, in this order."""

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:
        """Returns what to do in the next round.

        `requests` is how many requests share the forwards of the round, this one included. Without `any_prefix`, `RoundPlan.to_verify`
        must return all drafts: the acceptance rule forbids choosing among them.
        """

    def observe(self, result: RoundResult) -> None:
        """Learns from the round that was planned last."""


@runtime_checkable
class WeighingPolicy(DraftLengthPolicy, Protocol):
    """A policy that can verify tokens of other sources than the drafter (see `drafting.sources`)."""

    def offer(self, chances: Sequence[float]) -> None:
        """Offers tokens with these probabilities, each given those before it, to the next plan; none if it is not called."""


class CountingPolicy(ABC):
    """Base of the policies that choose a length from acceptance counts alone."""

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:  # noqa: ARG002
        """Drafts `draft_length()` tokens and verifies all of them."""
        return RoundPlan(self.draft_length())

    @abstractmethod
    def draft_length(self) -> int:
        """Returns the length of the next draft."""

    @abstractmethod
    def observe(self, result: RoundResult) -> None:
        """Learns from a round."""


@dataclass(frozen=True)
class Fixed(CountingPolicy):
    """The same draft length every round. `Fixed(0)` is plain decoding by the same loop."""

    length: int

    def __post_init__(self) -> None:
        if not 0 <= self.length <= MAX_DRAFT_LENGTH:
            raise RequestError(f"draft length {self.length} is outside 0..{MAX_DRAFT_LENGTH}; choose a length in that range")

    def draft_length(self) -> int:
        return self.length

    def observe(self, result: RoundResult) -> None:
        """Does nothing."""


class RecentAcceptance:
    """Accepted / drafted over the last `window` rounds that drafted anything."""

    def __init__(self, window: int) -> None:
        if window < 1:
            raise RequestError(f"the window is {window} rounds; it must be at least 1")
        self._rounds: deque[tuple[int, int]] = deque(maxlen=window)

    def add(self, drafted: int, accepted: int) -> None:
        if drafted:
            self._rounds.append((drafted, accepted))

    @property
    def rate(self) -> float | None:
        """None before anything was drafted."""
        drafted = sum(d for d, _ in self._rounds)
        return sum(a for _, a in self._rounds) / drafted if drafted else None


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The first draft length and the range of later ones; `threshold` and `penalty` of `Rolling`; `window` in rounds.

    Raises RequestError for one that is out of range.
    """

    first: int = 1
    shortest: int = 1
    longest: int = 8
    threshold: float = 0.7
    penalty: float = 1.0
    window: int = WINDOW_ROUNDS

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest <= MAX_DRAFT_LENGTH:
            raise RequestError(f"draft lengths from {self.shortest} to {self.longest} are no range within 1..{MAX_DRAFT_LENGTH}")
        if not 0 <= self.threshold <= 1:
            raise RequestError(f"the acceptance threshold is {self.threshold}; it must be 0 to 1")
        if not (self.penalty > 0 and math.isfinite(self.penalty)):
            raise RequestError(f"the rejection penalty is {self.penalty}; it must be a number of tokens above 0")


class Rolling(CountingPolicy):
    """Adds one token after a round if the acceptance of the last `window` rounds is above `threshold`; takes off `penalty` if it is below.

    The length stays within [shortest, longest]. A `penalty` may be a fraction; the length is rounded down. The length never reaches 0: a
    policy that drafts nothing would never learn that drafts are accepted again.
    """

    def __init__(self, options: PolicyOptions) -> None:
        """Raises RequestError for a first length outside the range; 0 is taken for 1."""
        self._options, first = options, max(options.first, 1)
        if not options.shortest <= first <= options.longest:
            raise RequestError(f"the first draft length {first} is outside {options.shortest}..{options.longest}; choose one inside")
        self._length = float(first)
        self._recent = RecentAcceptance(options.window)

    def draft_length(self) -> int:
        """Returns the current length, rounded down."""
        return int(self._length)

    def observe(self, result: RoundResult) -> None:
        """Adjusts the length; keeps it at exactly the threshold and after a round without drafts."""
        self._recent.add(result.verified, result.accepted)
        rate, options = self._recent.rate, self._options
        if not result.verified or rate is None or rate == options.threshold:
            return
        length = self._length + (1 if rate > options.threshold else -options.penalty)
        self._length = min(max(length, options.shortest), options.longest)


class Stepped(CountingPolicy):
    """6 tokens where the acceptance of the last `window` rounds is above 0.9, 4 above 0.7, else 2; 2 before the first draft.

    The length is clamped to [shortest, longest].
    """

    def __init__(self, options: PolicyOptions) -> None:
        self._options = options
        self._recent = RecentAcceptance(options.window)

    def draft_length(self) -> int:
        """Returns the length for the current acceptance."""
        rate = self._recent.rate or 0.0
        return min(max(6 if rate > 0.9 else 4 if rate > 0.7 else 2, self._options.shortest), self._options.longest)

    def observe(self, result: RoundResult) -> None:
        self._recent.add(result.verified, result.accepted)


@dataclass(frozen=True, kw_only=True)
class PolicyKind:
    """What can be said of a policy by its name. `new` makes one for a request, from counts alone.

    One that `needs_costs` weighs drafts by what they cost on this machine (`profit_policy`); without costs it is what `new` makes.
    """

    new: Callable[[PolicyOptions], DraftLengthPolicy]
    needs_costs: bool = False


# The first one is the default.
_KINDS: dict[str, PolicyKind] = {
    "profit": PolicyKind(new=lambda options: Fixed(options.first), needs_costs=True),
    "fixed": PolicyKind(new=lambda options: Fixed(options.first)),
    "rolling": PolicyKind(new=Rolling),
    "stepped": PolicyKind(new=Stepped),
}
POLICIES = tuple(_KINDS)
DEFAULT_POLICY = POLICIES[0]


def policy_kind(name: str) -> PolicyKind:
    """Returns what is known of the policy `name`. Raises RequestError if there is none."""
    if name not in _KINDS:
        raise RequestError(f"policy {name!r} is not known; choose one of {', '.join(POLICIES)}")
    return _KINDS[name]
