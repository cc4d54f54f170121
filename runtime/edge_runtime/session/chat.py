"""A conversation with a session: history, answers as events, and the overflow of the context."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from edge_runtime.decoding.sampling import SamplingParams
from edge_runtime.errors import RequestError
from edge_runtime.session import chat_file
from edge_runtime.session.generation import GREEDY_PARAMS, Generation
from edge_runtime.session.session import Session
from edge_runtime.session.stats import DecodeStats
from edge_runtime.text.channels import ChannelParser, Event, Text, Thought
from edge_runtime.text.chat_template import ChatTemplate, Message, bundle_template
from edge_runtime.text.tool_calls import ToolCall

Overflow = Literal["drop_oldest", "stop"]
Finish = Literal["stop", "length", "context", "interrupted"]
OVERFLOWS: tuple[Overflow, ...] = get_args(Overflow)
MAX_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """The settings of every turn. Raises RequestError for an unknown overflow policy.

    `overflow` applies when the conversation and an answer no longer fit into the context: "drop_oldest" drops the oldest turns, "stop"
    raises an error. `tools` are function declarations in JSON schema, as the OpenAI API has them.
    """

    system: str | None = None
    thinking: bool = False
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int = MAX_TOKENS
    stop: tuple[str, ...] = ()
    overflow: str = OVERFLOWS[0]
    sampling: SamplingParams = field(default_factory=lambda: GREEDY_PARAMS)

    def __post_init__(self) -> None:
        if self.overflow not in OVERFLOWS:
            raise RequestError(f"overflow is {self.overflow!r}; choose one of {', '.join(OVERFLOWS)}")


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """The history that an answer continues, with its token ids. `dropped` turns were removed to make it fit."""

    messages: list[Message]
    ids: list[int]
    dropped: int


class Answer:
    """One answer: iterating yields each event as soon as it is final. The history changes when the answer begins and when it ends.

    `finish` is why it ended: an end token or a stop string ("stop"), `max_tokens` ("length"), the end of the context ("context"), or an
    interruption ("interrupted"), which keeps the text so far. An answer that was interrupted before its first text leaves the history
    unchanged.
    """

    def __init__(self, chat: Chat, prompt: _Prompt, generation: Generation) -> None:
        self.text = ""
        self.thoughts = ""
        self.tool_calls: list[ToolCall] = []
        self.finish: Finish | None = None
        self.dropped_turns = prompt.dropped
        self.prompt_ids = prompt.ids
        self._chat = chat
        self._prompt = prompt
        self._generation = generation
        self._stop_requested = False
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
        return next(self._events)

    def stop(self) -> None:
        """Ends the answer after the current round. May be called from a signal handler or another thread."""
        self._stop_requested = True

    def close(self) -> None:
        """Ends the answer now if it is running."""
        self._events.close()

    def _run(self) -> Generator[Event]:
        before, self._chat.messages = self._chat.messages, self._prompt.messages
        settings = self._chat.settings
        parser = ChannelParser(self._chat.session.vocabulary, (*settings.stop, *self._chat.template.stop))
        finish: Finish = "interrupted"
        try:
            for one in self._generation.rounds():
                for token in one.tokens:
                    yield from self._record(parser.feed(token))
                if parser.stopped_by is not None or self._stop_requested:
                    break
            finish = self._reason(parser)
            yield from self._record(parser.finish())
        except GeneratorExit:
            raise
        except BaseException:
            # The backend may have been interrupted between a forward and its bookkeeping, so the cache cannot be trusted.
            with contextlib.suppress(Exception):
                self._chat.session.target.rollback(0)
            raise
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
            else:
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
            # Gemma 4 needs its thoughts while its calls are answered, but not in later turns.
            if self.thoughts:
                message["reasoning_content"] = self.thoughts
        if self.finish == "interrupted":
            message["interrupted"] = True
        return [*self._prompt.messages, message]


class Chat:
    """A conversation. `messages` is the history without the system message; roles are user, assistant and tool.

    The whole conversation is sent for each answer; what the cache holds of it is not computed again. `overflow` None takes the configured
    one. `request` holds further keywords of `Session.generate` for every answer, such as `acceptance` and `policy`. Not thread-safe,
    except for `Answer.stop`.
    """

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
        **request: Any,
    ) -> None:
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

    def say(self, text: str) -> Answer:
        """Returns the answer to a user's message; nothing runs before it is iterated.

        Raises RequestError, and leaves the conversation unchanged, if the message does not fit or the template refuses it.
        """
        self._close_answer()
        return self._answer_to([*map(_without_thoughts, self.messages), {"role": "user", "content": text}])

    def answer_tools(self, results: Sequence[str]) -> Answer:
        """Takes the results of the last answer's tool calls, in their order, and returns the model's answer to them."""
        self._close_answer()
        calls = self.messages[-1].get("tool_calls", []) if self.messages else []
        if not calls or len(calls) != len(results):
            raise RequestError(f"the last answer made {len(calls)} tool calls, but there are {len(results)} results; give one for each")
        return self._answer_to([*self.messages, *(_tool_message(call, result) for call, result in zip(calls, results, strict=True))])

    def set_system(self, text: str | None) -> None:
        """Changes the system message from the next answer on."""
        self._close_answer()
        self.settings = replace(self.settings, system=text)

    def reset(self) -> None:
        """Clears the conversation; the settings stay."""
        self._close_answer()
        self.messages = []

    def save(self, path: Path | str) -> None:
        """Writes messages and settings as JSON, atomically. Raises RequestError if the file cannot be written."""
        self._close_answer()
        chat_file.save(Path(path), self.settings, self.messages)

    def load(self, path: Path | str) -> None:
        """Reads messages and settings from a file that `save` wrote. Raises RequestError, and changes nothing, for any other file."""
        self._close_answer()
        self.settings, self.messages = chat_file.load(Path(path), ChatSettings)

    def _answer_to(self, messages: list[Message]) -> Answer:
        prompt = self._fitted(messages)
        settings = self.settings
        generation = self.session.generate(
            prompt.ids, max_tokens=settings.max_tokens, sampling=settings.sampling, **{"reuse_prefix": True, **self._request}
        )
        self._answer = Answer(self, prompt, generation)
        return self._answer

    def _close_answer(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _fitted(self, messages: list[Message]) -> _Prompt:
        """Returns the prompt of all turns, or of the newest ones that leave room for an answer."""
        context = self.session.target.context
        reserve = min(self.settings.max_tokens, context // 4)
        ids = self._encode(messages)
        if len(ids) + reserve <= context:
            return _Prompt(messages=messages, ids=ids, dropped=0)
        if self.settings.overflow == "stop":
            raise RequestError(
                f"the conversation has {len(ids)} tokens of the context's {context}, too many to answer; start a new one (reset), raise the"
                " context, or use overflow drop_oldest"
            )
        # Dropping turns costs a complete prefill, so room is made for more than this answer.
        starts = [i for i, message in enumerate(messages) if message["role"] == "user"]
        for dropped, start in enumerate(starts[1:], start=1):
            kept = messages[start:]
            ids = self._encode(kept)
            if len(ids) + reserve <= context * 3 // 4 or (start == starts[-1] and len(ids) < context):
                return _Prompt(messages=kept, ids=ids, dropped=dropped)
        if len(ids) < context:
            return _Prompt(messages=messages, ids=ids, dropped=0)
        raise RequestError(f"this message alone has {len(ids)} tokens, but the context holds {context}; shorten it or raise the context")

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        system = [] if self.settings.system is None else [{"role": "system", "content": self.settings.system}]
        sent = [{key: value for key, value in message.items() if key != "interrupted"} for message in messages]
        return self.template.encode([*system, *sent], tools=self.settings.tools, thinking=self.settings.thinking)


def _without_thoughts(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def _tool_message(call: Mapping[str, Any], result: str) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": result}
