"""The interface of a response's format, and what it is made of."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edge_runtime.server.engine.jobs import Finished, Output, OutputLogprob
from edge_runtime.server.errors import ApiError
from edge_runtime.text.channels import Event

Json = dict[str, Any]
# JSON has no infinity; the API's own value for tokens that cannot occur.
_LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, kw_only=True)
class ChoiceAnswer:
    """One choice of a response that is sent as a whole."""

    events: Sequence[Event]
    logprobs: Sequence[OutputLogprob]
    finished: Finished


class ResponseFormat(ABC):
    """Format of one response: a stream is `begin`, `output` and `end` of each choice, then `finish`; otherwise `complete`."""

    media_type = "text/event-stream"

    def begin(self) -> list[bytes]:
        """Returns what precedes any output."""
        return []

    @abstractmethod
    def output(self, choice: int, output: Output) -> list[bytes]:
        """Returns new output of a choice."""

    @abstractmethod
    def end(self, choice: int, finished: Finished) -> list[bytes]:
        """Returns the end of a choice, with the finish reason."""

    def finish(self) -> list[bytes]:
        """Returns the end of the stream, after the last choice."""
        return []

    @abstractmethod
    def failed(self, error: ApiError) -> list[bytes]:
        """Returns the end of a stream that failed."""

    @abstractmethod
    def complete(self, answers: Sequence[ChoiceAnswer]) -> Json:
        """Returns the complete response."""


def server_sent(value: Json, event: str | None = None) -> bytes:
    """Returns a server-sent event, with a name if it has one."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + encoded(value) + b"\n\n"


def encoded(value: Json) -> bytes:
    """Returns JSON as UTF-8; a surrogate that is no half of a pair, as requests may hold it, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def chat_logprobs(entries: Sequence[OutputLogprob]) -> list[Json]:
    """Returns `logprobs.content` of /v1/chat/completions, which /v1/responses and /api/chat have too."""
    return [
        {**_token(entry.piece, entry.logprob), "top_logprobs": [_token(piece, logprob) for piece, logprob in entry.top]}
        for entry in entries
    ]


def completion_logprobs(entries: Sequence[OutputLogprob], offset: int) -> Json:
    """Returns `logprobs` of /v1/completions; `offset` is the number of characters before the first entry."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(_text(entry.piece))
    return {
        "tokens": [_text(entry.piece) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [{_text(piece): _finite(logprob) for piece, logprob in entry.top} for entry in entries],
        "text_offset": offsets,
    }


def _token(piece: bytes, logprob: float) -> Json:
    return {"token": _text(piece), "logprob": _finite(logprob), "bytes": list(piece)}


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
