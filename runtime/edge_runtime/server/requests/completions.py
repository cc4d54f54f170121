"""Completion requests: reads the JSON fields of both endpoints, checks each, and maps it to runtime options or refuses it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.server.errors import invalid
from edge_runtime.server.requests.fields import Fields
from edge_runtime.server.requests.messages import Conversation, read_messages, read_tools
from edge_runtime.text.constraints import JsonSchema
from edge_runtime.text.grammar import INSTALL
from edge_runtime.text.stream import StopStrings

MAX_STOPS = 16
MAX_BIASES = 1024
COMPLETION_TOKENS = 16  # the API's own default for /v1/completions
_SEEDS = 1 << 64
# Sent by general-purpose clients; they have no effect here.
_IGNORED = {
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
}
_SHARED = {
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "min_p",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
}
_CHAT = (
    _IGNORED
    | _SHARED
    | {
        "audio",
        "chat_template_kwargs",
        "function_call",
        "functions",
        "max_completion_tokens",
        "messages",
        "modalities",
        "prediction",
        "reasoning_effort",
        "response_format",
        "tool_choice",
        "tools",
        "top_logprobs",
        "web_search_options",
    }
)
_COMPLETION = _IGNORED | _SHARED | {"best_of", "echo", "prompt", "suffix"}


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A valid request. `prompt` is text, token ids or a conversation; `max_tokens` None means up to the end of the context."""

    prompt: str | tuple[int, ...] | Conversation
    max_tokens: int | None
    sampling: SamplingParams
    stop: tuple[str, ...]
    stream: bool
    usage_at_end: bool
    usage_always: bool
    constraint: JsonSchema | None = None

    @property
    def repeatable(self) -> bool:
        """Whether the answer must be the same each time: with a seed, nothing may depend on other requests or on drafts."""
        return self.sampling.seed is not None


def read_chat(body: dict[str, Any]) -> CompletionRequest:
    """Reads the body of a POST to /v1/chat/completions. Raises ApiError."""
    fields = Fields(body)
    fields.only(_CHAT)
    fields.refuse("logprobs", False)
    fields.refuse("top_logprobs", 0)
    fields.refuse("modalities", ["text"], why="the model outputs text only")
    for name in ("audio", "prediction", "web_search_options"):
        fields.refuse(name)
    for name in ("functions", "function_call"):
        fields.refuse(name, [], "none", why="it is deprecated; send tools")
    limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    constraint, tools = _constraint(fields), read_tools(fields)
    if constraint is not None and tools:
        raise fields.wrong("tools", "cannot be combined with a JSON response_format; send one of the two")
    thinking = _thinking(fields) and constraint is None  # thoughts are not JSON
    conversation = Conversation(messages=read_messages(fields), tools=tools, thinking=thinking)
    return _request(fields, conversation, fields.integer(limit, 1, 1 << 31), constraint)


def read_completion(body: dict[str, Any]) -> CompletionRequest:
    """Reads the body of a POST to /v1/completions. Raises ApiError."""
    fields = Fields(body)
    fields.only(_COMPLETION)
    fields.refuse("logprobs")
    fields.refuse("best_of", 1, why="only one answer per prompt is generated")
    fields.refuse("echo", False)
    fields.refuse("suffix", "")
    return _request(fields, _prompt(fields), fields.integer("max_tokens", 1, 1 << 31, COMPLETION_TOKENS))


def _request(
    fields: Fields, prompt: str | tuple[int, ...] | Conversation, max_tokens: int | None, constraint: JsonSchema | None = None
) -> CompletionRequest:
    fields.refuse("n", 1, why="only one answer per prompt is generated")
    stream = fields.flag("stream")
    options = Fields(fields.object("stream_options") or {}, "stream_options")
    if "stream_options" in fields and not stream:
        raise fields.wrong("stream_options", "requires stream to be true; set it, or leave stream_options out")
    options.only({"include_usage", "continuous_usage_stats", "include_obfuscation"})
    return CompletionRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=_sampling(fields),
        stop=_stops(fields),
        stream=stream,
        usage_at_end=options.flag("include_usage"),
        usage_always=options.flag("continuous_usage_stats"),
        constraint=constraint,
    )


def _sampling(fields: Fields) -> SamplingParams:
    seed = fields.integer("seed", -(1 << 63), _SEEDS - 1)
    return SamplingParams(
        temperature=fields.number("temperature", 0, 2, 1),
        top_k=fields.integer("top_k", 0, 1 << 31, 0) or 0,
        top_p=fields.number("top_p", 1e-9, 1, 1),
        min_p=fields.number("min_p", 0, 1, 0),
        repetition_penalty=fields.number("repetition_penalty", 0.1, 10, 1),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0),
        logit_bias=_biases(fields),
        seed=None if seed is None else seed % _SEEDS,
    )


def _biases(fields: Fields) -> dict[int, float]:
    biases = Fields(fields.object("logit_bias") or {}, "logit_bias")
    names = list(fields.object("logit_bias") or {})
    if len(names) > MAX_BIASES:
        raise fields.wrong("logit_bias", f"has {len(names)} tokens; at most {MAX_BIASES} are allowed")
    for name in names:
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise fields.wrong("logit_bias", f"names {name[:20]!r}; its keys must be token ids")
    return {int(name): biases.number(name, -100, 100, 0) for name in names}


def _stops(fields: Fields) -> tuple[str, ...]:
    stop = fields.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(fields.items("stop", MAX_STOPS))
    if not all(isinstance(one, str) for one in stops):
        raise fields.wrong("stop", "must be a string or a list of strings")
    StopStrings(stops)  # raises RequestError for empty and overlong ones
    return stops


def _constraint(fields: Fields) -> JsonSchema | None:
    """Returns the constraint that response_format requests."""
    response_format = Fields(fields.object("response_format") or {}, "response_format")
    kind = response_format.text("type", "text")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise response_format.wrong("type", f"is {str(kind)[:40]!r}; it must be text, json_object or json_schema")
    if find_spec("llguidance") is None:
        raise fields.wrong("response_format", f"needs llguidance on the server; install it with: {INSTALL}", code="unsupported_parameter")
    if kind == "json_object":
        return JsonSchema({"type": "object"})
    named = Fields(response_format.object("json_schema") or {}, "response_format.json_schema")
    schema = named.object("schema")
    if schema is None:
        raise named.wrong("schema", "is missing; give the JSON schema of the answer")
    return JsonSchema(schema)


def _thinking(fields: Fields) -> bool:
    template = Fields(fields.object("chat_template_kwargs") or {}, "chat_template_kwargs")
    template.only({"enable_thinking"})
    effort = fields.text("reasoning_effort", "none")
    return template.flag("enable_thinking", effort not in ("none", "minimal"))


def _prompt(fields: Fields) -> str | tuple[int, ...]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise invalid("prompt must be one string or one list of token ids; send several prompts as several requests", "prompt")
