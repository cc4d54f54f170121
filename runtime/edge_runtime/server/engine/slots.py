"""Assigns waiting requests to free sessions, preferring the session whose KV cache already holds the prompt's prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_runtime.interfaces import Target
from edge_runtime.server.engine.jobs import Job
from edge_runtime.session.generation import reusable_prefix

# A request that was passed over this often is served next.
MAX_PASSED_OVER = 4


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A free session: its number, its target, and when it was last used (a growing count; 0 for never)."""

    number: int
    target: Target
    last_used: int


def choose_slot(slots: Sequence[Slot], waiting: Sequence[Job]) -> tuple[Slot, Job]:
    """Returns the free session and the waiting request that share the longest prefix. `waiting` is oldest first; neither may be empty.

    A cache counts only if it holds at least half of the prompt: a few shared tokens, as all chats have, are not worth discarding the
    cached rows of another conversation. If no cache counts, the least recently used session is chosen.
    """
    overdue = [job for job in waiting if job.passed_over >= MAX_PASSED_OVER]
    best = max(
        ((slot, job) for job in overdue[:1] or waiting for slot in slots),
        key=lambda pair: (_shared_prefix(*pair), -waiting.index(pair[1]), -pair[0].last_used),
    )
    for job in waiting[: waiting.index(best[1])]:
        job.passed_over += 1
    return best


def _shared_prefix(slot: Slot, job: Job) -> int:
    if job.request.repeatable:
        return 0
    shared = reusable_prefix(slot.target, job.ids[:-1])
    return shared if 2 * shared >= len(job.ids) else 0
