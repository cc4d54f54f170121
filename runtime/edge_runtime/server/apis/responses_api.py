"""OpenAI's POST /v1/responses.

Its fields are mapped to those of /v1/chat/completions and then read by the same code. The answer is a list of items (thoughts, messages,
calls), complete or as typed events.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edge_runtime.server.apis.response_format import (
    ChatLogprobs,
    ChoiceAnswer,
    Logprobs,
    ResponseFormat,
    responses_usage,
    server_sent,
    timings,
)
from edge_runtime.server.engine.jobs import Finished, Output
from edge_runtime.server.errors import ApiError, invalid
from edge_runtime.server.json_text import Json, values_of
from edge_runtime.server.requests.completions import IGNORED_FIELDS, MAX_TOOLS, ApiRequest, left_out, read_chat
from edge_runtime.server.requests.fields import FOREIGN, SAMPLING_FIELDS, Fields, read_limit
from edge_runtime.server.requests.messages import MAX_MESSAGES, MAX_PARTS
from edge_runtime.text.channels import Event, Text, Thought
from edge_runtime.text.tool_calls import CallPiece, ToolCall

_MAPPED = {
    "background",
    "conversation",
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "parallel_tool_calls",
    "previous_response_id",
    "prompt",
    "reasoning",
    "stream",
    "stream_options",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
}
_LOGPROBS = "message.output_text.logprobs"
# Fields that llama-server takes on this path too.
_PASSED_ON = SAMPLING_FIELDS | {"grammar", "json_schema", "n_predict"}
# The field with a part's text, for each type of part.
_TEXTS = {**dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text"), "refusal": "refusal"}
# Types of the items that OpenAI's own tools leave in a conversation, next to the answer that they led to.
_HOSTED = {"code_interpreter_call", "file_search_call", "image_generation_call", "mcp_list_tools", "web_search_call"}
_NAMESPACE = "namespace"


def read_response(body: Json) -> ApiRequest:
    """Reads the body of a POST to /v1/responses. Raises ApiError."""
    fields = Fields(body)
    fields.only(IGNORED_FIELDS | _MAPPED | _PASSED_ON, FOREIGN)
    for name in ("previous_response_id", "conversation"):
        fields.refuse(name, why="this server keeps no conversations; send all items as input")
    fields.refuse("background", False)
    fields.refuse("prompt", why="this server keeps no prompt templates; send input")
    fields.inner("stream_options").only({"continuous_usage_stats", "include_obfuscation", "include_usage"})  # usage is in the last event
    chat: Json = {name: body[name] for name in _PASSED_ON | {"stream", "parallel_tool_calls"} if body.get(name) is not None}
    chat["messages"] = _messages(fields)
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = read_limit(fields, "max_output_tokens")
    chat["tools"] = [read for tool in _flat_tools(fields) if (read := _tool(tool)) is not None]
    chat["tool_choice"] = _tool_choice(fields)
    chat["response_format"] = _format(fields.inner("text"))
    chat["reasoning_effort"] = fields.inner("reasoning").text("effort")
    if "top_logprobs" in fields or _LOGPROBS in fields.items("include", 16):
        chat |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs")}
    request = read_chat(chat)
    return replace(request, remarks=(*fields.remarks, *request.remarks))


def namespaces(body: Mapping[str, Any]) -> dict[str, str]:
    """Returns the namespaces of the functions that a valid request declares in namespaces, by function name."""
    groups = [tool for tool in body.get("tools") or () if tool.get("type") == _NAMESPACE]
    return {tool["name"]: group["name"] for group in groups for tool in group.get("tools") or () if tool.get("type") == "function"}


def _flat_tools(fields: Fields) -> list[Fields]:
    """Returns the tools, with each namespace replaced by its tools. The model sees their names without the namespace."""
    tools: list[Fields] = []
    for tool in fields.objects("tools", MAX_TOOLS):
        if tool.text("type") != _NAMESPACE:
            tools.append(tool)
            continue
        if not tool.text("name"):
            raise tool.wrong("name", "is missing; name the namespace")
        tools += tool.objects("tools", MAX_TOOLS)
    return tools


def _messages(fields: Fields) -> list[Json]:
    content = fields.get("input")
    if isinstance(content, str):
        messages: list[Json] = [{"role": "user", "content": content}]
    elif isinstance(content, list):
        messages = []
        for item in fields.objects("input", MAX_MESSAGES):
            _add_item(messages, item)
    else:
        raise invalid("input must be a string or a list of items", "input")
    for message in messages:
        if message.pop("open", None):
            message["content"] = "".join(message["content"])
    if instructions := fields.text("instructions"):
        first = messages[0] if messages else {}
        if first.get("role") in ("system", "developer"):  # templates take one system message, at the beginning
            first["content"] = f"{instructions}\n\n{first['content']}"
        else:
            messages.insert(0, {"role": "system", "content": instructions})
    return messages


def _add_item(messages: list[Json], item: Fields) -> None:
    """Adds one item. The thoughts, text and calls of one answer become one message."""
    kind = item.text("type", "message")
    if kind == "message":
        message = {"role": item.text("role") or "", "content": _text_or_parts(item)}
        if message["role"] == "assistant":
            _answer(messages)["content"].append(_text(item, "content"))
        else:
            messages.append(message)
    elif kind == "reasoning":
        thoughts = _text(item, "content") or _text(item, "summary")
        _answer(messages)["reasoning_content"] = thoughts or None
    elif kind in ("function_call", "custom_tool_call"):  # the input of the second is text, not JSON
        arguments = item.text("arguments") if kind == "function_call" else json.dumps({"input": item.text("input") or ""})
        function = {"name": item.text("name") or "", "arguments": arguments or "{}"}
        call = {"id": item.text("call_id") or "", "type": "function", "function": function}
        _answer(messages).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "tool_call_id": item.text("call_id") or "", "content": _text(item, "output")})
    elif kind in _HOSTED:
        item.remarks.append(f"an item of the type {kind!r} is left out; this server has no such tool")
    elif kind == "item_reference":
        raise item.wrong("type", "is 'item_reference'; this server stores no items, send them whole (clients do with store: false)")
    else:
        raise item.wrong("type", f"is {str(kind)[:40]!r}; this server takes messages, reasoning, function calls and their outputs")


def _answer(messages: list[Json]) -> Json:
    """Returns the assistant message that the last items belong to; begins one if there is none."""
    if not (messages and messages[-1].get("open")):
        messages.append({"role": "assistant", "content": [], "open": True})
    return messages[-1]


def _text_or_parts(item: Fields) -> str | list[Json]:
    """Returns a message's text, or, if it has images, its parts as in a chat request."""
    content = item.get("content")
    if not isinstance(content, list) or not any(isinstance(part, dict) and part.get("type") == "input_image" for part in content):
        return _text(item, "content")
    if item.text("role") != "user":
        raise item.wrong("content", "has images; only a user's message may have them")
    parts: list[Json] = []
    for fields in item.objects("content", MAX_PARTS):
        if fields.text("type") == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": fields.get("image_url"), "detail": fields.get("detail")}})
        elif (name := _TEXTS.get(fields.text("type") or "")) is not None:
            parts.append({"type": "text", "text": fields.text(name) or ""})
        else:
            raise fields.wrong("type", f"is {str(fields.get('type'))[:40]!r}; it must be input_text or input_image")
    return parts


