"""Draft-length policies: how many tokens to draft in each round, and when rejected drafts make it fewer or none."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import ShouldContinue

# The kinds of drafter.

DrafterKind = Literal["dense", "split", "lookup", "none"]
DRAFTER_KINDS: tuple[DrafterKind, ...] = get_args(DrafterKind)


def is_model(kind: DrafterKind | None) -> bool:
    """Whether a drafter of this kind is a model; None stands for the one that the backend takes."""
    return kind not in ("lookup", "none")


# Rejection ratio of the newest drafts, and what it triggers: warnings, and the safety net.
#
# The net shortens or stops drafts where most are rejected, whatever the policy plans. A rejected draft costs a draft step and a verified
# row. Whether drafting still pays depends on the machine, so its limit is generous.

WINDOW_TOKENS = 50
WARN_ABOVE = (0.2, 0.3)
# A ratio that hovers around a threshold is reported once: it must fall this far below before it is reported again.
REARM = 0.05

EventKind = Literal["rejection", "shortened", "stopped", "resumed"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change in drafting to report. `rejection` is rejected / drafted over the last `drafted` drafted tokens.

    `limit` is the ratio that was exceeded; `longest` is the longest draft from now on, None if it did not change.
    """

    kind: EventKind
    rejection: float
    limit: float
    drafted: int
    longest: int | None = None

    @property
    def sentence(self) -> str:
        share = f"{self.rejection:.0%} of the last {self.drafted} drafted tokens were rejected"
        if self.kind == "rejection":
            return f"{share}, more than {self.limit:.0%}"
        if self.kind == "shortened":
            return f"{share}, more than {self.limit:.0%}: drafts have at most {self.longest} tokens for now"
        if self.kind == "stopped":
            return f"{share}, more than {self.limit:.0%}: drafting stops and is retried from time to time"
        return f"drafts are accepted again ({share}): drafting resumes with {self.longest} token per step"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"sentence": self.sentence}


class AcceptanceWindow:
    """Rejected / drafted over the last `size` drafted tokens, one by one, across rounds.

    Each threshold of `warn_above` is reported once when a full window exceeds it, and again only after the ratio fell well below it.
    """

    def __init__(self, size: int = WINDOW_TOKENS, warn_above: Sequence[float] = ()) -> None:
        if size < 1:
            raise RequestError(f"the window is {size} drafted tokens; it must be at least 1")
        for threshold in warn_above:
            if not 0 < threshold < 1:
                raise RequestError(f"the warning threshold is {threshold}; it must be between 0 and 1")
        self._rejected: deque[bool] = deque(maxlen=size)
        self._armed = dict.fromkeys(sorted(warn_above), True)

    def add(self, drafted: int, accepted: int) -> Event | None:
        """Counts one round, whose first `accepted` drafts were accepted; returns the warning of the highest threshold now exceeded."""
        self._rejected.extend((False,) * accepted + (True,) * (drafted - accepted))
        rejection = self.rejection if drafted and self.full else None
        if rejection is None:
            return None
        event = None
        for threshold, armed in self._armed.items():
            if armed and rejection > threshold:
                self._armed[threshold] = False
                event = Event(kind="rejection", rejection=rejection, limit=threshold, drafted=self.drafted)
            elif rejection <= max(threshold - REARM, 0):
                self._armed[threshold] = True
        return event

    def clear(self) -> None:
        self._rejected.clear()

    @property
    def drafted(self) -> int:
        """Number of drafted tokens in the window, at most its size."""
        return len(self._rejected)

    @property
    def full(self) -> bool:
        """Whether the window holds as many tokens as its size."""
        return len(self._rejected) == self._rejected.maxlen

    @property
    def rejection(self) -> float | None:
        """Rejected / drafted; None before the first draft."""
        return self._rejected.count(True) / len(self._rejected) if self._rejected else None


LIMIT = 0.5
# While stopped: plain rounds before the first probe, doubled after each that fails, and drafted tokens in a probe, one per round.
FIRST_WAIT, LONGEST_WAIT = 32, 512
PROBE_TOKENS = 4


class SafetyNet:
    """The longest draft allowed now, for all requests of a session.

    If a full window has a rejection ratio above `limit`, the longest draft becomes half of the longest one drafted, or 0 if that was 1. At
    half the limit or below it grows by one. Each change starts a new window. At 0, probes of PROBE_TOKENS single drafts follow.
    """

    def __init__(self, *, window: int = WINDOW_TOKENS, limit: float = LIMIT) -> None:
        if not 0 < limit < 1:
            raise RequestError(f"the rejection limit is {limit}; it must be between 0 and 1")
        self.longest = MAX_DRAFT_LENGTH
        self._limit = limit
        self._window = AcceptanceWindow(window)
        self._probe = AcceptanceWindow(PROBE_TOKENS)
        self._longest_draft = 0
        self._stopped = False
        self._wait = FIRST_WAIT
        self._waited = 0

    def observe(self, drafted: int, accepted: int) -> Event | None:
        """Counts a round; returns an event if drafting is shortened, stopped or resumed."""
        if self._stopped:
            return self._observe_stopped(drafted, accepted)
        self._window.add(drafted, accepted)
        self._longest_draft = max(self._longest_draft, drafted)
        rejection = self._window.rejection
        if rejection is None or not self._window.full:
            return None
        if rejection > self._limit:
            self._stopped = self._longest_draft <= 1
            return self._change("stopped" if self._stopped else "shortened", self._longest_draft // 2, self._window)
        if rejection <= self._limit / 2 and self.longest < MAX_DRAFT_LENGTH:
            self._allow(self.longest + 1)
        return None

    def _observe_stopped(self, drafted: int, accepted: int) -> Event | None:
        if self.longest == 0:
            self._waited += drafted == 0
            if self._waited >= self._wait:
                self._allow(1)
            return None
        self._probe.add(drafted, accepted)
        if not self._probe.full:
            return None
        if (self._probe.rejection or 0.0) > self._limit:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
            self._allow(0)
            return None
        self._stopped, self._wait = False, FIRST_WAIT
        return self._change("resumed", 1, self._probe)

    def _change(self, kind: EventKind, longest: int, window: AcceptanceWindow) -> Event:
        event = Event(kind=kind, rejection=window.rejection or 0.0, limit=self._limit, drafted=window.drafted, longest=longest)
        self._allow(longest)
        return event

    def _allow(self, longest: int) -> None:
        self.longest = longest
        self._waited = self._longest_draft = 0
        self._window.clear()
        self._probe.clear()


class LimitedPolicy:
    """A policy whose drafts a safety net limits. Implements `policies.DraftLengthPolicy`; `on_event` receives the events of the net."""

    def __init__(self, policy: DraftLengthPolicy, net: SafetyNet, on_event: Callable[[Event], None] = lambda _: None) -> None:
        self._policy = policy
        self._net = net
        self._on_event = on_event

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:
        """Returns the plan of the policy, with its length cut to what the net allows."""
        plan, longest = self._policy.plan(requests, any_prefix=any_prefix), self._net.longest
        return plan if plan.draft_length <= longest else plan._replace(draft_length=longest)

    def observe(self, result: RoundResult) -> None:
        """Passes the result to the policy and to the net."""
        self._policy.observe(result)
        event = self._net.observe(result.verified, result.accepted)
        if event is not None:
            self._on_event(event)


# Draft-length policies: how many tokens to draft in each round. A policy gets counts and timings, never tokens or logits.

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
            raise RequestError(f"the window is {window} steps; it must be at least 1")
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
