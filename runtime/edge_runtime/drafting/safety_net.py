"""Shortens drafts, or stops them, where most of them are thrown away, whatever the policy says; and finds out when they pay again.

Drafts that are rejected cost a draft step and a verified row each. Where that pays depends on the machine, so the limit is generous.
"""

from __future__ import annotations

from collections.abc import Callable

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.drafting.policies import DraftLengthPolicy, Timing
from edge_runtime.drafting.rejection_window import WINDOW_TOKENS, Event, EventKind, RejectionWindow
from edge_runtime.errors import RequestError
from edge_runtime.interfaces import ShouldContinue

LIMIT = 0.5
# While stopped: plain rounds before the first probe, doubled after each that fails, and drafted tokens in a probe, one per round.
FIRST_WAIT, LONGEST_WAIT = 32, 512
PROBE_TOKENS = 4


class SafetyNet:
    """The longest draft that is allowed now, for all requests of a session.

    Above `limit` rejected in a full window the allowance becomes half of what was drafted, and 0 if that was single tokens; at half the
    limit or below it grows by one. Each change begins a new window. At 0, probes of PROBE_TOKENS single drafts find the way back.
    """

    def __init__(self, *, window: int = WINDOW_TOKENS, limit: float = LIMIT) -> None:
        if not 0 < limit < 1:
            raise RequestError(f"the rejection limit is {limit}; it must lie between 0 and 1")
        self.longest = MAX_DRAFT_LENGTH
        self._limit = limit
        self._window = RejectionWindow(window)
        self._probe = RejectionWindow(PROBE_TOKENS)
        self._longest_seen = 0
        self._stopped = False
        self._wait = FIRST_WAIT
        self._waited = 0

    def observe(self, drafted: int, accepted: int) -> Event | None:
        """Learns what became of a round's drafts; returns an event where drafting is shortened, stopped or resumed."""
        if self._stopped:
            return self._observe_stopped(drafted, accepted)
        self._window.add(drafted, accepted)
        self._longest_seen = max(self._longest_seen, drafted)
        rejection = self._window.rejection
        if rejection is None or not self._window.full:
            return None
        if rejection > self._limit:
            self._stopped = self._longest_seen <= 1
            return self._change("stopped" if self._stopped else "shortened", self._longest_seen // 2, self._window)
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

    def _change(self, kind: EventKind, longest: int, window: RejectionWindow) -> Event:
        event = Event(kind=kind, rejection=window.rejection or 0.0, limit=self._limit, drafted=window.drafted, longest=longest)
        self._allow(longest)
        return event

    def _allow(self, longest: int) -> None:
        self.longest = longest
        self._waited = self._longest_seen = 0
        self._window.clear()
        self._probe.clear()


class Guarded:
    """A policy over a safety net. Implements `policies.DraftLengthPolicy`; `on_event` hears what the net does."""

    def __init__(self, policy: DraftLengthPolicy, net: SafetyNet, on_event: Callable[[Event], None] = lambda _: None) -> None:
        self._policy = policy
        self._net = net
        self._on_event = on_event

    @property
    def should_continue(self) -> ShouldContinue | None:
        """The policy's."""
        return self._policy.should_continue

    @property
    def listening(self) -> bool:
        """The policy's."""
        return self._policy.listening

    def keep(self, drafted: int) -> int:
        """The policy's."""
        return self._policy.keep(drafted)

    def padding(self, drafted: int) -> int:
        """The policy's."""
        return self._policy.padding(drafted)

    def hear(self, right: bool) -> None:
        """Tells the policy."""
        self._policy.hear(right)

    def timed(self, timing: Timing) -> None:
        """Tells the policy."""
        self._policy.timed(timing)

    def draft_length(self, requests: int = 1, *, any_prefix: bool = True) -> int:
        """Returns the policy's length, or what the net allows if that is less."""
        return min(self._policy.draft_length(requests, any_prefix=any_prefix), self._net.longest)

    def observe(self, drafted: int, accepted: int) -> None:
        """Tells both."""
        self._policy.observe(drafted, accepted)
        event = self._net.observe(drafted, accepted)
        if event is not None:
            self._on_event(event)
