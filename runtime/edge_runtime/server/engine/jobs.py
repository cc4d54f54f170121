"""A request on its way through the worker, and the stream events that it delivers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from edge_devices.children.running import ChildBudget
from edge_devices.energy.live import RunEnergy
from edge_runtime.media.soft_rows import MediaPrompt
from edge_runtime.server.requests.completions import CompletionRequest
from edge_runtime.session.stats import DecodeStats
from edge_runtime.text.channels import Event
from edge_runtime.text.grammar import Constraint

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class Started:
    """A session took the request: it is valid and fits. Always the first event, unless the request failed."""


@dataclass(frozen=True, kw_only=True)
class OutputLogprob:
    """A token of the answer as bytes, its log probability, and the likeliest tokens of its position with theirs."""

    piece: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output since the previous event. `stats` is a snapshot whose `tokens` end where the visible answer does.

    `logprobs` are those of the tokens whose text begins in `events`, if the request wants them. `draft_spans` are the places (begin, end;
    in characters) of accepted drafts in the text of `events`.
    """

    events: tuple[Event, ...]
    stats: DecodeStats
    logprobs: tuple[OutputLogprob, ...] = ()
    draft_spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The last event of an answer. `stats` as in `Output`; `energy` is None without a meter. `thought_tokens` are among the tokens."""

    reason: FinishReason
    stats: DecodeStats
    energy: RunEnergy | None
    thought_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The last event of a request that got no answer, or an incomplete one."""

    error: Exception


StreamEvent = Started | Output | Finished | Failed


class Job:
    """A request in the worker's queue. The worker calls `deliver` and sets `prompt`, `prediction` and the compiled `constraint`.

    `children` is what decoding its media may take, shared by all answers to one request. `client` is the place of the client's key.
    """

    def __init__(
        self, request: CompletionRequest, deliver: Callable[[StreamEvent], None], children: ChildBudget | None = None, client: int = 0
    ) -> None:
        self.request = request
        self.deliver = deliver
        self.client = client
        self.prompt: list[int] | MediaPrompt = []
        self.prediction: list[int] = []
        self.constraint: Constraint | None = None
        self.passed_over = 0
        self.cancelled = False
        self.children = children or ChildBudget()

    @property
    def ids(self) -> list[int]:
        """The prompt's token ids; those of soft rows are negative."""
        return self.prompt.ids if isinstance(self.prompt, MediaPrompt) else self.prompt

    def cancel(self) -> None:
        """Ends the request after the current round, and the decoding of its media at once. Safe to call from any thread."""
        self.cancelled = True
        self.children.cancel()
