"""Responses of /v1/chat/completions."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence

from edge_runtime.server.engine.jobs import Finished, FinishReason, Output, OutputLogprob
from edge_runtime.server.errors import ApiError
from edge_runtime.server.requests.completions import ApiRequest
from edge_runtime.server.responses.logprobs import chat_logprobs
from edge_runtime.server.responses.response_format import Answer, Json, server_sent
from edge_runtime.server.responses.usage import UsageCount
from edge_runtime.text.channels import Event, Text, Thought
from edge_runtime.text.tool_calls import ToolCall


class ChatFormat:
    """One response. A stream has one chunk per piece of text or thought and per call."""

    media_type = "text/event-stream"

    def __init__(self, model: str, request: ApiRequest, fingerprint: str) -> None:
        self._stem = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._request = request
        self._usage = UsageCount(len(request.choices), request.n)
        self._calls = [0] * len(request.choices)

    def begin(self) -> list[bytes]:
        """Returns a chunk with the role for each choice."""
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(len(self._calls))]

    def output(self, choice: int, output: Output) -> list[bytes]:
        """Returns the chunks; log probabilities are in the first one with text."""
        self._usage.update(choice, output.stats)
        pending: Sequence[OutputLogprob] = output.logprobs
        chunks, at = [], 0
        for event in output.events:
            fitting: Sequence[OutputLogprob] = ()
            spans: list[list[int]] = []
            if isinstance(event, Text):
                fitting, pending = pending, ()
                size = len(event.text)
                cut = [[max(begin - at, 0), min(end - at, size)] for begin, end in output.draft_spans]
                spans, at = [[begin, end] for begin, end in cut if begin < end], at + size
            chunks.append(self._chunk(choice, self._delta(choice, event), logprobs=fitting, draft_spans=spans))
        return chunks

    def end(self, choice: int, finished: Finished) -> list[bytes]:
        """Returns the chunk with the reason: tool_calls if the answer ended in calls."""
        self._usage.update(choice, finished.stats, finished.energy)
        return [self._chunk(choice, {}, self._reason(choice, finished.reason))]

    def finish(self) -> list[bytes]:
        """Returns the chunk with the usage, if it was requested, and the end mark."""
        usage = {**self._stem, "object": "chat.completion.chunk", "choices": [], "usage": self._usage.to_json()}
        return [*([server_sent(usage)] if self._request.usage_at_end else []), b"data: [DONE]\n\n"]

    def failed(self, error: ApiError) -> list[bytes]:
        """Returns the error as an event."""
        return [server_sent(error.to_json())]

    def complete(self, answers: Sequence[Answer]) -> Json:
        """Returns the response with the message of each choice, whose content is null if there are only calls."""
        choices = []
        for i, answer in enumerate(answers):
            self._usage.update(i, answer.finished.stats, answer.finished.energy)
            message = self._message(i, answer.events)
            choices.append(
                {
                    "index": i,
                    "message": message,
                    "logprobs": self._logprobs(answer.logprobs),
                    "finish_reason": self._reason(i, answer.finished.reason),
                }
            )
        return {**self._stem, "object": "chat.completion", "choices": choices, "usage": self._usage.to_json()}

    def _message(self, choice: int, events: Sequence[Event]) -> Json:
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
        return self._call(choice, event)

    def _call(self, choice: int, call: ToolCall) -> Json:
        if call.arguments is None:
            return {"content": call.raw}  # an unreadable call is passed on as text
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        fields = {"index": self._calls[choice], "id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}
        self._calls[choice] += 1
        return {"tool_calls": [fields]}

    def _reason(self, choice: int, finish: FinishReason) -> str:
        return "tool_calls" if self._calls[choice] and finish == "stop" else finish

    def _logprobs(self, entries: Sequence[OutputLogprob]) -> Json | None:
        return {"content": chat_logprobs(entries), "refusal": None} if self._request.choices[0].logprobs is not None else None

    def _chunk(
        self,
        choice: int,
        delta: Json,
        finish: str | None = None,
        *,
        logprobs: Sequence[OutputLogprob] = (),
        draft_spans: Sequence[Sequence[int]] = (),
    ) -> bytes:
        shown = self._logprobs(logprobs) if logprobs else None
        chunk: Json = {"index": choice, "delta": delta, "logprobs": shown, "finish_reason": finish}
        if self._request.draft_spans:
            chunk["draft_spans"] = draft_spans
        value: Json = {**self._stem, "object": "chat.completion.chunk", "choices": [chunk]}
        if self._request.usage_always:
            value["usage"] = self._usage.to_json()
        elif self._request.usage_at_end:
            value["usage"] = None
        return server_sent(value)
