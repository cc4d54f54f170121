"""Reads requests for chat and text completions, tools included: maps each JSON field to runtime options, or refuses it.

Also reads POST /tokenize and /detokenize, with the field names of llama-server and vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from edge_devices.machine.device_package import how_to_get
from edge_runtime.bundle.manifest import MAX_DRAFT_LENGTH
from edge_runtime.decoding.acceptance import MAX_TOP_LOGPROBS
from edge_runtime.decoding.sampling import BUNDLE_NAMES, SamplingParams
from edge_runtime.drafting.sources import MAX_TOKENS, PREDICTED_CHARACTERS
from edge_runtime.server.errors import invalid
from edge_runtime.server.requests.fields import FOREIGN, SAMPLING_FIELDS, SEEDS, Fields, read_limit, read_minimum, read_sampling, read_stops
from edge_runtime.server.requests.messages import CONVERSATION_FIELDS, Conversation, read_conversation
from edge_runtime.text.constraints import ConstraintSource, Gbnf, JsonSchema, ToolCalls

MAX_TOOLS = 128
CONSTRAINT_FIELDS = frozenset({"grammar", "json_schema", "response_format"})
Tools = tuple[Mapping[str, Any], ...]


def read_tools(body: Fields) -> Tools:
    """Returns the declared functions; none if tool_choice is "none". Raises ApiError.

    Leaves out tools of other types, which a provider's own server would run, and functions that `allowed_tools` does not name.
    """
    tools = []
    for fields in body.objects("tools", MAX_TOOLS):
        if (kind := fields.text("type")) != "function":
            left_out(fields, kind)
            continue
        function = fields.inner("function")
        if not function.text("name"):
            raise function.wrong("name", "is missing; name the function")
        declared = {
            "name": function.text("name"),
            "description": function.text("description", ""),
            "parameters": function.object("parameters"),
        }
        tools.append({key: value for key, value in declared.items() if value is not None})
    if body.get("tool_choice") == "none":
        return ()
    allowed = _allowed(body)
    return tuple({"type": "function", "function": tool} for tool in tools if allowed is None or tool["name"] in allowed)


def left_out(tool: Fields, kind: str | None) -> None:
    """Remarks that a tool is left out because it is not a function. Raises ApiError for a tool without a type."""
    if not kind:
        raise tool.wrong("type", "is missing; a tool is of the type 'function'")
    tool.remarks.append(f"a tool of the type {kind[:40]!r} is left out; this server runs none, a client runs functions")


def read_constraint(fields: Fields, tools: Sequence[Mapping[str, Any]]) -> Gbnf | JsonSchema | ToolCalls | None:
    """Returns the constraint of a chat request that declares `tools`. Raises ApiError."""
    declared = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    demanded, text = _tool_calls(fields, declared), read_text_constraint(fields)
    if isinstance(text, Gbnf) and tools:
        raise fields.wrong("grammar", "cannot be combined with tools; leave one of them out")
    if isinstance(text, JsonSchema) and tools and demanded is None:
        return ToolCalls(tuple(declared.items()), several=fields.flag("parallel_tool_calls", True), answer=text)
    return demanded or text


def read_text_constraint(fields: Fields) -> Gbnf | JsonSchema | None:
    """Returns the constraint on the answer's text: by `response_format`, or by `json_schema` or `grammar` of llama-server."""
    schema = _json_schema(fields)
    if (top := fields.object("json_schema")) is not None:
        _require_library(fields, "json_schema")
        schema = schema or JsonSchema(top)
    grammar = fields.text("grammar")
    if not grammar:
        return schema
    if schema is not None:
        raise fields.wrong("grammar", "cannot be combined with a JSON schema; leave one of them out")
    _require_library(fields, "grammar")
    return Gbnf(grammar)


