"""Rejection ratio of the newest drafts, and what it triggers: warnings, and the safety net.

The net shortens or stops drafts where most are rejected, whatever the policy plans. A rejected draft costs a draft step and a verified row.
Whether drafting still pays depends on the machine, so its limit is generous.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.drafting.policies import DraftLengthPolicy, RoundPlan, RoundResult
from edge_runtime.errors import RequestError

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
        return f"drafts are accepted again ({share}): drafting resumes with {self.longest} token per round"

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
