"""Converts the messages of the OpenAI API into what chat templates take."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_devices.children import ChildBudget
from edge_runtime.media.reading import read_image, read_sound
from edge_runtime.media.soft_rows import MEDIA, Media
from edge_runtime.server.errors import ApiError, invalid
from edge_runtime.server.json_text import MAX_VALUES, count_values, parse_object
from edge_runtime.server.requests.fields import Fields
from edge_runtime.text.chat_template import Message
from edge_runtime.text.tool_calls import begun_arguments

# Per request. The context has no room for more, and each is decoded in its own process.
MAX_MEDIA = 16
_BUDGETS = {"low": 70, "auto": 280, "high": 1120}
_SOUNDS = ("wav", "mp3", "flac")
_DATA_URL = re.compile(r"data:image/(?:jpeg|jpg|png|webp);base64,")


@dataclass(frozen=True)
class SentMedia:
    """The bytes of an image or a sound. `budget` is the most soft rows of an image; `place` is the path of the field in the request."""

    kind: str
    data: bytes
    budget: int
    place: str

    def decoded(self, children: ChildBudget) -> Media:
        """Returns the decoded media, within the request's remaining processor time. Raises RequestError."""
        return read_image(self.data, self.budget, children) if self.kind == "image" else read_sound(self.data, children)


def read_part(part: Fields) -> SentMedia:
    """Returns the media in a part of the type image_url or input_audio. Raises ApiError."""
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
# The field with a part's text, for each type of part. Some clients send the types of /v1/responses here too.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text"}
_ANSWER_TEXTS = {**_TEXTS, "refusal": "refusal"}
_THOUGHTS = ("thinking", "reasoning")  # parts of an earlier answer that the model does not get again
_MEDIA_TYPES = {"image_url": "image", "input_audio": "audio"}
# The template's role for each role of the API. "function" is the API's older name for "tool".
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool"}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The input of a chat template. If `continues` is true, the last message is the beginning of the answer."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = False
    continues: bool = False
    generation_prompt: bool = True


CONVERSATION_FIELDS = frozenset({"add_generation_prompt", "chat_template_kwargs", "continue_final_message", "messages", "tools"})


def read_conversation(body: Fields, tools: tuple[Mapping[str, Any], ...], *, thinking: bool) -> Conversation:
    """Returns the conversation of a request. Raises ApiError.

    An assistant's message at the end is the beginning of the answer, as in llama-server, unless `continue_final_message` is false or the
    request has vLLM's `add_generation_prompt`. The model cannot think before an answer that has already begun.
    """
    messages = read_messages(body)
    last, prompt = messages[-1], body.flag("add_generation_prompt", True)
    begun = last["role"] == "assistant" and "tool_calls" not in last
    continues = body.flag("continue_final_message", begun and "add_generation_prompt" not in body)
    if continues and not begun:
        raise body.wrong("continue_final_message", "is true, but the last message is no text of the assistant; send one, or leave it out")
    if continues and prompt and "add_generation_prompt" in body:
        raise body.wrong("continue_final_message", "cannot be true together with add_generation_prompt; set one of them")
    return Conversation(
        messages=messages,
        tools=tools,
        thinking=thinking and not continues,
        continues=continues,
        generation_prompt=prompt or continues,
    )


class _Calls:
    """The calls in the messages so far. `names` maps ids to functions, and `newest` each function to the id of its newest call."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.newest: dict[str, str] = {}
        self._values = MAX_VALUES

    def arguments(self, function: Fields) -> dict[str, Any]:
        """Returns the arguments of one more call, sent as an object or as JSON text. Raises ApiError for arguments beyond a limit.

        A text may be invalid JSON, as in a call that was cut off. Then the part that can be read is returned, so that the conversation can
        continue.
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
    """Returns the messages of a request. Tool messages get the name of the called function. Raises ApiError."""
    earlier = _Calls()
    messages = []
    total = 0
    for fields in body.objects("messages", MAX_MESSAGES):
        sent = fields.choice("role", ROLES)
        role = ROLES[sent]
        content, media = _content(fields, answer=role == "assistant")
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
            message |= _result_of(fields, earlier, by_name=sent == "function")
        messages.append(message)
    if not messages:
        raise invalid("messages is empty; send at least one message", "messages")
    return tuple(messages)


def _content(fields: Fields, *, answer: bool) -> tuple[str | list[dict[str, str]], tuple[SentMedia, ...]]:
    """Returns a message's text, or its parts if it has images or sound, and these media. An `answer` may have a refusal instead."""
    content = fields.get("content")
    if isinstance(content, str | None):
        return content or (fields.text("refusal") if answer else None) or "", ()
    if not isinstance(content, list):
        raise fields.wrong("content", f"is {str(content)[:40]}; it must be a text or a list of parts")
    texts = _ANSWER_TEXTS if answer else _TEXTS
    parts: list[dict[str, str]] = []
    media: list[SentMedia] = []
    for part in fields.parts("content", MAX_PARTS):
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        kind = part.choice("type", (*texts, *_MEDIA_TYPES, *(_THOUGHTS if answer else ())), code="unsupported_parameter")
        if kind in texts:
            parts.append({"type": "text", "text": part.text(texts[kind]) or ""})
        elif kind in _MEDIA_TYPES:
            media.append(read_part(part))
            parts.append({"type": _MEDIA_TYPES[kind]})
    return (parts, tuple(media)) if media else ("".join(part["text"] for part in parts), ())


def _assistant_fields(fields: Fields, earlier: _Calls) -> Message:
    """Returns the tool calls and thoughts of an assistant message, and adds its calls to `earlier`."""
    besides: Message = {}
    thoughts = fields.text("reasoning_content") or fields.get("reasoning")  # vLLM's name; other servers have an object there
    if thoughts and isinstance(thoughts, str):
        besides["reasoning_content"] = thoughts
    calls = []
    for number, function in _called(fields, len(earlier.names)):
        name = function.text("name") or ""
        if not name:
            raise function.wrong("name", "is missing; name the function that was called")
        earlier.names[number], earlier.newest[name] = name, number
        calls.append({"id": number, "type": "function", "function": {"name": name, "arguments": earlier.arguments(function)}})
    if calls:
        besides["tool_calls"] = calls
    return besides


def _called(fields: Fields, before: int) -> list[tuple[str, Fields]]:
    """Returns id and function of each call of an assistant message, including the deprecated `function_call`.

    That has no id, so it gets one from the number of calls `before`.
    """
    calls = []
    for call in fields.objects("tool_calls", MAX_CALLS):
        if call.text("type") == "custom":  # its input is text, not JSON
            custom = call.inner("custom")
            named = {"name": custom.text("name"), "arguments": json.dumps({"input": custom.text("input") or ""})}
            calls.append((call.text("id") or "", Fields(named, call.place("custom"))))
        else:
            calls.append((call.text("id") or "", call.inner("function")))
    if "function_call" in fields:
        calls.append((f"function_call_{before}", fields.inner("function_call")))
    return calls


def _result_of(fields: Fields, earlier: _Calls, *, by_name: bool) -> Message:
    """Returns id and function of the call that a result belongs to: found by its id, or `by_name` as the function's newest call."""
    field = "name" if by_name else "tool_call_id"
    sent = fields.text(field) or ""
    number = earlier.newest.get(sent) if by_name else sent
    if number not in earlier.names:
        what = "a function that an earlier message called" if by_name else "the id of a call in an earlier message"
        raise fields.wrong(field, f"is {sent[:60]!r}; it must be {what}")
    return {"tool_call_id": number, "name": earlier.names[number]}
