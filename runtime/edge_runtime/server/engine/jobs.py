"""A request on its way through the worker: what it hears, and how it is called off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from edge_devices.energy.live import RunEnergy
from edge_runtime.server.requests.completions import Ask
from edge_runtime.session.stats import DecodeStats
from edge_runtime.text.channels import Event

Finish = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Counts and seconds of a request so far; `tokens` ends where the answer does. `energy` is known at the end, if there is a meter."""

    prompt_tokens: int
    cached_tokens: int
    tokens: int
    drafted: int
    accepted: int
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    energy: RunEnergy | None = None


def figures_of(stats: DecodeStats, tokens: int, energy: RunEnergy | None = None) -> Figures:
    """Returns the figures as they stand."""
    return Figures(
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.reused_tokens,
        tokens=tokens,
        drafted=stats.drafted,
        accepted=stats.accepted,
        prefill_seconds=stats.prefill_seconds,
        first_token_seconds=stats.first_token_seconds,
        decode_seconds=stats.decode_seconds,
        energy=energy,
    )


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A session took the request: it makes sense and fits. Always the first news, unless it failed."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """What became certain since the last news."""

    events: tuple[Event, ...]
    figures: Figures


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The last news of an answer."""

    finish: Finish
    figures: Figures


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The last news of a request that got no answer, or only a part of one."""

    error: Exception


News = Begun | Said | Ended | Failed


class Job:
    """A request in the worker's hands. `deliver` is called in the worker's thread; `ids` is the worker's own."""

    def __init__(self, ask: Ask, deliver: Callable[[News], None]) -> None:
        self.ask = ask
        self.deliver = deliver
        self.ids: list[int] = []
        self.passed_over = 0
        self.cancelled = False

    def cancel(self) -> None:
        """Nobody waits for the answer any more: it ends after the round that is running. Any thread may call it."""
        self.cancelled = True
