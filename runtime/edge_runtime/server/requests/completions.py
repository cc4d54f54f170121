"""Completion requests: reads the JSON fields of both endpoints, checks each, and maps it to runtime options or refuses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.decoding.default_sampling import BUNDLE_NAMES
from edge_runtime.decoding.logprobs import MAX_TOP_LOGPROBS
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.server.errors import invalid
from edge_runtime.server.requests.constraints import read_constraint
from edge_runtime.server.requests.fields import Fields, fields_of
from edge_runtime.server.requests.messages import Conversation, read_messages, read_tools
from edge_runtime.server.requests.sampling import SAMPLING_FIELDS, next_seed, read_sampling, read_stops
from edge_runtime.text.constraints import ConstraintSource

MAX_CHOICES = 32
MAX_PROMPTS = 32
COMPLETION_TOKENS = 16  # the API's own default for /v1/completions
# Sent by general-purpose clients; they have no effect here.
_IGNORED = {
    "metadata",
    "model",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
}
_SHARED = SAMPLING_FIELDS | {"draft_length", "logprobs", "max_tokens", "n", "stream", "stream_options"}
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
        "parallel_tool_calls",
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
Prompt = str | tuple[int, ...] | Conversation


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """One answer to generate. `prompt` is text, token ids or a conversation; `max_tokens` None means up to the end of the context.

    Of the sampling, the request names what is `given`; the bundle's own values count for the rest.
    `logprobs` is the number of likeliest tokens to report with each token; None reports no log probabilities. `draft_length` None lets
    the server decide. `prediction` is a text that the answer is expected to repeat.
    """

    prompt: Prompt
    max_tokens: int | None
    sampling: SamplingParams
    given: frozenset[str] = frozenset(BUNDLE_NAMES)
    stop: tuple[str, ...]
    constraint: ConstraintSource | None = None
    logprobs: int | None = None
    draft_length: int | None = None
    prediction: str = ""

    @property
    def repeatable(self) -> bool:
        """Whether the answer must be the same each time: with a seed, nothing may depend on other requests or on drafts."""
        return self.sampling.seed is not None


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A valid request: `n` choices for each prompt, those of the first prompt first, and how they are sent."""

    choices: tuple[CompletionRequest, ...]
    n: int = 1
    stream: bool = False
    usage_at_end: bool = False
    usage_always: bool = False
    draft_spans: bool = False


def read_chat(body: dict[str, Any]) -> ApiRequest:
    """Reads the body of a POST to /v1/chat/completions. Raises ApiError."""
    fields = Fields(body)
    fields.only(_CHAT)
    fields.refuse("modalities", ["text"], why="the model outputs text only")
    for name in ("audio", "web_search_options"):
        fields.refuse(name)
    for name in ("functions", "function_call"):
        fields.refuse(name, [], "none", why="it is deprecated; send tools")
    prediction = _prediction(fields)
    limit = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    tools = read_tools(fields)
    constraint = read_constraint(fields, tools)
    thinking = _thinking(fields) and constraint is None  # a constrained answer has no place for thoughts
    conversation = Conversation(messages=read_messages(fields), tools=tools, thinking=thinking)
    tokens, logprobs = fields.integer(limit, 1, 1 << 31), _chat_logprobs(fields)
    return _request(fields, (conversation,), tokens, constraint=constraint, logprobs=logprobs, prediction=prediction)


def read_completion(body: dict[str, Any]) -> ApiRequest:
    """Reads the body of a POST to /v1/completions. Raises ApiError."""
    fields = Fields(body)
    fields.only(_COMPLETION)
    fields.refuse("best_of", 1, fields.get("n"), why="it must be n")
    fields.refuse("echo", False)
    fields.refuse("suffix", "")
    limit = fields.integer("max_tokens", 1, 1 << 31, COMPLETION_TOKENS)
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    return _request(fields, read_prompts(fields.get("prompt")), limit, logprobs=logprobs)


def read_prompts(prompt: object) -> tuple[Prompt, ...]:
    """Returns the prompts of a completion: a string, token ids, or a list of either. Raises ApiError."""
    one = _prompt(prompt)
    if one is not None:
        return (one,)
    several = [_prompt(item) for item in prompt] if isinstance(prompt, list) else []
    if not several or None in several:
        raise invalid("prompt must be a string, a list of token ids, or a list of these", "prompt")
    if len(several) > MAX_PROMPTS:
        raise invalid(f"prompt has {len(several)} prompts; at most {MAX_PROMPTS} are allowed", "prompt")
    return tuple(item for item in several if item is not None)


def _request(
    fields: Fields,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    *,
    constraint: ConstraintSource | None = None,
    logprobs: int | None = None,
    prediction: str = "",
) -> ApiRequest:
    n = fields.integer("n", 1, MAX_CHOICES, 1) or 1
    if n * len(prompts) > MAX_CHOICES:
        raise fields.wrong("n", f"is {n}, with {len(prompts)} prompts {n * len(prompts)} answers; at most {MAX_CHOICES} are allowed")
    stream = fields.flag("stream")
    options = Fields(fields.object("stream_options") or {}, "stream_options")
    if "stream_options" in fields and not stream:
        raise fields.wrong("stream_options", "requires stream to be true; set it, or leave stream_options out")
    options.only({"include_usage", "continuous_usage_stats", "draft_spans", "include_obfuscation"})
    draft_length = fields.integer("draft_length", 0, MAX_DRAFT_LENGTH)
    sampling, stop = read_sampling(fields), read_stops(fields)
    given = frozenset(name for name in BUNDLE_NAMES if fields.get(name) is not None)
    return ApiRequest(
        choices=tuple(
            CompletionRequest(
                prompt=prompt,
                max_tokens=max_tokens,
                sampling=replace(sampling, seed=next_seed(sampling.seed, number)),
                given=given,
                stop=stop,
                constraint=constraint,
                logprobs=logprobs,
                draft_length=draft_length,
                prediction=prediction,
            )
            for prompt in prompts
            for number in range(n)
        ),
        n=n,
        stream=stream,
        usage_at_end=options.flag("include_usage"),
        usage_always=options.flag("continuous_usage_stats"),
        draft_spans=options.flag("draft_spans"),
    )


def _chat_logprobs(fields: Fields) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS, 0) or 0
    if top and not wanted:
        raise fields.wrong("top_logprobs", "requires logprobs to be true; set it, or leave top_logprobs out")
    return top if wanted else None


def _prediction(fields: Fields) -> str:
    """Returns the text that the answer is expected to repeat: drafts are copied from it, so it changes the speed alone."""
    prediction = Fields(fields.object("prediction") or {}, "prediction")
    if "prediction" in fields and prediction.text("type") != "content":
        raise prediction.wrong("type", "must be 'content'")
    content = prediction.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = prediction.items("content", MAX_PROMPTS)
    return "".join(fields_of(part, f"prediction.content[{i}]").text("text") or "" for i, part in enumerate(parts))


def _thinking(fields: Fields) -> bool:
    template = Fields(fields.object("chat_template_kwargs") or {}, "chat_template_kwargs")
    template.only({"enable_thinking"})
    effort = fields.text("reasoning_effort", "none")
    return template.flag("enable_thinking", effort not in ("none", "minimal"))


def _prompt(value: object) -> str | tuple[int, ...] | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    return None
