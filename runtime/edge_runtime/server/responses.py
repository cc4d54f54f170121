"""Responses in the formats of the OpenAI API, complete or in chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from edge_devices.energy.intervals import Interval
from edge_devices.energy.live import RunEnergy
from edge_runtime.server.engine.jobs import FinishReason
from edge_runtime.session.stats import DecodeStats
from edge_runtime.text.channels import Event, Text, Thought
from edge_runtime.text.tool_calls import ToolCall

Json = dict[str, Any]


class ResponseFormat(Protocol):
    """Format of one response: for a stream `first`, `chunks` of all events, then `last`; otherwise `complete` with all events."""

    def first(self) -> list[Json]:
        """Returns the chunks before any event."""

    def chunks(self, events: Iterable[Event]) -> list[Json]:
        """Returns the chunks of these events."""

    def last(self, finish: FinishReason) -> Json:
        """Returns the last chunk, with the finish reason."""

    def usage_chunk(self) -> Json:
        """Returns the chunk without choices that stream_options.include_usage requests."""

    def complete(self, events: Sequence[Event], finish: FinishReason) -> Json:
        """Returns the complete response."""


def usage(stats: DecodeStats, energy: RunEnergy | None = None) -> Json:
    """Returns the `usage` object: the API's counts, then our additions.

    Drafts are reported as the API's predicted tokens, except that rejected drafts do not count as completion tokens.
    """
    counts = {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.tokens,
        "total_tokens": stats.prompt_tokens + stats.tokens,
        "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        },
        "drafted_tokens": stats.drafted,
        "accepted_tokens": stats.accepted,
        "tokens_per_second": stats.tokens_per_second,
        "time_to_first_token_seconds": stats.first_token_seconds,
        "prefill_seconds": stats.prefill_seconds,
    }
    return counts if energy is None else counts | {"energy": energy_usage(energy)}


def energy_usage(energy: RunEnergy) -> Json:
    """Returns a request's energy: the machine's joules while it ran, idle power and other load included.

    Joules per token are null if other requests ran at the same time.
    """

    def figure(value: Interval | None) -> Json:
        record = value.to_json() if value else {}
        return {"value": record.get("value"), "low": record.get("low"), "high": record.get("high")}

    joules, per_token = figure(energy.joules), figure(energy.joules_per_token)
    return {
        "joules": joules["value"],
        "joules_interval": [joules["low"], joules["high"]],
        "joules_per_token": per_token["value"],
        "joules_per_token_interval": [per_token["low"], per_token["high"]],
        "scope": energy.facts.scope if energy.facts else None,
        "meter": energy.facts.name if energy.facts else None,
        "estimate": energy.facts.is_estimate if energy.facts else False,
        "shared_with": energy.shared_with,
        "reason": energy.reason or None,
    }


class ChatFormat:
    """/v1/chat/completions."""

    def __init__(self, model: str) -> None:
        self._stem = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._calls = 0

    def first(self) -> list[Json]:
        """Returns the chunk with the role."""
        return [self._chunk({"role": "assistant", "content": ""})]

    def chunks(self, events: Iterable[Event]) -> list[Json]:
        """Returns one chunk per piece of text or thought and per tool call."""
        return [self._chunk(self._delta(event)) for event in events]

    def last(self, finish: FinishReason) -> Json:
        """Returns the chunk with the reason: tool_calls if the answer ended in calls."""
        return self._chunk({}, self._reason(finish))

    def usage_chunk(self) -> Json:
        """Returns a chunk without choices."""
        return {**self._stem, "object": "chat.completion.chunk", "choices": []}

    def complete(self, events: Sequence[Event], finish: FinishReason) -> Json:
        """Returns the response with its message, whose content is null if there are only calls."""
        deltas = [self._delta(event) for event in events]
        calls = [{key: value for key, value in call.items() if key != "index"} for delta in deltas for call in delta.get("tool_calls", ())]
        content = "".join(delta.get("content", "") for delta in deltas)
        thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
        message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._reason(finish)}
        return {**self._stem, "object": "chat.completion", "choices": [choice]}

    def _delta(self, event: Event) -> Json:
        if isinstance(event, Text):
            return {"content": event.text}
        if isinstance(event, Thought):
            return {"reasoning_content": event.text}
        return self._call(event)

    def _call(self, call: ToolCall) -> Json:
        if call.arguments is None:
            return {"content": call.raw}  # an unreadable call is passed on as text
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        fields = {"index": self._calls, "id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}
        self._calls += 1
        return {"tool_calls": [fields]}

    def _reason(self, finish: FinishReason) -> str:
        return "tool_calls" if self._calls and finish == "stop" else finish

    def _chunk(self, delta: Json, finish: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._stem, "object": "chat.completion.chunk", "choices": [choice]}


class CompletionFormat:
    """/v1/completions."""

    def __init__(self, model: str) -> None:
        self._stem = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()), "model": model}

    def first(self) -> list[Json]:
        """Returns none: nothing precedes the text."""
        return []

    def chunks(self, events: Iterable[Event]) -> list[Json]:
        """Returns one chunk per piece of text."""
        return [self._piece(event.text) for event in events if isinstance(event, Text)]

    def last(self, finish: FinishReason) -> Json:
        """Returns the chunk with the reason."""
        return self._piece("", finish)

    def usage_chunk(self) -> Json:
        """Returns a chunk without choices."""
        return {**self._stem, "choices": []}

    def complete(self, events: Sequence[Event], finish: FinishReason) -> Json:
        """Returns the response with all text."""
        return self._piece("".join(event.text for event in events if isinstance(event, Text)), finish)

    def _piece(self, text: str, finish: str | None = None) -> Json:
        return {**self._stem, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}]}
