"""Responses of /v1/chat/completions and /v1/completions, complete or as chunks."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from edge_runtime.server.apis.response_format import (
    ChatLogprobs,
    ChoiceAnswer,
    CompletionLogprobs,
    Logprobs,
    ResponseFormat,
    UsageCount,
    server_sent,
    timings,
)
from edge_runtime.server.engine.jobs import Finished, FinishReason, Output, OutputLogprob
from edge_runtime.server.errors import ApiError
from edge_runtime.server.json_text import Json
from edge_runtime.server.requests.completions import ApiRequest
from edge_runtime.text.channels import Event, Text, Thought
from edge_runtime.text.tool_calls import CallPiece


class ChunkedFormat(ResponseFormat):
    """What both formats share. `_counts` has a number for each choice, which grows as output is sent; subclasses say what it counts."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, model: str, request: ApiRequest, fingerprint: str) -> None:
        identity = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._stem = {"id": identity, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._request = request
        self._usage = UsageCount(len(request.choices), request.n)
        self._counts = [0] * len(request.choices)
        self._running = set(range(len(request.choices)))
        self._silent = set(self._running)  # choices that have sent nothing yet

    def output(self, choice: int, output: Output) -> list[bytes]:
        self._usage.update(choice, output.stats)
        return [self._chunk(piece) for piece in (*self._opening(choice), *self._pieces(choice, output))]

    def end(self, choice: int, finished: Finished) -> list[bytes]:
        self._usage.update(choice, finished.stats, finished.energy)
        self._running.discard(choice)
        opening = [self._chunk(piece) for piece in self._opening(choice)]
        last = not self._running and not self._request.usage_at_end
        return [*opening, self._chunk(self._last(choice, finished.reason), **(self._timings() if last else {}))]

    def finish(self) -> list[bytes]:
        usage = {**self._stem, "object": self.chunk_kind, "choices": [], "usage": self._usage.to_json(), **self._timings()}
        return [*([server_sent(usage)] if self._request.usage_at_end else []), b"data: [DONE]\n\n"]

    def failed(self, error: ApiError) -> list[bytes]:
        return [server_sent(error.to_json())]

    def complete(self, answers: Sequence[ChoiceAnswer]) -> Json:
        choices = []
        for number, answer in enumerate(answers):
            self._usage.update(number, answer.finished.stats, answer.finished.energy)
            choices.append(self._choice(number, answer))
        return {**self._stem, "object": self.kind, "choices": choices, "usage": self._usage.to_json(), **self._timings()}

    def _opening(self, choice: int) -> list[Json]:
        """Returns what precedes the first output of a choice. It is sent with that output, because clients take it for the first token."""
        if choice not in self._silent:
            return []
        self._silent.discard(choice)
        return self._first(choice)

    def _first(self, choice: int) -> list[Json]:  # noqa: ARG002
        """Returns the choice's part of the chunks before its first output."""
        return []

    def _timings(self) -> Json:
        return {"timings": timings(self._usage.stats)}

    @abstractmethod
    def _pieces(self, choice: int, output: Output) -> list[Json]:
        """Returns the choice's part of each chunk."""

    @abstractmethod
    def _last(self, choice: int, finish: FinishReason) -> Json:
        """Returns the choice's part of its last chunk."""

    @abstractmethod
    def _choice(self, choice: int, answer: ChoiceAnswer) -> Json:
        """Returns a choice of a complete response."""

    def _chunk(self, piece: Json, **besides: Json) -> bytes:
        value: Json = {**self._stem, "object": self.chunk_kind, "choices": [piece], **besides}
        if self._request.usage_always:
            value["usage"] = self._usage.to_json()
        elif self._request.usage_at_end:
            value["usage"] = None
        return server_sent(value)

    @property
    def _with_logprobs(self) -> bool:
        return self._request.choices[0].logprobs is not None


class ChatFormat(ChunkedFormat):
    """A stream has one chunk per piece of text, thought or call. `_counts` counts calls."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, request: ApiRequest, fingerprint: str) -> None:
        super().__init__(model, request, fingerprint)
        self._called: set[int] = set()  # choices with a complete call

    def _first(self, choice: int) -> list[Json]:
        return [self._delta_of(choice, {"role": "assistant", "content": ""})]

    def _pieces(self, choice: int, output: Output) -> list[Json]:
        """Returns the choice's part of each chunk. All log probabilities are in the first piece with text."""
        pending: Sequence[OutputLogprob] = output.logprobs
        pieces, at = [], 0
        for event in output.events:
            fitting: Sequence[OutputLogprob] = ()
            spans: list[list[int]] = []
            if isinstance(event, Text):
                fitting, pending = pending, ()
                size = len(event.text)
                cut = [[max(begin - at, 0), min(end - at, size)] for begin, end in output.draft_spans]
                spans, at = [[begin, end] for begin, end in cut if begin < end], at + size
            pieces.append(self._delta_of(choice, self._delta(choice, event), logprobs=fitting, draft_spans=spans))
        return pieces

    def _last(self, choice: int, finish: FinishReason) -> Json:
        return self._delta_of(choice, {}, self._reason(choice, finish))

    def _choice(self, choice: int, answer: ChoiceAnswer) -> Json:
        message = self._message(choice, answer.events)
        reason = self._reason(choice, answer.finished.reason)
        return {"index": choice, "message": message, "logprobs": self._logprobs(answer.logprobs), "finish_reason": reason}

    def _message(self, choice: int, events: Sequence[Event]) -> Json:
        """Returns the message of a choice. Its content is null if there are only calls."""
        deltas = [self._delta(choice, event) for event in events]
        calls = [{key: value for key, value in call.items() if key != "index"} for delta in deltas for call in delta.get("tool_calls", ())]
        content = "".join(delta.get("content", "") for delta in deltas)
        thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
        message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return message

    def _delta(self, choice: int, event: Event) -> Json:
        if isinstance(event, Text):
            return {"content": event.text}
        if isinstance(event, Thought):
            return {"reasoning_content": event.text}
        if isinstance(event, CallPiece) and event.name is not None:
            return self._call(choice, event.name, event.arguments)
        if isinstance(event, CallPiece):
            return self._rest_of_call(choice, event.arguments)
        self._called.add(choice)
        if event.unsent is not None:
            return self._rest_of_call(choice, event.unsent)
        return self._call(choice, event.name, event.arguments_json)

    def _call(self, choice: int, name: str | None, arguments: str | None) -> Json:
        function = {"name": name, "arguments": arguments}
        fields = {"index": self._counts[choice], "id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}
        self._counts[choice] += 1
        return {"tool_calls": [fields]}

    def _rest_of_call(self, choice: int, arguments: str) -> Json:
        return {"tool_calls": [{"index": self._counts[choice] - 1, "function": {"arguments": arguments}}]}

    def _reason(self, choice: int, finish: FinishReason) -> str:
        return "tool_calls" if choice in self._called and finish == "stop" else finish

    def _logprobs(self, entries: Logprobs) -> Json | None:
        return {"content": entries.to_json(), "refusal": None} if self._with_logprobs else None

    def _delta_of(
        self,
        choice: int,
        delta: Json,
        finish: str | None = None,
        *,
        logprobs: Sequence[OutputLogprob] = (),
        draft_spans: Sequence[Sequence[int]] = (),
    ) -> Json:
        shown = self._logprobs(ChatLogprobs(logprobs)) if logprobs else None
        piece: Json = {"index": choice, "delta": delta, "logprobs": shown, "finish_reason": finish}
        return piece | {"draft_spans": draft_spans} if self._request.draft_spans else piece


class CompletionFormat(ChunkedFormat):
    """A stream has one chunk per piece of text. `_counts` counts the characters that were sent."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _pieces(self, choice: int, output: Output) -> list[Json]:
        return [self._piece(choice, output.events, CompletionLogprobs(output.logprobs, self._counts[choice]))]

    def _last(self, choice: int, finish: FinishReason) -> Json:
        return self._piece(choice, (), finish=finish)

    def _choice(self, choice: int, answer: ChoiceAnswer) -> Json:
        return self._piece(choice, answer.events, answer.logprobs or None, answer.finished.reason)

    def logprobs(self) -> Logprobs:
        return CompletionLogprobs()

    def _piece(self, choice: int, events: Sequence[Event], logprobs: Logprobs | None = None, finish: FinishReason | None = None) -> Json:
        text = "".join(event.text for event in events if isinstance(event, Text))
        entries = logprobs.to_json() if self._with_logprobs and logprobs is not None else None
        self._counts[choice] += len(text)
        return {"index": choice, "text": text, "logprobs": entries, "finish_reason": finish}
