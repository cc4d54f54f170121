"""A conversation with a session: its history, answers as events, what to do when the context overflows, and saving it to a file."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self, TypedDict, Unpack, get_args

from edge_devices.errors import errors_as
from edge_devices.files.atomic_write import atomic_write
from edge_devices.files.limited_read import read_at_most
from edge_devices.files.typed_json import StructureError, from_json, to_json
from edge_runtime.decoding.loop import Round
from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.drafting.policies import DraftLengthPolicy
from edge_runtime.errors import RequestError
from edge_runtime.media.soft_rows import MEDIA, Media, MediaPrompt, user_message, without_media
from edge_runtime.session.generation import GREEDY_PARAMS, Generation, sampled
from edge_runtime.session.load_options import OPENING, LoadOptions, with_keywords
from edge_runtime.session.monitor import DecodeStats, generation_html, shortened
from edge_runtime.session.open import open_session
from edge_runtime.session.session import Session
from edge_runtime.text.channels import ChannelParser, Event, Text, Thought, after_thoughts
from edge_runtime.text.chat_template import ChatTemplate, Message, bundle_template
from edge_runtime.text.constraints import ConstraintSource
from edge_runtime.text.tool_calls import ToolCall

Overflow = Literal["drop_oldest", "stop"]
Finish = Literal["stop", "length", "context", "interrupted"]
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)
MAX_TOKENS = 1024
# A saved conversation: one JSON file with messages and settings, untrusted when read.
FILE_FORMAT = "edge-mtp chat"
FILE_VERSION = 1
MAX_FILE_BYTES = 64 << 20
ROLES = ("user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The settings of every turn. Raises RequestError for an unknown overflow policy.

    `overflow` applies when the conversation and an answer no longer fit into the context: "drop_oldest" drops the oldest turns, "stop"
    raises an error. `tools` has function declarations with JSON schemas, as in the OpenAI API.
    """

    system: str | None = None
    thinking: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int = MAX_TOKENS
    stop: tuple[str, ...] = ()
    overflow: str = OVERFLOWS[0]
    sampling: SamplingParams = field(default_factory=lambda: GREEDY_PARAMS)

    def __post_init__(self) -> None:
        if self.system is not None and not isinstance(self.system, str):
            raise RequestError(f"the system message is of type {type(self.system).__name__}; give a str or None")
        if self.overflow not in OVERFLOWS:
            raise RequestError(f"overflow is {self.overflow!r}; choose one of {', '.join(OVERFLOWS)}")


def save_chat(path: Path, settings: ChatSettings, messages: Sequence[dict[str, Any]]) -> None:
    """Writes the file atomically. Raises RequestError, and leaves an existing file unchanged, if that fails."""
    data = to_json(settings)
    # JSON has neither integer keys nor infinity.
    data["sampling"]["logit_bias"] = {str(k): "-inf" if v == -math.inf else v for k, v in settings.sampling.logit_bias.items()}
    record = {"format": FILE_FORMAT, "version": FILE_VERSION, "settings": data, "messages": list(messages)}
    with errors_as(RequestError, f"the conversation cannot be saved to {path}", "choose another file", OSError, ValueError):
        atomic_write(path, [json.dumps(record, ensure_ascii=False, indent=1, allow_nan=False).encode(), b"\n"])


