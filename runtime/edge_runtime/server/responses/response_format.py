"""The interface of a response's format, and what it is made of."""

from __future__ import annotations

import itertools
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from edge_runtime.server.engine.jobs import Finished, Output, OutputLogprob
from edge_runtime.server.errors import ApiError
from edge_runtime.text.channels import Event

Json = dict[str, Any]
# JSON has no infinity; the API's own value for tokens that cannot occur.
_LOWEST_LOGPROB = -9999.0
_MARK = secrets.token_hex(16)


@dataclass(frozen=True)
class Written:
    """JSON text that `encoded` takes over."""

    text: str


class Logprobs(ABC):
    """Log probabilities of an answer. Each is written as it comes: those of a long answer at once would stop the event loop for seconds."""

    def __init__(self, entries: Iterable[OutputLogprob] = ()) -> None:
        self._written: list[str] = []
        self.add(entries)

    def __len__(self) -> int:
        return len(self._written)

    @abstractmethod
    def add(self, entries: Iterable[OutputLogprob]) -> None:
        """Adds those of the next tokens."""

    def to_json(self) -> Any:
        """Returns all that were added."""
        return Written(f"[{', '.join(self._written)}]")


@dataclass(frozen=True, kw_only=True)
class ChoiceAnswer:
    """One choice of a response that is sent as a whole."""

    events: Sequence[Event]
    logprobs: Logprobs
    finished: Finished


class ResponseFormat(ABC):
    """Format of one response: a stream is `begin`, `output` and `end` of each choice, then `finish`; otherwise `complete`."""

    media_type = "text/event-stream"

    def begin(self, prompt_tokens: int) -> list[bytes]:  # noqa: ARG002
        """Returns what precedes any output."""
        return []

    def idle(self) -> list[bytes]:
        """Returns what tells a client of a stream that nothing is new, but the connection is in order."""
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

    def logprobs(self) -> Logprobs:
        """Returns a place for those of a choice that is sent as a whole."""
        return ChatLogprobs()

    @abstractmethod
    def complete(self, answers: Sequence[ChoiceAnswer]) -> Json:
        """Returns the complete response."""


def server_sent(value: Json, event: str | None = None) -> bytes:
    """Returns a server-sent event, with a name if it has one."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + encoded(value) + b"\n\n"


def encoded(value: Json) -> bytes:
    """Returns JSON as UTF-8; a surrogate that is no half of a pair, as requests may hold it, becomes a question mark."""
    written: list[str] = []

    def mark(value: Written) -> str:
        written.append(value.text)
        return _MARK

    parts = json.dumps(value, ensure_ascii=False, default=mark).split(f'"{_MARK}"')
    return "".join(itertools.chain(*zip(parts, [*written, ""], strict=True))).encode("utf-8", "replace")


class ChatLogprobs(Logprobs):
    """`logprobs.content` of /v1/chat/completions, which /v1/responses and /api/chat have too."""

    def add(self, entries: Iterable[OutputLogprob]) -> None:
        for entry in entries:
            top = [_token(piece, logprob) for piece, logprob in entry.top]
            self._written.append(json.dumps({**_token(entry.piece, entry.logprob), "top_logprobs": top}, ensure_ascii=False))

    def join(self, others: ChatLogprobs) -> None:
        """Adds those of another list."""
        self._written += others._written


class CompletionLogprobs(Logprobs):
    """`logprobs` of /v1/completions; `offset` is the number of characters before the first entry."""

    def __init__(self, entries: Iterable[OutputLogprob] = (), offset: int = 0) -> None:
        self._columns: Json = {"tokens": [], "token_logprobs": [], "text_offset": []}
        self._offset = offset
        super().__init__(entries)

    def add(self, entries: Iterable[OutputLogprob]) -> None:
        for entry in entries:
            for name, value in zip(self._columns, (_text(entry.piece), _finite(entry.logprob), self._offset), strict=True):
                self._columns[name].append(value)
            self._offset += len(_text(entry.piece))
            self._written.append(json.dumps({_text(piece): _finite(logprob) for piece, logprob in entry.top}, ensure_ascii=False))

    def to_json(self) -> Json:
        return self._columns | {"top_logprobs": super().to_json()}


def _token(piece: bytes, logprob: float) -> Json:
    return {"token": _text(piece), "logprob": _finite(logprob), "bytes": list(piece)}


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
