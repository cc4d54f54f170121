"""Responses of /v1/messages: a message of content blocks (thinking, text, tool_use), complete or as typed events."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from edge_runtime.server.engine.jobs import Finished, Output
from edge_runtime.server.errors import ApiError, ErrorForm
from edge_runtime.server.json_text import Json
from edge_runtime.server.responses.response_format import ChoiceAnswer, ResponseFormat, messages_usage, server_sent
from edge_runtime.session.monitor import DecodeStats
from edge_runtime.text.channels import Event, Text, Thought
from edge_runtime.text.tool_calls import CallPiece, ToolCall, begun_arguments

# What a block has in an event of its beginning, and the name of its deltas and of their field.
_EMPTY: dict[str, Json] = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"), "tool_use": ("input_json_delta", "partial_json")}


class MessagesFormat(ResponseFormat):
    """One message. Its first event comes with the first output, when it is known how much of the prompt was cached.

    A stream that is idle before that begins with what is known, so that its client knows that the prompt is computed.
    """

    def __init__(self, model: str) -> None:
        self._message: Json = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._begun = self._called = False
        self._blocks = self._prompt_tokens = 0
        self._kind: str | None = None

    def begin(self, prompt_tokens: int) -> list[bytes]:
        self._prompt_tokens = prompt_tokens
        return []

    def idle(self) -> list[bytes]:
        return [*self._start(DecodeStats(prompt_tokens=self._prompt_tokens)), _event("ping")]

    def output(self, choice: int, output: Output) -> list[bytes]:  # noqa: ARG002
        """Returns the events of new output; a block begins and ends where its kind changes."""
        return [*self._start(output.stats), *(written for event in output.events for written in self._add(event))]

    def end(self, choice: int, finished: Finished) -> list[bytes]:  # noqa: ARG002
        started = self._start(finished.stats)
        usage = messages_usage(finished.stats, finished.thought_tokens, finished.energy)
        last = _event("message_delta", delta=self._stop(finished), usage=usage)
        return [*started, *self._close(), last, _event("message_stop")]

    def failed(self, error: ApiError) -> list[bytes]:
        return [server_sent(error.body(ErrorForm.ANTHROPIC), "error")]

    def complete(self, answers: Sequence[ChoiceAnswer]) -> Json:
        answer = answers[0]
        blocks: list[Json] = []
        for event in answer.events:
            if isinstance(event, ToolCall):
                self._called = True
                arguments = event.arguments if event.arguments is not None else begun_arguments(event.partial or "")
                blocks.append(_tool_use(event.name, arguments))
            elif isinstance(event, Text | Thought):
                kind = "text" if isinstance(event, Text) else "thinking"
                if not blocks or blocks[-1]["type"] != kind:
                    blocks.append({"type": kind, **_EMPTY[kind]})
                blocks[-1][kind] += event.text
        finished = answer.finished
        usage = messages_usage(finished.stats, finished.thought_tokens, finished.energy)
        return {**self._message, "content": blocks, **self._stop(finished), "usage": usage}

    def _start(self, stats: DecodeStats) -> list[bytes]:
        """Returns the first event, once."""
        if self._begun:
            return []
        self._begun = True
        return [_event("message_start", message={**self._message, "usage": messages_usage(stats, 0)})]

    def _add(self, event: Event) -> list[bytes]:
        if isinstance(event, CallPiece):
            begun = [] if event.name is None else self._open("tool_use", _tool_use(event.name, {}))
            return [*begun, *self._delta(event.arguments)]
        if isinstance(event, ToolCall):
            self._called = True
            begun = self._open("tool_use", _tool_use(event.name, {})) if event.unsent is None else []
            return [*begun, *self._delta(event.rest), *self._close()]
        kind = "text" if isinstance(event, Text) else "thinking"
        begun = [] if self._kind == kind else self._open(kind, {"type": kind, **_EMPTY[kind]})
        return [*begun, *self._delta(event.text)]

    def _open(self, kind: str, block: Json) -> list[bytes]:
        """Begins a block; the one before it ends."""
        closed, self._kind = self._close(), kind
        return [*closed, _event("content_block_start", index=self._blocks, content_block=block)]

    def _delta(self, text: str) -> list[bytes]:
        if not text:
            return []
        kind, name = _DELTAS[self._kind or "text"]
        return [_event("content_block_delta", index=self._blocks, delta={"type": kind, name: text})]

    def _close(self) -> list[bytes]:
        if self._kind is None:
            return []
        index, kind = self._blocks, self._kind
        self._blocks, self._kind = index + 1, None
        signed = {"type": "signature_delta", "signature": ""}  # clients want one; nobody signs thoughts here
        signature = [_event("content_block_delta", index=index, delta=signed)] if kind == "thinking" else []
        return [*signature, _event("content_block_stop", index=index)]

    def _stop(self, finished: Finished) -> Json:
        if finished.reason == "length":
            reason = "max_tokens"
        elif finished.stop_string is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": finished.stop_string}


def _tool_use(name: str | None, arguments: Json) -> Json:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": arguments}


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent({"type": kind, **fields}, kind)
