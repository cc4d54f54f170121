"""Draft-length policies: how many tokens to draft in each round; and the safety net, which limits drafts when many are rejected."""

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
    """Whether a drafter of this kind is a model. None stands for the backend's own choice, which is one."""
    return kind not in ("lookup", "none")


# The rejection ratio of the newest drafts triggers warnings and the safety net.
#
# The net shortens or stops drafts when most are rejected, whatever the policy plans. A rejected draft costs a draft step and a verified
# row. Whether drafting pays at some ratio depends on the machine, so the limit of the net is generous.

WINDOW_TOKENS = 50
WARN_ABOVE = (0.2, 0.3)
# The ratio must fall this far below a threshold before it is reported again, so that one that hovers around it is reported once.
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
    """Rejected / drafted over the last `size` drafted tokens, counted token by token across rounds.

    Each threshold of `warn_above` is reported once when a full window exceeds it, and again only after the ratio has fallen well below it.
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
        """Counts a round, whose first `accepted` drafts were accepted. Returns a warning of the highest newly exceeded threshold."""
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
# While drafting is stopped: plain rounds before the first probe, which double after each failed one, up to a limit; and drafted tokens in a
# probe, one per round.
FIRST_WAIT, LONGEST_WAIT = 32, 512
PROBE_TOKENS = 4


class SafetyNet:
    """Limits the length of drafts: `longest` is the longest draft allowed now, for all requests of a session.

    If the rejection ratio of a full window is above `limit`, `longest` becomes half the length of the longest draft in the window, or 0 if
    that was 1. If the ratio is at most half of `limit`, it grows by one. Each change starts a new window. While it is 0, probes of
    PROBE_TOKENS drafts, one per round, find out when to resume.
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
    """A policy whose drafts a safety net limits. Implements `DraftLengthPolicy`; `on_event` receives the events of the net."""

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
    """The durations of a round: of drafting `steps` tokens, and of verifying `rows` rows after a text of `length` tokens.

    Where several requests share the forwards, `length`, `steps` and `rows` are sums over them.
    """

    length: int
    steps: int
    draft_seconds: float
    rows: int
    verify_seconds: float
    requests: int = 1


def verify_all(drafted: int) -> tuple[int, int]:
    """The default of `RoundPlan.to_verify`: verifies all drafts, without padding."""
    return drafted, 0


class RoundPlan(NamedTuple):
    """What to do in a round.

    - `draft_length`: the most tokens to draft; 0 is plain decoding.
    - `shadow`: do not verify the draft; only compare it with the token that plain decoding emits.
    - `should_continue`: called by the drafter after each drafted token; None: never stop early.
    - `offered`: how many of the offered tokens (see `WeighingPolicy`) to verify instead of a draft; then `draft_length` is 0.
    - `extend`: called after drafting with the number of drafts and the probabilities of tokens that could follow them; returns how many
      of these tokens to verify as well. None: none of them.
    - `to_verify`: called once after these with the number of drafts, 0 for a shadow draft. Returns how many of them to verify, from the
      first on, and how many padding rows to add, because a larger batch can be cheaper.
    """

    draft_length: int
    shadow: bool = False
    should_continue: ShouldContinue | None = None
    to_verify: Callable[[int], tuple[int, int]] = verify_all
    offered: int = 0
    extend: Callable[[int, Sequence[float]], int] | None = None


class RoundResult(NamedTuple):
    """The outcome of a round: the first `accepted` of `verified` drafts were accepted.

    `left_out_right`: whether the first draft that was not verified, such as a shadow draft, equals the target's own next token; None if
    that is unknown. `timing` is None if another request that shares the round reports it.
    """

    verified: int
    accepted: int
    left_out_right: bool | None = None
    timing: Timing | None = None


class DraftLengthPolicy(Protocol):
    """Plans each round and learns from its result. The loop calls both methods once a round, in this order."""

    def plan(self, requests: int = 1, *, any_prefix: bool = True) -> RoundPlan:
        """Returns what to do in the next round.

        `requests` is how many requests share the forwards of the round, including this one. Without `any_prefix`, `RoundPlan.to_verify`
        must return all drafts, because the acceptance rule does not allow to leave some out.
        """

    def observe(self, result: RoundResult) -> None:
        """Learns from the round that was planned last."""


@runtime_checkable
class WeighingPolicy(DraftLengthPolicy, Protocol):
    """A policy that can also choose to verify tokens that do not come from the drafter (see `drafting.sources`)."""

    def offer(self, chances: Sequence[float]) -> None:
        """Offers tokens to the next plan. `chances` are their acceptance probabilities, each given that those before are accepted."""


class CountingPolicy(ABC):
    """Base class of the policies that choose a length by acceptance counts alone."""

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
    """The same draft length in every round. `Fixed(0)` is plain decoding in the same loop."""

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
        """The ratio; None before anything was drafted."""
        drafted = sum(d for d, _ in self._rounds)
        return sum(a for _, a in self._rounds) / drafted if drafted else None


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """The first draft length and the range of later ones; `threshold` and `penalty` of `Rolling`; `window` in rounds.

    Raises RequestError if a value is out of range.
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
    """Adds a token to the length after a round if the acceptance of the last `window` rounds is above `threshold`; subtracts `penalty` if
    it is below.

    The length stays within [shortest, longest]. `penalty` may be a fraction; the length is then rounded down. The length never reaches 0,
    because a policy that drafts nothing would never learn that drafts are accepted again.
    """

    def __init__(self, options: PolicyOptions) -> None:
        """A first length of 0 counts as 1. Raises RequestError if the first length is outside the range."""
        self._options, first = options, max(options.first, 1)
        if not options.shortest <= first <= options.longest:
            raise RequestError(f"the first draft length {first} is outside {options.shortest}..{options.longest}; choose one inside")
        self._length = float(first)
        self._recent = RecentAcceptance(options.window)

    def draft_length(self) -> int:
        """Returns the current length, rounded down."""
        return int(self._length)

    def observe(self, result: RoundResult) -> None:
        """Adjusts the length. After a round without drafts, or at exactly the threshold, it does not change."""
        self._recent.add(result.verified, result.accepted)
        rate, options = self._recent.rate, self._options
        if not result.verified or rate is None or rate == options.threshold:
            return
        length = self._length + (1 if rate > options.threshold else -options.penalty)
        self._length = min(max(length, options.shortest), options.longest)


class Stepped(CountingPolicy):
    """6 tokens if the acceptance of the last `window` rounds is above 0.9, 4 if above 0.7, else 2; 2 before the first draft.

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
    """Facts about a policy. `new` creates one for a request.

    A policy that `needs_costs` weighs drafts by their costs on this machine (`profit_policy`); `new` creates its fallback without costs.
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
    """Returns the facts about the policy `name`. Raises RequestError if there is no such policy."""
    if name not in _KINDS:
        raise RequestError(f"policy {name!r} is not known; choose one of {', '.join(POLICIES)}")
    return _KINDS[name]
