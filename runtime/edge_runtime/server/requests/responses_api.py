"""POST /v1/responses: maps its fields to those of /v1/chat/completions, which are then read as such."""

from __future__ import annotations

from typing import Any

from edge_runtime.server.errors import invalid
from edge_runtime.server.requests.completions import IGNORED_FIELDS, SAMPLING_FIELDS, ApiRequest, read_chat
from edge_runtime.server.requests.fields import Fields
from edge_runtime.server.requests.messages import MAX_MESSAGES, MAX_PARTS
from edge_runtime.server.requests.tools import MAX_TOOLS

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
_TEXT_PARTS = {"input_text", "output_text", "text", "reasoning_text", "summary_text"}
Json = dict[str, Any]


def read_response(body: Json) -> ApiRequest:
    """Reads the body of a POST to /v1/responses. Raises ApiError."""
    fields = Fields(body)
    fields.only(IGNORED_FIELDS | _MAPPED | SAMPLING_FIELDS)
    for name in ("previous_response_id", "conversation"):
        fields.refuse(name, why="this server keeps no conversations; send all items as input")
    fields.refuse("background", False)
    fields.refuse("prompt", why="this server keeps no prompt templates; send input")
    fields.inner("stream_options").only({"include_obfuscation"})
    chat: Json = {name: body[name] for name in SAMPLING_FIELDS | {"stream", "parallel_tool_calls"} if body.get(name) is not None}
    chat["messages"] = _messages(fields)
    chat["max_completion_tokens"] = fields.integer("max_output_tokens", 1, 1 << 31)
    chat["tools"] = [_tool(tool) for tool in fields.objects("tools", MAX_TOOLS)]
    chat["tool_choice"] = _tool_choice(fields)
    chat["response_format"] = _format(fields.inner("text"))
    chat["reasoning_effort"] = fields.inner("reasoning").text("effort")
    if "top_logprobs" in fields or _LOGPROBS in fields.items("include", 16):
        chat |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs")}
    return read_chat(chat)


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
    """Adds one item; thoughts, text and calls of one answer become one message."""
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
    elif kind == "function_call":
        function = {"name": item.text("name") or "", "arguments": item.text("arguments") or "{}"}
        call = {"id": item.text("call_id") or "", "type": "function", "function": function}
        _answer(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.text("call_id") or "", "content": _text(item, "output")})
    else:
        raise item.wrong("type", f"is {str(kind)[:40]!r}; this server takes messages, reasoning, function calls and their outputs")


def _answer(messages: list[Json]) -> Json:
    """Returns the assistant message that the last items make up."""
    if not (messages and messages[-1].get("open")):
        messages.append({"role": "assistant", "content": [], "open": True})
    return messages[-1]


def _text_or_parts(item: Fields) -> str | list[Json]:
    """Returns the text of a message, or its parts as a chat request has them if there are images among them."""
    content = item.get("content")
    if not isinstance(content, list) or not any(isinstance(part, dict) and part.get("type") == "input_image" for part in content):
        return _text(item, "content")
    if item.text("role") != "user":
        raise item.wrong("content", "has images; only a user's message may have them")
    parts: list[Json] = []
    for fields in item.objects("content", MAX_PARTS):
        if fields.text("type") == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": fields.get("image_url"), "detail": fields.get("detail")}})
        elif fields.text("type") in _TEXT_PARTS:
            parts.append({"type": "text", "text": fields.text("text") or ""})
        else:
            raise fields.wrong("type", f"is {str(fields.get('type'))[:40]!r}; it must be input_text or input_image")
    return parts


def _text(item: Fields, name: str) -> str:
    content = item.get(name)
    if content is None or isinstance(content, str):
        return content or ""
    parts = item.objects(name, MAX_PARTS)
    for part in parts:
        if part.text("type") not in _TEXT_PARTS:
            raise part.wrong("type", f"is {str(part.get('type'))[:40]!r}; only text fits here", code="unsupported_parameter")
    return "".join(part.text("text") or "" for part in parts)


def _tool(tool: Fields) -> Json:
    if tool.text("type") != "function":
        raise tool.wrong("type", "must be 'function'; this server runs no tools of its own", code="unsupported_parameter")
    if not tool.text("name"):
        raise tool.wrong("name", "is missing; name the function")
    return {"type": "function", "function": {name: tool.get(name) for name in ("name", "description", "parameters")}}


def _tool_choice(fields: Fields) -> object:
    choice = fields.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
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
