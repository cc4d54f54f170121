"""Shortens or stops drafts where most are rejected, whatever the policy plans, and probes when they are accepted again.

A rejected draft costs a draft step and a verified row. Whether drafting still pays depends on the machine, so the limit is generous.
"""

from __future__ import annotations

from collections.abc import Callable

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.drafting.acceptance_window import WINDOW_TOKENS, AcceptanceWindow, Event, EventKind
from edge_runtime.drafting.policies import DraftLengthPolicy, RoundPlan, RoundResult
from edge_runtime.errors import RequestError

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


class Guarded:
    """A policy limited by a safety net. Implements `policies.DraftLengthPolicy`; `on_event` receives the events of the net."""

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