def _tool_calls(fields: Fields, declared: Mapping[str, Mapping[str, Any] | None]) -> ToolCalls | None:
    choice = fields.get("tool_choice")
    chosen = fields.inner("tool_choice") if isinstance(choice, dict) else Fields({})
    if chosen.text("type") == "allowed_tools":
        choice = chosen.inner("allowed_tools").choice("mode", ("auto", "required"), "auto")
    if choice in (None, "auto", "none"):
        return None
    name = chosen.inner("function").text("name") if chosen.text("type") == "function" else None
    if choice != "required" and not name:
        form = "{'type': 'function', 'function': {'name': NAME}}"
        raise fields.wrong("tool_choice", f"must be 'auto', 'none', 'required' or a function: {form}")
    if not declared:
        raise fields.wrong("tool_choice", "demands a call, but there are no tools; declare the function")
    if name is not None and name not in declared:
        raise fields.wrong("tool_choice", f"names {name[:60]!r}, which is not among the tools; declare it")
    _require_library(fields, "tool_choice")
    if name is not None:
        return ToolCalls(((name, declared[name]),))
    return ToolCalls(tuple(declared.items()), several=fields.flag("parallel_tool_calls", True))


def _allowed(body: Fields) -> set[str] | None:
    """Returns the names of the functions that a tool_choice of the type `allowed_tools` allows; None for other choices."""
    if not isinstance(body.get("tool_choice"), dict):
        return None
    choice = body.inner("tool_choice")
    if choice.text("type") != "allowed_tools":
        return None
    tools = choice.inner("allowed_tools").objects("tools", MAX_TOOLS)
    return {tool.inner("function").text("name") or tool.text("name") or "" for tool in tools}


def _json_schema(fields: Fields) -> JsonSchema | None:
    response_format = fields.inner("response_format")
    kind = response_format.choice("type", ("text", "json_object", "json_schema"), "text")
    if kind == "text":
        return None
    _require_library(fields, "response_format")
    if kind == "json_object":  # some clients send a schema with this type
        return JsonSchema(response_format.object("schema") or {"type": "object"})
    named = response_format.inner("json_schema")
    schema = named.object("schema")
    if schema is None:
        raise named.wrong("schema", "is missing; give the JSON schema of the answer")
    return JsonSchema(schema)


def _require_library(fields: Fields, name: str) -> None:
    if find_spec("llguidance") is None:
        raise fields.wrong(name, f"needs llguidance on the server; {how_to_get('grammar')}", code="unsupported_parameter")


