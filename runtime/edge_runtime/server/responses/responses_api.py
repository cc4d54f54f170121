"""Responses of /v1/responses: a list of items (thoughts, messages, calls), complete or as typed events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from edge_runtime.server.engine.jobs import Finished, Output
from edge_runtime.server.errors import ApiError
from edge_runtime.server.json_text import Json, values_of
from edge_runtime.server.requests.responses_api import namespaces
from edge_runtime.server.responses.response_format import (
    ChatLogprobs,
    ChoiceAnswer,
    Logprobs,
    ResponseFormat,
    responses_usage,
    server_sent,
    timings,
)
from edge_runtime.text.channels import Event, Text, Thought
from edge_runtime.text.tool_calls import CallPiece, ToolCall

# Fields of the request that the response repeats, with their defaults.
_REPEATED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": 1,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1,
    "user": None,
}
# Characters of them together: each event that has them is written in the event loop, and a client that reads none keeps its copies.
MAX_REPEATED = 1 << 17


class ResponsesFormat(ResponseFormat):
    """One response to the request `body`."""

    def __init__(self, model: str, body: Mapping[str, Any]) -> None:
        self._response: Json = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            **_repeated(body),
            "store": False,
            "previous_response_id": None,
            "truncation": "disabled",
            "output": [],
            "usage": None,
        }
        self._namespaces = namespaces(body)
        self._number = 0
        self._open: Json | None = None
        self._text = ""
        self._logprobs = ChatLogprobs()
        self._streams = True

    def begin(self, prompt_tokens: int) -> list[bytes]:  # noqa: ARG002
        return [self._event("response.created", response=self._response), self._event("response.in_progress", response=self._response)]

    def output(self, choice: int, output: Output) -> list[bytes]:  # noqa: ARG002
        """Returns the events of new output; an item begins and ends where its kind changes."""
        return self._take(output.events, ChatLogprobs(output.logprobs))

    def end(self, choice: int, finished: Finished) -> list[bytes]:  # noqa: ARG002
        status = "completed" if finished.reason == "stop" else "incomplete"
        events = self._close(status)
        self._response |= {
            "status": status,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "usage": responses_usage(finished.stats, finished.thought_tokens, finished.energy),
            "timings": timings(finished.stats),
        }
        return [*events, self._event(f"response.{status}", response=self._response)]

    def failed(self, error: ApiError) -> list[bytes]:
        reason = {"code": error.code or "server_error", "message": str(error)}
        self._response |= {"status": "failed", "error": reason}
        return [self._event("error", **reason, param=error.param), self._event("response.failed", response=self._response)]

    def complete(self, answers: Sequence[ChoiceAnswer]) -> Json:
        answer = answers[0]
        self._streams = False
        self._take(answer.events, answer.logprobs)
        self.end(0, answer.finished)
        return self._response

    def _take(self, events: Sequence[Event], logprobs: Logprobs) -> list[bytes]:
        pieces: list[bytes] = []
        for event in events:
            fitting, logprobs = (logprobs, ChatLogprobs()) if isinstance(event, Text) else (ChatLogprobs(), logprobs)
            assert isinstance(fitting, ChatLogprobs)
            pieces += self._add(event, fitting)
        return pieces

    def _add(self, event: Event, logprobs: ChatLogprobs) -> list[bytes]:
        if isinstance(event, CallPiece):
            begun = [] if event.name is None else self._begin_call(event.name)
            return [*begun, *self._add_arguments(event.arguments)]
        if isinstance(event, ToolCall):
            begun = self._begin_call(event.name) if event.unsent is None else []
            return [*begun, *self._add_arguments(event.rest), *self._close_call("completed" if event.partial is None else "incomplete")]
        kind = "reasoning" if isinstance(event, Thought) else "message"
        begun = self._begin(kind)
        assert self._open is not None
        self._text += event.text
        self._logprobs.join(logprobs)
        part, added = ("reasoning_text", {}) if kind == "reasoning" else ("output_text", {"logprobs": logprobs.to_json()})
        return [*begun, self._event(f"response.{part}.delta", **self._place(), delta=event.text, **added)]

    def _begin(self, kind: str) -> list[bytes]:
        """Opens an item, unless one of this kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        closed = self._close()
        besides: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        self._open = {
            "id": f"{'rs' if kind == 'reasoning' else 'msg'}_{secrets.token_hex(12)}",
            "type": kind,
            "status": "in_progress",
            **besides,
            "content": [],
        }
        self._text, self._logprobs = "", ChatLogprobs()
        added = self._event("response.output_item.added", output_index=self._index, item=self._open)
        return [*closed, added, self._event("response.content_part.added", **self._place(), part=self._part())]

    def _close(self, status: str = "completed") -> list[bytes]:
        """Closes the open item; its text is complete."""
        if (item := self._open) is None:
            return []
        if item["type"] == "function_call":
            return self._close_call("incomplete")  # what began as a call was none
        part, place = self._part(), self._place()
        logprobs = {} if item["type"] == "reasoning" else {"logprobs": part["logprobs"]}
        item |= {"status": status, "content": [part]}
        events = [
            self._event(f"response.{part['type']}.done", **place, text=self._text, **logprobs),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=self._index, item=item),
        ]
        self._response["output"].append(item)
        self._open = None
        return events

    def _place(self) -> Json:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": self._index, "content_index": 0}

    def _part(self) -> Json:
        assert self._open is not None
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": self._logprobs.to_json()}

    def _begin_call(self, name: str | None) -> list[bytes]:
        closed, self._text = self._close(), ""
        self._open = {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": f"call_{secrets.token_hex(8)}",
            "name": name,
            "arguments": "",
            **({"namespace": self._namespaces[name]} if name in self._namespaces else {}),
        }
        return [*closed, self._event("response.output_item.added", output_index=self._index, item=self._open)]

    def _add_arguments(self, arguments: str) -> list[bytes]:
        assert self._open is not None
        self._text += arguments
        place = {"item_id": self._open["id"], "output_index": self._index}
        return [self._event("response.function_call_arguments.delta", **place, delta=arguments)] if arguments else []

    def _close_call(self, status: str) -> list[bytes]:
        item = self._open
        assert item is not None
        place = {"item_id": item["id"], "output_index": self._index}
        item |= {"status": status, "arguments": self._text}
        events = [
            self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=self._text),
            self._event("response.output_item.done", output_index=self._index, item=item),
        ]
        self._response["output"].append(item)
        self._open = None
        return events

    @property
    def _index(self) -> int:
        return len(self._response["output"])

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return server_sent(value, kind) if self._streams else b""


def _repeated(body: Mapping[str, Any]) -> Json:
    """Returns the fields that a response repeats; those that do not fit into `MAX_REPEATED` characters have their defaults."""
    repeated, left = dict(_REPEATED), MAX_REPEATED
    for name in _REPEATED:
        room = left
        for value in values_of([body.get(name)]):
            room -= 1 + (len(value) if isinstance(value, str) else value.bit_length() if isinstance(value, int) else 0)
            if room < 0:
                break
        else:
            left = room
            repeated[name] = _REPEATED[name] if body.get(name) is None else body[name]
    return repeated
