"""Ollama's POST /api/chat and /api/generate.

Their fields are mapped to those of /v1/chat/completions and then read by the same code. The answers are lines of JSON.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from edge_runtime.server.apis.response_format import ChatLogprobs, ChoiceAnswer, Logprobs, ResponseFormat, encoded, figures
from edge_runtime.server.engine.jobs import Finished, Output
from edge_runtime.server.errors import ApiError, invalid
from edge_runtime.server.json_text import Json
from edge_runtime.server.requests.completions import ApiRequest, read_chat, read_completion
from edge_runtime.server.requests.fields import FOREIGN, NO_END, OLLAMA_LOADING, SAMPLING_FIELDS, Fields
from edge_runtime.server.requests.messages import MAX_CALLS, MAX_MEDIA, MAX_MESSAGES
from edge_runtime.session.monitor import DecodeStats
from edge_runtime.text.channels import Event, Text, Thought
from edge_runtime.text.tool_calls import ToolCall

_COMMON = {"format", "logprobs", "model", "options", "stream", "think", "top_logprobs"}
_OPTIONS = SAMPLING_FIELDS - {"ignore_eos", "logit_bias", "min_tokens", "repetition_penalty"}
_CHAT = _COMMON | {"messages", "tools"}
_GENERATE = _COMMON | {"context", "images", "prompt", "raw", "suffix", "system", "template"}


def read_ollama_chat(body: Json) -> ApiRequest | None:
    """Reads the body of a POST to /api/chat. Returns None without messages: Ollama then only loads the model. Raises ApiError."""
    fields = Fields(body)
    fields.only(_CHAT, FOREIGN)
    if not body.get("messages"):
        return None
    chat = _common(fields) | {"tools": fields.get("tools"), "messages": _messages(fields)}
    return _streamed(read_chat(chat), fields)


def read_ollama_generate(body: Json) -> ApiRequest | None:
    """Reads the body of a POST to /api/generate. Returns None without a prompt. Raises ApiError."""
    fields = Fields(body)
    fields.only(_GENERATE, FOREIGN)
    if not body.get("prompt"):
        return None
    fields.refuse("context", [], why="it is deprecated; use /api/chat")
    fields.refuse("suffix", "")
    fields.refuse("template", "", why="the bundle's chat template is used")
    prompt, common = fields.text("prompt", "") or "", _common(fields)
    if fields.flag("raw"):
        fields.refuse("images", [], why="a raw prompt is text; leave raw out")
        for name in ("format", "logprobs", "system", "think", "top_logprobs"):
            fields.refuse(name, "", False, 0, why="raw prompts have none; leave it out, or raw")
        return _streamed(read_completion(common | {"prompt": prompt, "max_tokens": common.get("max_tokens", -1)}), fields)
    system = fields.text("system")
    before = [{"role": "system", "content": system}] if system else []
    return _streamed(read_chat(common | {"messages": [*before, {"role": "user", "content": _content(fields, "prompt")}]}), fields)


def _common(fields: Fields) -> Json:
    options = fields.inner("options")
    options.only(_OPTIONS | {"num_predict"}, FOREIGN | OLLAMA_LOADING)
    chat = {name: options.get(name) for name in _OPTIONS if name in options}
    limit = options.integer("num_predict", -2, NO_END)
    if limit is not None and limit > 0:
        chat["max_tokens"] = limit
    thinking = fields.get("think")
    if thinking not in (None, True, False, "", "low", "medium", "high", "max"):
        raise fields.wrong("think", "must be true, false, 'low', 'medium', 'high' or 'max'")
    if thinking:
        chat["chat_template_kwargs"] = {"enable_thinking": True}
    form = fields.get("format")
    if form == "json":
        chat["response_format"] = {"type": "json_object"}
    elif isinstance(form, dict):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form}}
    elif form not in (None, ""):
        raise fields.wrong("format", "must be 'json' or a JSON schema")
    if fields.flag("logprobs"):
        chat |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs")}
    return chat


def _messages(fields: Fields) -> list[Json]:
    """Returns the messages. Calls get ids, and each result gets the id of the call that it answers, found by its name or by the order."""
    messages: list[Json] = []
    unanswered = _Unanswered()
    for i, message in enumerate(fields.objects("messages", MAX_MESSAGES)):
        role = message.text("role") or ""
        converted: Json = {"role": role, "content": _content(message, "content")}
        if role == "assistant":
            converted["reasoning_content"] = message.text("thinking")
            if calls := [_call(call) for call in message.objects("tool_calls", MAX_CALLS)]:
                converted["tool_calls"] = [{"id": f"call_{i}_{number}"} | call for number, call in enumerate(calls)]
                for call in converted["tool_calls"]:
                    unanswered.add(call["function"]["name"], call["id"])
        elif role == "tool":
            name = message.text("tool_name") or message.text("name")
            converted["tool_call_id"] = unanswered.take(name, message.text("tool_call_id"))
            if converted["tool_call_id"] is None:
                raise invalid(f"messages[{i}] is the result of no call; send the assistant's message with the call before it", "messages")
        messages.append(converted)
    return messages


class _Unanswered:
    """The calls without a result so far, indexed by id and by name, so that each is found quickly however many there are."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()
        self._ids: dict[str, deque[str]] = {}

    def add(self, name: str, number: str) -> None:
        """Adds a call with its id."""
        self._names[number] = name
        self._ids.setdefault(name, deque()).append(number)

    def take(self, name: str | None, number: str | None) -> str | None:
        """Removes a call and returns its id; None if there is none.

        It is the call with the id `number`. If there is none, it is the first one with that name, or the first of all if `name` is None.
        """
        if number is not None and number in self._names:
            name = self._names.pop(number)
            self._ids[name].remove(number)
            return number
        if name is None and self._names:
            name = next(iter(self._names.values()))
        if name is None or not self._ids.get(name):
            return None
        number = self._ids[name].popleft()
        self._names.pop(number, None)  # a client's own ids may occur twice
        return number


def _content(fields: Fields, name: str) -> str | list[Json]:
    """Returns a text. With `images`, which are base64 of any format, returns the parts of a chat request."""
    text = fields.text(name, "") or ""
    images = fields.items("images", MAX_MEDIA)
    if not images:
        return text
    urls = [image if isinstance(image, str) and image.startswith("data:") else f"data:image/png;base64,{image}" for image in images]
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]


def _call(call: Fields) -> Json:
    function = call.inner("function")
    number = {"id": name} if (name := call.text("id")) else {}
    return {**number, "type": "function", "function": {"name": function.text("name"), "arguments": function.get("arguments")}}


def _streamed(request: ApiRequest, fields: Fields) -> ApiRequest:
    return replace(request, stream=fields.flag("stream", True), remarks=(*fields.remarks, *request.remarks))


_NANOSECONDS = 1_000_000_000


class OllamaFormat(ResponseFormat):
    """One response: of /api/chat, or of /api/generate unless `chat`."""

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
        """Returns the complete response. Without answers it is the one to a request that only loads the model."""
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
    """Returns an event's text in the answer. A call that was cut off is sent as text, since Ollama's arguments are a whole object."""
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
