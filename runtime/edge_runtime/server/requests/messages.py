"""Converts the messages of the OpenAI API into what chat templates take."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_devices.children.running import ChildBudget
from edge_runtime.media.reading import read_image, read_sound
from edge_runtime.media.soft_rows import MEDIA, Media
from edge_runtime.server.errors import ApiError, invalid
from edge_runtime.server.json_text import MAX_VALUES, count_values, parse_object
from edge_runtime.server.requests.fields import Fields
from edge_runtime.text.chat_template import Message
from edge_runtime.text.tool_calls import begun_arguments

# Of one request. The context has no room for more, and each is decoded in a process of its own.
MAX_MEDIA = 16
_BUDGETS = {"low": 70, "auto": 280, "high": 1120}
_SOUNDS = ("wav", "mp3", "flac")
_DATA_URL = re.compile(r"data:image/(?:jpeg|jpg|png|webp);base64,")


@dataclass(frozen=True)
class SentMedia:
    """The bytes of an image, at most `budget` soft rows of it, or of a sound; `place` is where it is in the request."""

    kind: str
    data: bytes
    budget: int
    place: str

    def decoded(self, children: ChildBudget) -> Media:
        """Returns the decoded media, within what the request has left of its processor time. Raises RequestError."""
        return read_image(self.data, self.budget, children) if self.kind == "image" else read_sound(self.data, children)


def read_part(part: Fields) -> SentMedia:
    """Returns the media of a part of the type image_url or input_audio. Raises ApiError."""
    if part.text("type") == "input_audio":
        inner = part.inner("input_audio")
        inner.choice("format", _SOUNDS)
        return SentMedia("sound", _bytes(inner, "data", inner.text("data") or ""), 0, part.place("input_audio"))
    image: Any = part.get("image_url")
    inner = Fields(image if isinstance(image, dict) else {"url": image}, part.place("image_url"))
    detail = inner.text("detail") or part.text("detail", "auto") or "auto"
    if detail not in _BUDGETS:
        raise inner.wrong("detail", f"is {detail[:40]!r}; it must be one of {', '.join(_BUDGETS)}")
    url = inner.text("url") or ""
    begin = _DATA_URL.match(url)
    if begin is None:
        raise inner.wrong("url", f"is {url[:40]!r}; this server fetches nothing, send data:image/png;base64,... (jpeg, png or webp)")
    return SentMedia("image", _bytes(inner, "url", url[begin.end() :]), _BUDGETS[detail], inner.place("url"))


def _bytes(fields: Fields, name: str, text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data:
        raise fields.wrong(name, "is not base64; encode the file's bytes")
    return data


MAX_MESSAGES = 2048
MAX_PARTS = 256
MAX_CALLS = 128
_PART_TYPES = ("text", "image_url", "input_audio")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The input of a chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = False


class _Calls:
    """The calls of the messages so far: their functions by their ids, and how many JSON values the arguments of others may have."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self._values = MAX_VALUES

    def arguments(self, function: Fields) -> dict[str, Any]:
        """Returns the arguments of one more call, sent as text or as an object; of a text that is none, as of a cut call, what it says.

        A conversation with such a call goes on, as a server or another model wrote it. Raises ApiError for arguments beyond a limit.
        """
        if isinstance(function.get("arguments"), dict):
            return function.object("arguments") or {}
        place, text = function.place("arguments"), function.text("arguments") or "{}"
        try:
            arguments = parse_object(text, place, place, values=self._values)
        except ApiError as error:
            stateable = isinstance(error.__cause__, json.JSONDecodeError | None)
            if error.code != "invalid_json" or not stateable:
                raise
            arguments = begun_arguments(text)
        self._values -= count_values(text)
        return arguments


def read_messages(body: Fields) -> tuple[Message, ...]:
    """Returns the messages of a request; tool messages get the name of the function that was called. Raises ApiError."""
    earlier = _Calls()
    messages = []
    total = 0
    for fields in body.objects("messages", MAX_MESSAGES):
        role = ROLES[fields.choice("role", ROLES)]
        content, media = _content(fields)
        message: Message = {"role": role, "content": content}
        if media:
            if role != "user":
                raise fields.wrong("content", "has images or sound; only a user's message may have them")
            message[MEDIA] = media
            if (total := total + len(media)) > MAX_MEDIA:
                raise invalid(f"the request has more than {MAX_MEDIA} images and sounds; send fewer", "messages")
        if role == "assistant":
            message |= _assistant_fields(fields, earlier)
        elif role == "tool":
            message |= _result_of(fields, earlier.names)
        messages.append(message)
    if not messages:
        raise invalid("messages is empty; send at least one message", "messages")
    return tuple(messages)


def _content(fields: Fields) -> tuple[str | list[dict[str, str]], tuple[SentMedia, ...]]:
    """Returns the text, or the parts of a message with images or sound, which are returned beside."""
    content = fields.get("content")
    if content is None or isinstance(content, str):
        return content or "", ()
    parts: list[dict[str, str]] = []
    media: list[SentMedia] = []
    for part in fields.objects("content", MAX_PARTS):
        kind = part.choice("type", _PART_TYPES, code="unsupported_parameter")
        if kind == "text":
            parts.append({"type": "text", "text": part.text("text") or ""})
        else:
            media.append(read_part(part))
            parts.append({"type": "image" if kind == "image_url" else "audio"})
    return (parts, tuple(media)) if media else ("".join(part["text"] for part in parts), ())


def _assistant_fields(fields: Fields, earlier: _Calls) -> Message:
    """Returns the tool calls and thoughts of an assistant message, whose calls are then `earlier` ones."""
    besides: Message = {}
    reasoning = fields.get("reasoning")  # the name that vLLM gives thoughts
    if thoughts := fields.text("reasoning_content") or (reasoning if isinstance(reasoning, str) else None):
        besides["reasoning_content"] = thoughts
    calls = []
    for call in fields.objects("tool_calls", MAX_CALLS):
        function = call.inner("function")
        name, number = function.text("name") or "", call.text("id") or ""
        if not name:
            raise function.wrong("name", "is missing; name the function that was called")
        earlier.names[number] = name
        calls.append({"id": number, "type": "function", "function": {"name": name, "arguments": earlier.arguments(function)}})
    if calls:
        besides["tool_calls"] = calls
    return besides


def _result_of(fields: Fields, names: Mapping[str, str]) -> Message:
    number = fields.text("tool_call_id")
    if number is None or number not in names:
        raise fields.wrong("tool_call_id", f"is {str(number)[:60]!r}; it must be the id of a call in an earlier message")
    return {"tool_call_id": number, "name": names[number]}
