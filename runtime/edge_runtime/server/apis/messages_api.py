"""Anthropic's POST /v1/messages.

Its fields are mapped to those of /v1/chat/completions and then read by the same code. The answer is a message of content blocks (thinking,
text, tool_use), complete or as typed events.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edge_runtime.server.apis.response_format import ChoiceAnswer, ResponseFormat, messages_usage, server_sent
from edge_runtime.server.engine.jobs import Finished, Output
from edge_runtime.server.errors import ApiError, ErrorForm
from edge_runtime.server.json_text import Json
from edge_runtime.server.requests.completions import MAX_TOOLS, ApiRequest, left_out, read_chat
from edge_runtime.server.requests.fields import FOREIGN, SAMPLING_FIELDS, Fields
from edge_runtime.server.requests.messages import MAX_MESSAGES, MAX_PARTS
from edge_runtime.session.monitor import DecodeStats
from edge_runtime.text.channels import Event, Text, Thought
from edge_runtime.text.tool_calls import CallPiece, ToolCall, begun_arguments

_MAPPED = {
    "max_tokens",
    "messages",
    "output_config",
    "output_format",
    "stop_sequences",
    "stream",
    "system",
    "temperature",
    "thinking",
    "tool_choice",
    "tools",
    "top_k",
    "top_p",
}
# Fields without effect here: who asks, at which price and how urgently. Any prefix of a prompt is cached, whatever `cache_control` says.
_NO_EFFECT = {"cache_control", "inference_geo", "metadata", "model", "service_tier", "speed"}
# Fields of other APIs that have the same meaning here.
_PASSED_ON = (SAMPLING_FIELDS - {"stop"}) | {"draft_length"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "tool"}
_THINKING = ("enabled", "adaptive", "between_tools", "disabled")
# Unknown fields with names up to this length are ignored, because clients send new experimental fields with each release.
_LONGEST_NAME = 64
# Claude Code begins its system text with a line of numbers that change with each request. It is removed, because no cached row of the
# prompt could be reused after it.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:(?:[ \t]*[\w.\-]+=[^;\n]*(?:;|(?=\n)|\Z))*\s*")
# Types of the blocks that Anthropic's own tools leave in a conversation, next to the answer that they led to.
_HOSTED = re.compile(r"server_tool_use|mcp_tool_(use|result)|\w+_tool_result|container_upload|compaction|fallback|redacted_thinking")


def read_message(body: Json) -> ApiRequest:
    """Reads the body of a POST to /v1/messages or /v1/messages/count_tokens. Raises ApiError."""
    fields = Fields(body)
    known = _MAPPED | _NO_EFFECT | _PASSED_ON
    fields.only(known, {**{name: None for name in body if name not in known and len(name) <= _LONGEST_NAME}, **FOREIGN})
    chat: Json = {name: body[name] for name in _PASSED_ON | {"max_tokens", "stream"} if body.get(name) is not None}
    chat |= {"messages": _messages(fields), "stop": list(fields.items("stop_sequences", MAX_PARTS))}
    chat["tools"] = [read for tool in fields.objects("tools", MAX_TOOLS) if (read := _tool(tool)) is not None]
    chat |= _tool_choice(fields) | _format(fields)
    chat["chat_template_kwargs"] = {"enable_thinking": _thinks(fields)}
    request = read_chat(chat)
    return replace(request, remarks=(*fields.remarks, *request.remarks))


def _messages(fields: Fields) -> list[Json]:
    system = _BILLING.sub("", _text(fields, "system"))
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    sent = fields.objects("messages", MAX_MESSAGES)
    if not sent:
        raise fields.wrong("messages", "is empty; send at least one message")
    for message in sent:
        role = message.choice("role", ("user", "assistant", "system"))
        if role == "assistant":
            messages.append(_answer(message))
        elif role == "user" and isinstance(message.get("content"), list):
            messages += _user_messages(message)
        else:
            messages.append({"role": role, "content": _text(message, "content")})
    return messages


def _answer(message: Fields) -> Json:
    if not isinstance(message.get("content"), list):
        return {"role": "assistant", "content": _text(message, "content")}
    texts, thoughts, calls = [], [], []
    for block in message.objects("content", MAX_PARTS):
        kind = block.text("type") or ""
        if kind == "text":
            texts.append(block.text("text") or "")
        elif kind == "thinking":
            thoughts.append(block.text("thinking") or "")
        elif kind == "tool_use":
            function = {"name": block.text("name"), "arguments": block.object("input") or {}}
            calls.append({"id": block.text("id") or "", "type": "function", "function": function})
        elif _HOSTED.fullmatch(kind):
            _leave_out(block, kind)
        else:
            raise block.wrong("type", f"is {kind[:40]!r}; an assistant's message has text, thinking and tool_use")
    answer: Json = {"role": "assistant", "content": "".join(texts)}
    return answer | ({"reasoning_content": "".join(thoughts)} if any(thoughts) else {}) | ({"tool_calls": calls} if calls else {})


def _user_messages(message: Fields) -> list[Json]:
    """Returns the messages of a user's message: one for each tool result, then one with the rest and the images of the results."""
    results: list[Json] = []
    images: list[Json] = []
    parts: list[Json] = []
    for block in message.objects("content", MAX_PARTS):
        if block.text("type") == "tool_result":
            inner = _parts(block)
            text = "".join(part["text"] for part in inner if part["type"] == "text")
            failed = block.flag("is_error") and not text.lower().startswith("error")
            results.append(
                {"role": "tool", "tool_call_id": block.text("tool_use_id") or "", "content": f"Error: {text}" if failed else text}
            )
            images += [part for part in inner if part["type"] != "text"]
        else:
            parts += _part(block)
    rest = images + parts
    return [*results, *([{"role": "user", "content": rest}] if rest or not results else [])]