def _text(item: Fields, name: str) -> str:
    content = item.get(name)
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in item.objects(name, MAX_PARTS):
        if (text := _TEXTS.get(part.text("type") or "")) is None:
            raise part.wrong("type", f"is {str(part.get('type'))[:40]!r}; only text fits here", code="unsupported_parameter")
        texts.append(part.text(text) or "")
    return "".join(texts)


def _tool(tool: Fields) -> Json | None:
    """Returns a tool as a function of a chat request; None for a tool that is left out."""
    if (kind := tool.text("type")) != "function":
        left_out(tool, kind)
        return None
    if not tool.text("name"):
        raise tool.wrong("name", "is missing; name the function")
    return {"type": "function", "function": {name: tool.get(name) for name in ("name", "description", "parameters")}}


def _tool_choice(fields: Fields) -> object:
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": choice}
    return choice


def _format(text: Fields) -> Json | None:
    text.only({"format", "verbosity"})
    requested = text.object("format")
    if requested is None:
        return None
    if requested.get("type") != "json_schema":
        return requested
    if not isinstance(requested.get("schema"), dict):
        raise text.wrong("format.schema", "is missing; give the JSON schema of the answer")
    return {"type": "json_schema", "json_schema": {"schema": requested["schema"]}}


# Request fields that the response repeats, with their defaults.
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
# The most characters of these fields together. Each event that repeats them is encoded in the event loop, and stays in memory while a
# client does not read.
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
        """Returns the events of new output. A new item begins where the kind of output changes."""
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
        """Begins an item, unless one of this kind is open."""
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
        """Closes the open item, whose text is complete."""
        if (item := self._open) is None:
            return []
        if item["type"] == "function_call":
            return self._close_call("incomplete")  # what looked like a call turned out to be text
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
    """Returns the fields that a response repeats. Those that do not fit into `MAX_REPEATED` characters get their defaults."""
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
