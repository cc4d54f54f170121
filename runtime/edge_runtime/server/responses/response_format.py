"""The interface of a response's format, and what it is made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edge_runtime.server.engine.jobs import Finished, Output, OutputLogprob
from edge_runtime.server.errors import ApiError
from edge_runtime.text.channels import Event

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One choice of a response that is sent as a whole."""

    events: Sequence[Event]
    logprobs: Sequence[OutputLogprob]
    finished: Finished


class ResponseFormat(Protocol):
    """Format of one response: a stream is `begin`, `output` and `end` of each choice, then `finish`; otherwise `complete`."""

    media_type: str  # of a stream

    def begin(self) -> list[bytes]:
        """Returns what precedes any output."""

    def output(self, choice: int, output: Output) -> list[bytes]:
        """Returns new output of a choice."""

    def end(self, choice: int, finished: Finished) -> list[bytes]:
        """Returns the end of a choice, with the finish reason."""

    def finish(self) -> list[bytes]:
        """Returns the end of the stream, after the last choice."""

    def failed(self, error: ApiError) -> list[bytes]:
        """Returns the end of a stream that failed."""

    def complete(self, answers: Sequence[Answer]) -> Json:
        """Returns the complete response."""


def server_sent(value: Json, event: str | None = None) -> bytes:
    """Returns a server-sent event, with a name if it has one."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + encoded(value) + b"\n\n"


def encoded(value: Json) -> bytes:
    """Returns JSON as UTF-8; a surrogate that is no half of a pair, as requests may hold it, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