def load_chat(path: Path) -> tuple[ChatSettings, list[dict[str, Any]]]:
    """Reads settings and messages. Raises RequestError for a file that `save_chat` did not write, and names the first wrong field."""
    causes = OSError, ValueError, RecursionError, StructureError
    with errors_as(RequestError, f"{path} cannot be read as a conversation", "choose a file that /save wrote", *causes):
        record = json.loads(read_at_most(path, MAX_FILE_BYTES).decode())
        if not isinstance(record, dict) or record.get("format") != FILE_FORMAT:
            raise StructureError("it is not a saved conversation")
        if record.get("version") != FILE_VERSION:
            raise RequestError(f"{path} has version {record.get('version')!r}, this reader supports {FILE_VERSION}; upgrade edge-mtp")
        messages = record.get("messages")
        if not isinstance(messages, list):
            raise StructureError("messages is not a list")
        return _settings(record.get("settings")), [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def _settings(data: Any) -> ChatSettings:
    sampling = data.get("sampling") if isinstance(data, dict) else None
    if not isinstance(sampling, dict):
        raise StructureError("settings.sampling is missing")
    bias = sampling.get("logit_bias", {})
    plain = {key: value for key, value in sampling.items() if key != "logit_bias"}
    settings = from_json(ChatSettings, data | {"sampling": plain}, "settings")
    try:
        biases = {int(key): float(value) for key, value in bias.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise StructureError(f"settings.sampling.logit_bias is {str(bias)[:40]!r}, not ids with numbers") from error
    return replace(settings, sampling=replace(settings.sampling, logit_bias=biases))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise StructureError(f"{where} has none of the roles {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str):
        raise StructureError(f"{where}.content is not text")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise StructureError(f"{where}.tool_calls is not a list")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(call.get("id"), str):
            raise StructureError(f"{where}.tool_calls[{i}] is not a function call")
    return message


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """The history that an answer continues, with its token ids. `dropped` turns were removed to make it fit."""

    messages: list[Message]
    content: list[int] | MediaPrompt
    dropped: int

    @property
    def ids(self) -> list[int]:
        """The token ids; soft rows have negative ids."""
        return self.content.ids if isinstance(self.content, MediaPrompt) else self.content


class RequestKeywords(TypedDict, total=False):
    """Keywords of `Session.generate` that hold for every answer of a chat. A test compares them with that signature."""

    draft_length: int | None
    policy: DraftLengthPolicy | None
    acceptance: str
    chunk_size: int | None
    on_round: Callable[[Round], None] | None
    reuse_prefix: bool
    constraint: ConstraintSource | None


# With `reuse_prefix`, a chat finds its earlier turns in the cache.
_DEFAULTS = SimpleNamespace(
    **{name: each.default for name, each in inspect.signature(Session.generate).parameters.items()} | {"reuse_prefix": True}
)


class Answer:
    """One answer. Iterating yields each event as soon as it is final. The history changes when the answer begins and when it ends.

    `finish` is why it ended: an end token or a stop string ("stop"), `max_tokens` ("length"), the end of the context ("context"), or an
    interruption ("interrupted"), which keeps the text so far. An answer that was interrupted before its first text leaves the history
    unchanged. If the chat was changed or continued before an answer ended, iterating the answer further raises RequestError. `async for`
    works too, and computes in another thread. May be used from any thread.
    """

    def __init__(self, chat: Chat, prompt: _Prompt, generation: Generation) -> None:
        self.text = ""
        self.thoughts = ""
        self.tool_calls: list[ToolCall] = []
        self.drafted = False  # whether the newest event's token was an accepted draft
        self.finish: Finish | None = None
        self.dropped_turns = prompt.dropped
        self.prompt_ids = prompt.ids
        self.prompt_messages = prompt.messages
        self._chat = chat
        self._prompt = prompt
        self._generation = generation
        self._stop_requested = False
        self._executing = self._replaced = False
        self._lock = chat.session.claim.lock
        self._events = self._run()

    @property
    def stats(self) -> DecodeStats:
        """Figures of this answer."""
        return self._generation.stats

    @property
    def tokens(self) -> list[int]:
        """The ids of all generated tokens, including thoughts, calls and control tokens."""
        return self._generation.tokens

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        with self._lock.held():
            self._require_idle()
            if self._replaced:
                raise RequestError("the chat went on before this answer ended, so it cannot continue; let each answer end")
            self._executing = True
            try:
                return next(self._events)
            finally:
                self._executing = False

    async def __aiter__(self) -> AsyncIterator[Event]:
        import asyncio  # imports ssl and logging, which most programs do not need

        while (event := await asyncio.to_thread(next, self, None)) is not None:
            yield event

    def read(self) -> str:
        """Runs the answer to its end and returns its text, without thoughts and calls."""
        with self._lock.held():
            for _ in self:
                pass
            return self.text

    def stop(self) -> None:
        """Ends the answer after the current round. May be called from a signal handler or another thread."""
        self._stop_requested = True

    def close(self) -> None:
        """Ends the answer now if it is running."""
        with self._lock.held():
            self._require_idle()
            self._events.close()

    def replace(self) -> None:
        """As `close`, but iterating further raises RequestError, because the chat continues without the rest of this answer."""
        with self._lock.held():
            running = inspect.getgeneratorstate(self._events) != inspect.GEN_CLOSED
            self.close()
            self._replaced = running and not self._stop_requested

    def _require_idle(self) -> None:
        if self._executing:
            raise RequestError("a callback of an answer cannot continue or end it; call stop()")

    def __repr__(self) -> str:
        return f"<Answer {self.finish or 'not ended'}: {self.stats.tokens} tokens, {shortened(self.text)}>"

    def _repr_html_(self) -> str:
        return generation_html(self.text, self.stats)

    def _run(self) -> Generator[Event]:
        before, self._chat.messages = self._chat.messages, self._prompt.messages
        settings = self._chat.settings
        stop = (*settings.stop, *self._chat.template.stop)
        parser = ChannelParser(self._chat.session.vocabulary, stop, prompt=self._prompt.ids)
        finish: Finish = "interrupted"
        try:
            for round_done in self._generation.rounds():
                for number, token in enumerate(round_done.tokens):
                    self.drafted = number < round_done.accepted
                    yield from self._record(parser.feed(token))
                if parser.stopped_by is not None or self._stop_requested:
                    break
            finish = self._reason(parser)
            self.drafted = False
            yield from self._record(parser.finish(ended=finish == "stop"))
        finally:
            self.finish = finish
            self._chat.messages = self._history(before)
            if self.stats.rounds:
                self._chat.session.monitor.record_request(self._generation.monitor, self.stats, finish_reason=finish)

    def _record(self, events: list[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Text):
                self.text += event.text
            elif isinstance(event, Thought):
                self.thoughts += event.text
            elif isinstance(event, ToolCall):
                self.tool_calls.append(event)
            yield event

    def _reason(self, parser: ChannelParser) -> Finish:
        if self._generation.finish_reason == "stop" or parser.stopped_by is not None:
            return "stop"
        if self._stop_requested:
            return "interrupted"
        return "length" if len(self.tokens) >= self._chat.settings.max_tokens else "context"

    def _history(self, before: list[Message]) -> list[Message]:
        calls = [call for call in self.tool_calls if call.arguments is not None]
        if self.finish == "interrupted" and not (self.text or calls):
            return before
        message: Message = {"role": "assistant", "content": self.text}
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{i}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for i, call in enumerate(calls)
            ]
            # Gemma 4 needs its thoughts while its calls are being answered, but not in later turns.
            if self.thoughts:
                message["reasoning_content"] = self.thoughts
        if self.finish == "interrupted":
            message["interrupted"] = True
        return [*self._prompt.messages, message]


class Chat:
    """A conversation. `messages` is the history without the system message; its roles are user, assistant and tool.

    The prompt of each answer is the whole conversation, but the rows that the cache still has are not computed again. `overflow` None takes
    the configured policy. `request` has further keywords of `Session.generate` for every answer (`RequestKeywords`). May be used from any
    thread. Every call that changes the conversation ends a running answer.
    """

    @with_keywords(
        RequestKeywords, _DEFAULTS, elsewhere={"sampling=SamplingParams({}=...)": SamplingParams.__dataclass_fields__, **OPENING}
    )
    def __init__(
        self,
        session: Session,
        *,
        system: str | None = None,
        thinking: bool = False,
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        overflow: Overflow | None = None,
        sampling: SamplingParams = GREEDY_PARAMS,
        template: ChatTemplate | None = None,
        **request: Unpack[RequestKeywords],
    ) -> None:
        session.claim.require_open()
        self.session = session
        self.template = template or bundle_template(session.bundle, session.vocabulary)
        self.settings = ChatSettings(
            system=system,
            thinking=thinking,
            tools=tuple(tools),
            max_tokens=max_tokens,
            stop=tuple(stop),
            overflow=overflow or session.settings.overflow,
            sampling=sampling,
        )
        self.messages: list[Message] = []
        self._request = request
        self._answer: Answer | None = None

    def say(self, text: str, media: Sequence[Media] = ()) -> Answer:
        """Returns the answer to a user's message. Nothing runs before it is iterated. `chat.say("...").read()` is its text.

        `media` has images and sounds that come before the text, as `edge_runtime.media.reading` reads them.

        Raises RequestError, and leaves the conversation unchanged, if the message is not a str, does not fit, or the template refuses it.
        """
        if not isinstance(text, str):
            raise RequestError(f"the message is of type {type(text).__name__}; give a str")
        with self._changing():
            return self._answer_to([*map(_without_thoughts, self.messages), user_message(text, media)])

    def answer_tools(self, results: Sequence[str]) -> Answer:
        """Takes the results of the last answer's tool calls, in their order, and returns the model's answer to them."""
        if isinstance(results, str) or not all(isinstance(result, str) for result in results):
            raise RequestError("the results are not a list of texts; give one str for each tool call")
        with self._changing():
            calls = self.messages[-1].get("tool_calls", []) if self.messages else []
            if not calls or len(calls) != len(results):
                raise RequestError(f"the last answer made {len(calls)} tool calls, but there are {len(results)} results; give one for each")
            answered = [
                {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": result}
                for call, result in zip(calls, results, strict=True)
            ]
            return self._answer_to([*self.messages, *answered])

    def regenerate(self) -> Answer:
        """Answers the user's last message again; this replaces the existing answer. Raises RequestError if there is no message."""
        with self._changing():
            users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
            if not users:
                raise RequestError("there is no message to answer again; send one first")
            return self._answer_to([*map(_without_thoughts, self.messages[: users[-1] + 1])])

    def change(self, **settings: Any) -> None:
        """Changes settings (fields of `ChatSettings`) for the next answers. Raises RequestError for invalid ones, and changes nothing."""
        with self._changing():
            unknown = next((name for name in settings if name not in ChatSettings.__dataclass_fields__), None)
            if unknown is not None:
                raise RequestError(f"{unknown!r} is no setting of a chat; change one of {', '.join(ChatSettings.__dataclass_fields__)}")
            self.settings = replace(self.settings, **settings)

    def reset(self) -> None:
        """Clears the conversation; the settings stay."""
        with self._changing():
            self.messages = []

    def save(self, path: Path | str) -> None:
        """Writes messages and settings as JSON, atomically. Raises RequestError if this fails, or for a conversation with media."""
        with self._changing():
            if any(MEDIA in message for message in self.messages):
                raise RequestError("a conversation with images or sound cannot be saved; start a new one without")
            save_chat(Path(path), self.settings, self.messages)

    def load(self, path: Path | str) -> None:
        """Reads messages and settings from a file that `save` wrote. Raises RequestError, and changes nothing, for any other file."""
        with self._changing():
            self.settings, self.messages = load_chat(Path(path))

    def __repr__(self) -> str:
        return f"<Chat: {len(self.messages)} messages, {self.session!r}>"

    def _answer_to(self, messages: list[Message]) -> Answer:
        prompt = self._fitted(messages)
        settings = self.settings
        request: RequestKeywords = {"reuse_prefix": True, **self._request}
        constraint, vocabulary = request.get("constraint"), self.session.vocabulary
        request["constraint"] = after_thoughts(constraint, vocabulary, prompt.ids, thinking=settings.thinking)
        generation = self.session.generate(prompt.content, max_tokens=settings.max_tokens, sampling=settings.sampling, **request)
        self._answer = Answer(self, prompt, generation)
        return self._answer

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Waits for other threads, and ends a running answer."""
        with self.session.claim.lock.held():
            if self._answer is not None:
                self._answer.replace()
                self._answer = None
            yield

    def _fitted(self, messages: list[Message]) -> _Prompt:
        """Returns the prompt with all turns, or with the newest turns that leave room for an answer."""
        context = self.session.target.context
        reserve = min(self.settings.max_tokens, context // 4)
        whole = _Prompt(messages=messages, content=self._encode(messages), dropped=0)
        if len(whole.ids) + reserve <= context:
            return whole
        if self.settings.overflow == "stop":
            raise RequestError(
                f"the conversation has {len(whole.ids)} tokens of the context's {context}, too many to answer; start a new one,"
                " open the bundle with a larger context (--context), or use overflow drop_oldest"
            )
        # Dropping turns costs a complete prefill, so enough are dropped to make room for more than this answer.
        starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
        for dropped, start in enumerate(starts[1:], start=1):
            kept = messages[start:]
            prompt = _Prompt(messages=kept, content=self._encode(kept), dropped=dropped)
            if len(prompt.ids) + reserve <= context * 3 // 4 or (start == starts[-1] and len(prompt.ids) < context):
                return prompt
            whole = prompt
        if len(whole.ids) < context:
            return whole
        raise RequestError(
            f"this message alone has {len(whole.ids)} tokens, but the context holds {context}; shorten it,"
            " or open the bundle with a larger context (--context)"
        )

    def _encode(self, messages: Sequence[Message]) -> list[int] | MediaPrompt:
        system = [] if self.settings.system is None else [{"role": "system", "content": self.settings.system}]
        kept, media = without_media(messages)
        sent = [{key: value for key, value in message.items() if key != "interrupted"} for message in kept]
        ids = self.template.encode([*system, *sent], tools=self.settings.tools, thinking=self.settings.thinking)
        return self.session.media_prompt(ids, media) if media else ids


def _without_thoughts(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


# Keywords of other calls that users of the functions below may try.
_OTHER_CALLS = {
    "options=LoadOptions({}=...)": LoadOptions.__dataclass_fields__,
    "Session.generate({}=...)": inspect.signature(Session.generate).parameters,
}


@with_keywords(SamplingParams, GREEDY_PARAMS, elsewhere=_OTHER_CALLS)
def generate(
    bundle: Path | str,
    prompt: str,
    *,
    max_tokens: int = 128,
    sampling: SamplingParams = GREEDY_PARAMS,
    options: LoadOptions | None = None,
    **keywords: Any,
) -> str:
    """Returns the text that continues `prompt`, without a chat template. Takes the `options` of `open_session` and raises its errors.

    Sampling may also be given as keywords, such as `temperature=0.7`.
    Opening takes most of the time of a short request, so keep a session open for several requests.
    """
    with open_session(bundle, options) as session:
        return session.generate(prompt, max_tokens=max_tokens, sampling=sampled(sampling, keywords)).text()


@with_keywords(SamplingParams, GREEDY_PARAMS, elsewhere=_OTHER_CALLS)
def chat(
    bundle: Path | str,
    message: str,
    *,
    system: str | None = None,
    max_tokens: int = MAX_TOKENS,
    sampling: SamplingParams = GREEDY_PARAMS,
    options: LoadOptions | None = None,
    **keywords: Any,
) -> str:
    """Returns the model's answer to one message. Uses the bundle's chat template; otherwise as `generate`."""
    with open_session(bundle, options) as session:
        return Chat(session, system=system, max_tokens=max_tokens, sampling=sampled(sampling, keywords)).say(message).read()
