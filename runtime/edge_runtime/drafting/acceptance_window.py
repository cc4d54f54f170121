"""Rejection ratio of the newest drafts, and the events that it triggers. Counts only: no tokens, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

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
        """The event as one sentence."""
        share = f"{self.rejection:.0%} of the last {self.drafted} drafted tokens were rejected"
        if self.kind == "rejection":
            return f"{share}, more than {self.limit:.0%}"
        if self.kind == "shortened":
            return f"{share}, more than {self.limit:.0%}: drafts have at most {self.longest} tokens for now"
        if self.kind == "stopped":
            return f"{share}, more than {self.limit:.0%}: drafting stops and is retried from time to time"
        return f"drafts are accepted again ({share}): drafting resumes with {self.longest} token per round"

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return asdict(self) | {"sentence": self.sentence}


class AcceptanceWindow:
    """Rejected / drafted over the last `size` drafted tokens, one by one, across rounds."""

    def __init__(self, size: int = WINDOW_TOKENS) -> None:
        if size < 1:
            raise RequestError(f"the window is {size} drafted tokens; it must be at least 1")
        self._rejected: deque[bool] = deque(maxlen=size)

    def add(self, drafted: int, accepted: int) -> None:
        """Counts one round, whose first `accepted` drafts were accepted."""
        self._rejected.extend(i >= accepted for i in range(drafted))

    def clear(self) -> None:
        """Removes all counts."""
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
        return sum(self._rejected) / len(self._rejected) if self._rejected else None


class RejectionAlarm:
    """Reports once when the rejection ratio of a full window exceeds a threshold, and again only after it fell well below."""

    def __init__(self, thresholds: Sequence[float] = WARN_ABOVE) -> None:
        for threshold in thresholds:
            if not 0 < threshold < 1:
                raise RequestError(f"the warning threshold is {threshold}; it must be between 0 and 1")
        self._armed = dict.fromkeys(sorted(thresholds), True)

    def event(self, window: AcceptanceWindow) -> Event | None:
        """Returns the event to report now; where several thresholds are exceeded at once, that of the highest."""
        rejection = window.rejection
        if rejection is None or not window.full:
            return None
        event = None
        for threshold, armed in self._armed.items():
            if armed and rejection > threshold:
                self._armed[threshold] = False
                event = Event(kind="rejection", rejection=rejection, limit=threshold, drafted=window.drafted)
            elif rejection <= max(threshold - REARM, 0):
                self._armed[threshold] = True
        return event