def _parts(block: Fields) -> list[Json]:
    """Returns a block's content, which is a text or blocks, as parts of a chat request."""
    if not isinstance(block.get("content"), list):
        return [{"type": "text", "text": block.text("content") or ""}]
    return [part for inner in block.objects("content", MAX_PARTS) for part in _part(inner)]


def _part(block: Fields) -> list[Json]:
    """Returns a block of text, an image, or a document as parts of a chat request."""
    kind = block.text("type") or ""
    if kind == "text":
        return [{"type": "text", "text": block.text("text") or ""}]
    if kind == "image":
        return [{"type": "image_url", "image_url": {"url": _image(block.inner("source"))}}]
    if kind in ("document", "search_result"):
        title = block.text("title")
        return [*([{"type": "text", "text": f"{title}\n"}] if title else []), *_document(block, kind)]
    if kind == "tool_reference":
        return [{"type": "text", "text": block.text("tool_name") or ""}]
    if _HOSTED.fullmatch(kind):
        _leave_out(block, kind)
        return []
    raise block.wrong("type", f"is {kind[:40]!r}; it must be text, image, document or tool_result")


def _image(source: Fields) -> str:
    kind = source.choice("type", ("base64", "url", "file"))
    if kind == "file":
        raise source.wrong("type", "is 'file'; this server keeps no files, send the image as base64")
    return source.text("url") or "" if kind == "url" else f"data:{source.text('media_type') or ''};base64,{source.text('data') or ''}"


def _document(block: Fields, kind: str) -> list[Json]:
    if kind == "search_result":
        return _parts(block)
    source = block.inner("source")
    found = source.choice("type", ("text", "content", "base64", "url", "file"))
    if found == "content":
        return _parts(source)
    if found != "text":
        raise source.wrong("type", f"is {found!r}; this server reads documents of plain text, send the text")
    return [{"type": "text", "text": source.text("data") or ""}]


def _text(fields: Fields, name: str) -> str:
    """Returns a text, or the texts of blocks with a line break between them."""
    if not isinstance(fields.get(name), list):
        return fields.text(name) or ""
    texts = []
    for block in fields.parts(name, MAX_PARTS):
        if isinstance(block, str):
            texts.append(block)
        elif block.choice("type", ("text",)):
            texts.append(block.text("text") or "")
    return "\n".join(texts)


def _leave_out(block: Fields, kind: str) -> None:
    block.remarks.append(f"a block of the type {kind!r} is left out; this server has nothing that it belongs to")


def _tool(tool: Fields) -> Json | None:
    """Returns a tool as a function of a chat request; None for one of Anthropic's own tools, which have no schema."""
    kind = tool.text("type", "custom")
    if kind != "custom":
        left_out(tool, kind)
        return None
    if not tool.text("name"):
        raise tool.wrong("name", "is missing; name the tool")
    declared = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.object("input_schema")}
    return {"type": "function", "function": declared}


def _tool_choice(fields: Fields) -> Json:
    choice = fields.inner("tool_choice")
    kind = _CHOICES[choice.choice("type", _CHOICES, "auto")]
    several = {"parallel_tool_calls": not choice.flag("disable_parallel_tool_use")}
    if kind != "tool":
        return {"tool_choice": kind, **several}
    return {"tool_choice": {"type": "function", "function": {"name": choice.text("name")}}, **several}


def _format(fields: Fields) -> Json:
    """Returns the answer's format from `output_config`, or from `output_format`, its older name."""
    asked = fields.inner("output_config").inner("format") if "output_config" in fields else fields.inner("output_format")
    if asked.text("type") is None:
        return {}
    asked.choice("type", ("json_schema",))
    if (schema := asked.object("schema")) is None:
        raise asked.wrong("schema", "is missing; give the JSON schema of the answer")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def _thinks(fields: Fields) -> bool:
    thinking = fields.inner("thinking")
    return "thinking" in fields and thinking.choice("type", _THINKING) != "disabled"


# The empty fields of a block in the event that begins it, and for each type of block the type of its deltas and their field.
_EMPTY: dict[str, Json] = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking"), "tool_use": ("input_json_delta", "partial_json")}


class MessagesFormat(ResponseFormat):
    """One message. Its first event is sent with the first output, because it states how much of the prompt was cached.

    If the stream is idle before that, the event is sent without this figure, so that the client knows that the prompt is being computed.
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
        """Returns the events of new output. A new block begins where the kind of output changes."""
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
        """Returns the first event, unless it was sent already."""
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
        """Ends the open block and begins a new one."""
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
        signed = {"type": "signature_delta", "signature": ""}  # clients expect a signature; thoughts are not signed here
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
