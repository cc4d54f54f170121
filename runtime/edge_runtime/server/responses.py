"""Answers in the shapes of the OpenAI API, whole or in chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from edge_devices.energy.intervals import Interval
from edge_devices.energy.live import RunEnergy
from edge_runtime.server.engine.jobs import Figures, Finish
from edge_runtime.text.channels import Event, Text, Thought
from edge_runtime.text.tool_calls import ToolCall

Json = dict[str, Any]


class Form(Protocol):
    """How one answer is written. A stream is `first`, `chunk` for all events, then `last`; otherwise `whole` gets all events at once."""

    def first(self) -> list[Json]:
        """Chunks before any event."""

    def chunk(self, events: Iterable[Event]) -> list[Json]:
        """Chunks of these events."""

    def last(self, finish: Finish) -> Json:
        """The chunk that says why it ended."""

    def usage_only(self) -> Json:
        """The chunk without a choice that stream_options.include_usage asks for."""

    def whole(self, events: Sequence[Event], finish: Finish) -> Json:
        """The answer in one object."""


def usage(figures: Figures) -> Json:
    """The API's own counts. Drafts are counted as its predictions are, but rejected ones are no completion tokens; the rest is ours."""
    seconds = figures.decode_seconds
    counts = {
        "prompt_tokens": figures.prompt_tokens,
        "completion_tokens": figures.tokens,
        "total_tokens": figures.prompt_tokens + figures.tokens,
        "prompt_tokens_details": {"cached_tokens": figures.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": figures.accepted,
            "rejected_prediction_tokens": figures.drafted - figures.accepted,
        },
        "drafted_tokens": figures.drafted,
        "accepted_tokens": figures.accepted,
        "tokens_per_second": figures.tokens / seconds if seconds else 0.0,
        "time_to_first_token_seconds": figures.first_token_seconds,
        "prefill_seconds": figures.prefill_seconds,
    }
    return counts if figures.energy is None else counts | {"energy": energy_usage(figures.energy)}


def energy_usage(energy: RunEnergy) -> Json:
    """What a request took: the machine's joules while it ran, idle power and what else ran included; per token only if it was alone."""

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


class ChatForm:
    """/v1/chat/completions."""

    def __init__(self, model: str) -> None:
        self._stem = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._calls = 0

    def first(self) -> list[Json]:
        """Says who speaks."""
        return [self._chunk({"role": "assistant", "content": ""})]

    def chunk(self, events: Iterable[Event]) -> list[Json]:
        """One chunk per piece of text or thought, and per call."""
        return [self._chunk(self._delta(event)) for event in events]

    def last(self, finish: Finish) -> Json:
        """The reason, which is tool_calls where the answer ended in calls."""
        return self._chunk({}, self._reason(finish))

    def usage_only(self) -> Json:
        """A chunk without a choice."""
        return {**self._stem, "object": "chat.completion.chunk", "choices": []}

    def whole(self, events: Sequence[Event], finish: Finish) -> Json:
        """The message; content is null where there are calls only."""
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
            return {"content": call.raw}  # what cannot be read as a call is what the model said
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        made = {"index": self._calls, "id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}
        self._calls += 1
        return {"tool_calls": [made]}

    def _reason(self, finish: Finish) -> str:
        return "tool_calls" if self._calls and finish == "stop" else finish

    def _chunk(self, delta: Json, finish: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**self._stem, "object": "chat.completion.chunk", "choices": [choice]}


class CompletionForm:
    """/v1/completions."""

    def __init__(self, model: str) -> None:
        self._stem = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()), "model": model}

    def first(self) -> list[Json]:
        """Nothing comes before the text."""
        return []

    def chunk(self, events: Iterable[Event]) -> list[Json]:
        """One chunk per piece."""
        return [self._piece(event.text) for event in events if isinstance(event, Text)]

    def last(self, finish: Finish) -> Json:
        """The reason."""
        return self._piece("", finish)

    def usage_only(self) -> Json:
        """A chunk without a choice."""
        return {**self._stem, "choices": []}

    def whole(self, events: Sequence[Event], finish: Finish) -> Json:
        """All text."""
        return self._piece("".join(event.text for event in events if isinstance(event, Text)), finish)

    def _piece(self, text: str, finish: str | None = None) -> Json:
        return {**self._stem, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}]}
