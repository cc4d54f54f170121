"""Which waiting request goes to which free session: the one whose prompt the session's cache already holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_runtime.interfaces import Target
from edge_runtime.server.engine.jobs import Job
from edge_runtime.session.generation import reusable_prefix

# A request that others with a longer prefix overtook so often goes first.
MOST_PASSED_OVER = 4


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A free session: its number, its target, and when it was last used (any count that grows; 0 for never)."""

    number: int
    target: Target
    last_used: int


def choose_slot(seats: Sequence[Seat], waiting: Sequence[Job]) -> tuple[Seat, Job]:
    """Returns the free session and the request, of those waiting since longest first, that share the longest prefix.

    A cache counts where it holds at least half of the prompt: few tokens in common, as all chats have, are not worth another
    conversation's rows. Without one it is the session that was used the longest ago. Both lists hold at least one.
    """
    overdue = [job for job in waiting if job.passed_over >= MOST_PASSED_OVER]
    best = max(
        ((seat, job) for job in overdue[:1] or waiting for seat in seats),
        key=lambda pair: (_worth(*pair), -waiting.index(pair[1]), -pair[0].last_used),
    )
    for job in waiting[: waiting.index(best[1])]:
        job.passed_over += 1
    return best


def _worth(seat: Seat, job: Job) -> int:
    if job.ask.repeatable:
        return 0
    shared = reusable_prefix(seat.target, job.ids[:-1])
    return shared if 2 * shared >= len(job.ids) else 0