MAX_CHOICES = 32
MAX_PROMPTS = 32
COMPLETION_TOKENS = 16  # the API's own default for /v1/completions
# The most characters of a prediction that are kept while its request waits and runs. No more are tokenized.
MAX_PREDICTED = PREDICTED_CHARACTERS * MAX_TOKENS
# Sent by general-purpose clients; they have no effect here.
IGNORED_FIELDS = frozenset(
    {"metadata", "model", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"}
)
_SHARED = (
    SAMPLING_FIELDS
    | CONSTRAINT_FIELDS
    | {
        "draft_length",
        "logprobs",
        "max_tokens",
        "n",
        "n_predict",
        "stream",
        "stream_options",
    }
)
_CHAT = (
    IGNORED_FIELDS
    | _SHARED
    | CONVERSATION_FIELDS
    | {
        "audio",
        "function_call",
        "functions",
        "max_completion_tokens",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "reasoning_effort",
        "tool_choice",
        "top_logprobs",
        "verbosity",
        "web_search_options",
    }
)
_COMPLETION = IGNORED_FIELDS | _SHARED | {"best_of", "echo", "prompt", "suffix", "verbosity"}
# Further fields of llama-server and vLLM, with the values that are accepted: here control tokens in a text stay text, and the pieces of
# tokens come from /detokenize.
_TOKENIZING: Mapping[str, Sequence[Any]] = {"parse_special": (False,), "return_token_strs": (False,), "with_pieces": (False,)}
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "draft_spans")
Prompt = str | tuple[int, ...] | Conversation


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """One answer to generate. `prompt` is text, token ids or a conversation; `max_tokens` None means up to the end of the context.

    `sampling_fields` names the values of `sampling` that the request gives; the rest come from the bundle. No end token is drawn before
    `min_tokens` tokens. `logprobs` is the number of likeliest tokens to report with each token; None reports no log probabilities.
    `draft_length` None lets the server decide. `prediction` is a text that the answer is expected to repeat. The answer ends after
    `max_calls` tool calls; with 0, calls are treated as text. With `call_pieces`, a call is delivered in pieces while it is written.
    """

    prompt: Prompt
    max_tokens: int | None
    sampling: SamplingParams
    sampling_fields: frozenset[str] = frozenset(BUNDLE_NAMES)
    stop: tuple[str, ...]
    constraint: ConstraintSource | None = None
    logprobs: int | None = None
    min_tokens: int = 0
    draft_length: int | None = None
    prediction: str = ""
    max_calls: int | None = None
    call_pieces: bool = False

    @property
    def repeatable(self) -> bool:
        """Whether the answer must be the same each time: with a seed, it may not depend on other requests or on drafts."""
        return self.sampling.seed is not None


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A valid request: `n` choices for each prompt, those of the first prompt first, and how they are sent.

    `remarks` tell the operator which parts of the request are ignored.
    """

    choices: tuple[CompletionRequest, ...]
    n: int = 1
    stream: bool = False
    usage_at_end: bool = False
    usage_always: bool = False
    draft_spans: bool = False
    remarks: tuple[str, ...] = ()


def read_chat(body: dict[str, Any]) -> ApiRequest:
    """Reads the body of a POST to /v1/chat/completions. Raises ApiError."""
    fields = Fields(body)
    fields.only(_CHAT, FOREIGN)
    fields.refuse("modalities", ["text"], why="the model outputs text only")
    for name in ("audio", "web_search_options"):
        fields.refuse(name)
    for name in ("functions", "function_call"):
        fields.refuse(name, [], "none", "auto", why="it is deprecated; send tools")
    prediction = _prediction(fields)
    tools = read_tools(fields)
    constraint = read_constraint(fields, tools)
    conversation = read_conversation(fields, tools, thinking=_thinking(fields))
    limit, logprobs = read_limit(fields, "max_completion_tokens", "n_predict", "max_tokens"), _chat_logprobs(fields)
    calls = 0 if fields.get("tool_choice") == "none" else None if fields.flag("parallel_tool_calls", True) else 1
    return _request(fields, (conversation,), limit, constraint=constraint, logprobs=logprobs, prediction=prediction, max_calls=calls)


def read_completion(body: dict[str, Any]) -> ApiRequest:
    """Reads the body of a POST to /v1/completions. Raises ApiError."""
    fields = Fields(body)
    fields.only(_COMPLETION, {**FOREIGN, "add_special_tokens": (True,)})
    fields.refuse("best_of", 1, fields.get("n"), why="it must be n")
    fields.refuse("echo", False)
    fields.refuse("suffix", "")
    limit = read_limit(fields, "n_predict", "max_tokens", default=COMPLETION_TOKENS)
    logprobs = None if fields.get("logprobs") is False else fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    return _request(fields, read_prompts(fields.get("prompt")), limit, constraint=read_text_constraint(fields), logprobs=logprobs)


def read_tokenize(body: dict[str, Any]) -> Prompt:
    """Reads a text (`content` or `prompt`), or `messages` to which the chat template is applied. Raises ApiError."""
    fields = Fields(body)
    fields.only({"add_special", "add_special_tokens", "content", "model", "prompt", *CONVERSATION_FIELDS}, _TOKENIZING)
    if "messages" in fields:
        return read_conversation(fields, read_tools(fields), thinking=_thinking(fields))
    text = fields.text("content" if "content" in fields else "prompt")
    if text is None:
        raise invalid("content is missing; send a text as content, or messages", "content")
    return text


def wants_special(body: dict[str, Any]) -> bool:
    """Whether a text's ids begin with the beginning-of-sequence token. Raises ApiError.

    llama-server adds it only on request, vLLM unless told otherwise. A conversation always has it, because the template writes it.
    """
    fields = Fields(body)
    if "messages" in fields:
        return True
    return fields.flag("add_special", fields.flag("add_special_tokens", "content" not in fields))


def read_detokenize(body: dict[str, Any], limit: int) -> list[int]:
    """Reads at most `limit` token ids. Raises ApiError."""
    fields = Fields(body)
    fields.only({"model", "tokens"})
    tokens = fields.items("tokens", limit)
    if not all(type(token) is int for token in tokens):
        raise fields.wrong("tokens", "must be a list of token ids")
    return list(tokens)


def read_prompts(prompt: object) -> tuple[Prompt, ...]:
    """Returns the prompts of a completion: a string, token ids, or a list of either. Raises ApiError."""
    single = _prompt(prompt)
    if single is not None:
        return (single,)
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
    max_calls: int | None = None,
) -> ApiRequest:
    n = fields.integer("n", 1, MAX_CHOICES, 1) or 1
    if n * len(prompts) > MAX_CHOICES:
        raise fields.wrong("n", f"is {n}, with {len(prompts)} prompts {n * len(prompts)} answers; at most {MAX_CHOICES} are allowed")
    stream = fields.flag("stream")
    options = fields.inner("stream_options")
    options.only({*_STREAM_OPTIONS, "include_obfuscation"})
    if not stream and any(options.flag(name) for name in _STREAM_OPTIONS):
        raise fields.wrong("stream_options", "requires stream to be true; set it, or leave stream_options out")
    draft_length = fields.integer("draft_length", 0, MAX_DRAFT_LENGTH)
    sampling, named = read_sampling(fields)
    stop, minimum = read_stops(fields), read_minimum(fields, max_tokens)
    return ApiRequest(
        choices=tuple(
            CompletionRequest(
                prompt=prompt,
                max_tokens=max_tokens,
                # With the same seed, all choices would be equal.
                sampling=replace(sampling, seed=None if sampling.seed is None else (sampling.seed + number) % SEEDS),
                sampling_fields=named,
                stop=stop,
                constraint=constraint,
                logprobs=logprobs,
                min_tokens=minimum,
                draft_length=draft_length,
                prediction=prediction,
                max_calls=max_calls,
                call_pieces=stream,
            )
            for prompt in prompts
            for number in range(n)
        ),
        n=n,
        stream=stream,
        usage_at_end=options.flag("include_usage"),
        usage_always=options.flag("continuous_usage_stats"),
        draft_spans=options.flag("draft_spans"),
        remarks=tuple(fields.remarks),
    )


def _chat_logprobs(fields: Fields) -> int | None:
    enabled = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS, 0) or 0
    if top and not enabled:
        raise fields.wrong("top_logprobs", "requires logprobs to be true; set it, or leave top_logprobs out")
    return top if enabled else None


def _prediction(fields: Fields) -> str:
    """Returns the used part of the text that the answer is expected to repeat. Drafts are copied from it, so it changes only the speed."""
    prediction = fields.inner("prediction")
    if "prediction" in fields and prediction.text("type") != "content":
        raise prediction.wrong("type", "must be 'content'")
    content = prediction.get("content")
    if content is None or isinstance(content, str):
        return (content or "")[:MAX_PREDICTED]
    return "".join(part.text("text") or "" for part in prediction.objects("content", MAX_PROMPTS))[:MAX_PREDICTED]


def _thinking(fields: Fields) -> bool:
    template = fields.inner("chat_template_kwargs")
    template.only({"enable_thinking"})
    effort = fields.text("reasoning_effort", "none")
    return template.flag("enable_thinking", effort not in ("none", "minimal"))


def _prompt(value: object) -> str | tuple[int, ...] | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    return None
