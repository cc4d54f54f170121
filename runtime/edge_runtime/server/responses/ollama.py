"""Responses of Ollama's /api/chat and /api/generate: lines of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from edge_runtime.server.engine.jobs import Finished, Output
from edge_runtime.server.errors import ApiError
from edge_runtime.server.json_text import Json
from edge_runtime.server.responses.response_format import ChatLogprobs, ChoiceAnswer, Logprobs, ResponseFormat, encoded, figures
from edge_runtime.session.monitor import DecodeStats
from edge_runtime.text.channels import Event, Text, Thought
from edge_runtime.text.tool_calls import ToolCall

_NANOSECONDS = 1_000_000_000


class OllamaFormat(ResponseFormat):
    """One response; `chat` says which of the two."""

    media_type = "application/x-ndjson"

    def __init__(self, model: str, *, chat: bool) -> None:
        self._model = model
        self._chat = chat

    def output(self, choice: int, output: Output) -> list[bytes]:  # noqa: ARG002
        return [self._line(self._body(output.events, ChatLogprobs(output.logprobs)) | {"done": False})]

    def end(self, choice: int, finished: Finished) -> list[bytes]:  # noqa: ARG002
        return [self._line(self._body(()) | _end(finished))]

    def failed(self, error: ApiError) -> list[bytes]:
        return [encoded({"error": str(error)}) + b"\n"]

    def complete(self, answers: Sequence[ChoiceAnswer]) -> Json:
        """Without an answer, the response to a request that only loads the model."""
        for answer in answers:
            return self._stem() | self._body(answer.events, answer.logprobs) | _end(answer.finished)
        return self._stem() | self._body(()) | {"done": True, "done_reason": "load"}

    def _body(self, events: Sequence[Event], logprobs: Logprobs | None = None) -> Json:
        calls = [event for event in events if isinstance(event, ToolCall) and event.arguments is not None]
        text = "".join(_text_of(event) for event in events)
        thoughts = "".join(event.text for event in events if isinstance(event, Thought))
        body: Json = {"role": "assistant", "content": text} if self._chat else {"response": text}
        if thoughts:
            body["thinking"] = thoughts
        if calls:
            body["tool_calls"] = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls]
        content: Json = {"message": body} if self._chat else body
        return content | {"logprobs": logprobs.to_json()} if logprobs else content

    def _stem(self) -> Json:
        return {"model": self._model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}

    def _line(self, body: Json) -> bytes:
        return encoded(self._stem() | body) + b"\n"


def _text_of(event: Event) -> str:
    """Returns an event's part of the answer. That of a cut call is all of it: Ollama's arguments are an object, not its beginning."""
    if isinstance(event, ToolCall):
        return event.raw if event.arguments is None else ""
    return event.text if isinstance(event, Text) else ""


def _end(finished: Finished) -> Json:
    stats: DecodeStats = finished.stats
    prompt, answer = stats.prefill_seconds, stats.decode_seconds
    return {
        "done": True,
        "done_reason": finished.reason,
        "total_duration": round((prompt + answer) * _NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": stats.prompt_tokens,
        "prompt_eval_duration": round(prompt * _NANOSECONDS),
        "eval_count": stats.tokens,
        "eval_duration": round(answer * _NANOSECONDS),
        **figures(stats),
    }
