"""Thoughts, calls and text in every API, whole and streamed: nothing is lost, each is what it is, and what was written can be sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chat_server import CHAT, HI, Scripted, ask, client_of, scripted_server, send
from chat_words import ChatWords
from edge_runtime.text.channels import ChannelParser, Text, Thought
from edge_runtime.text.chat_template import TURNS_TEMPLATE
from edge_runtime.text.tool_calls import ToolCall

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = '<|tool_call>call:f{a:1,b:<|"|>x<|"|>}'
# As Gemma 4's own template does after the result of a tool, where the model shall think.
OPENING = TURNS_TEMPLATE + "{% if messages[-1].role == 'tool' %}{{ '<|channel>thought\n' }}{% endif %}"
ASKED = [*HI, {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]
ANSWERED = [*ASKED, {"role": "tool", "tool_call_id": "c", "content": "noon"}]
ITEMS = [
    {"role": "user", "content": "hi"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "noon"},
]


@dataclass(frozen=True)
class Said:
    """What an answer has, in any API. `calls` are names with arguments."""

    text: str
    thoughts: str
    calls: list[tuple[str, Any]]
    reason: str | None


def events_of(data: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in data.splitlines() if line.startswith((b"data: {", b"{"))]
    return [json.loads(line) for line in lines]


def arguments_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def joined(pieces: list[Any]) -> list[Any]:
    """The calls of a stream, each of the pieces with its number."""
    calls: dict[int, Any] = {}
    for piece in pieces:
        call = calls.setdefault(piece["index"], {"name": piece["function"].get("name"), "arguments": ""})
        call["arguments"] += piece["function"]["arguments"]
    return [*calls.values()]


def chat(server: Scripted, messages: Any = HI, **fields: Any) -> Said:
    status, _, answer = send(server, "POST", CHAT, {"messages": messages, "temperature": 0, **fields})
    assert status == 200, answer
    if fields.get("stream"):
        choices = [chunk["choices"][0] for chunk in events_of(answer)]
        deltas, reason = [choice["delta"] for choice in choices], choices[-1]["finish_reason"]
    else:
        deltas, reason = [answer["choices"][0]["message"]], answer["choices"][0]["finish_reason"]
    pieces = [call for delta in deltas for call in delta.get("tool_calls") or []]
    calls = joined(pieces) if fields.get("stream") else [call["function"] for call in pieces]
    return Said(
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(delta.get("reasoning_content") or "" for delta in deltas),
        [(call["name"], arguments_of(call["arguments"])) for call in calls],
        reason,
    )


def responses(server: Scripted, messages: Any = "hi", **fields: Any) -> Said:
    status, _, answer = send(server, "POST", "/v1/responses", {"input": messages, "temperature": 0, **fields})
    assert status == 200, answer
    if fields.get("stream"):
        answer = events_of(answer)[-1]["response"]
    items = answer["output"]
    return Said(
        "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"]),
        "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]),
        [(item["name"], arguments_of(item["arguments"])) for item in items if item["type"] == "function_call"],
        {"completed": "stop", "incomplete": "length"}[answer["status"]],
    )


def ollama(server: Scripted, messages: Any = HI, *, stream: bool = False, **fields: Any) -> Said:
    options = {"temperature": 0} | fields.pop("options", {})
    body = {"model": "x", "messages": messages, "stream": stream, "options": options, **fields}
    status, _, answer = send(server, "POST", "/api/chat", body)
    assert status == 200, answer
    lines = events_of(answer) if stream else [answer]
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls") or []]
    return Said(
        "".join(line["message"]["content"] for line in lines),
        "".join(line["message"].get("thinking", "") for line in lines),
        [(call["name"], call["arguments"]) for call in calls],
        lines[-1]["done_reason"],
    )


def messages(server: Scripted, turns: Any = HI, *, stream: bool = False, **fields: Any) -> Said:
    body = {"max_tokens": 1000, "messages": turns, "temperature": 0, "stream": stream, **fields}
    status, _, answer = send(server, "POST", "/v1/messages", body)
    assert status == 200, answer
    blocks, reason = blocks_of(events_of(answer)) if stream else (answer["content"], answer["stop_reason"])
    return Said(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}[reason],
    )


def blocks_of(events: list[Any]) -> tuple[list[Any], str]:
    """The content blocks of a stream of /v1/messages, and why it ended."""
    blocks, reason = [], ""
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"input": ""})
        elif event["type"] == "content_block_delta":
            for name, piece in event["delta"].items():
                if name in ("text", "thinking", "partial_json"):
                    blocks[-1]["input" if name == "partial_json" else name] += piece
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    return [block | {"input": arguments_of(block["input"])} for block in blocks], reason


def everywhere(server: Scripted) -> Iterator[Said]:
    """What each API says; a stream may have begun a call that was none, which has no arguments then."""
    for stream in (False, True):
        for api in (chat, responses, ollama, messages):
            said = api(server, stream=stream)  # type: ignore[operator]
            calls = [call for call in said.calls if isinstance(call[1], dict) or said.reason == "length" or not stream]
            yield Said(said.text, said.thoughts, calls, "stop" if said.reason == "tool_calls" and calls else said.reason)


@pytest.mark.parametrize(
    ("reply", "text", "thoughts", "calls"),
    [
        ("So <|tool_call>I will look it up.<turn|>", "So I will look it up.", "", []),
        ("So <|tool_call>I will look it up.<tool_call|>", "So I will look it up.", "", []),
        ("<|tool_call>call: I do not know.<turn|>", "call: I do not know.", "", []),
        ("<|tool_call>call:f{a:1,b:<turn|>", "call:f{a:1,b:", "", []),
        ('<|tool_call>call:f{a:<|"|>x<|channel>thought\nhm<channel|>y', 'call:f{a:<|"|>xy', "hm", []),
        ("<|channel>thought\nhm<|tool_call>oops", "oops", "hm", []),
        (f"{CALL}<tool_call|><|tool_response>", "", "", [("f", {"a": 1, "b": "x"})]),
        (f"so {CALL}<turn|>", "so ", "", [("f", {"a": 1, "b": "x"})]),
        (f"{CALL}{CALL}<tool_call|>", "", "", [("f", {"a": 1, "b": "x"})] * 2),
        ('<|tool_call>call:f{a:x<|"|>}<tool_call|>', "", "", [("f", {"a": "x"})]),
    ],
)
def test_each_part_of_an_answer_is_what_it_is(reply: str, text: str, thoughts: str, calls: list[Any]) -> None:
    with scripted_server(reply) as server:
        for said in everywhere(server):
            assert said == Said(text, thoughts, calls, "stop")


PARTS = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "thought\n", "call:f{", "a:", "}", "x", "é"]
reply_of: list[str] = [""]


@pytest.fixture(scope="module")
def repeating() -> Iterator[Scripted]:
    """A server that gives the reply in `reply_of`."""
    with scripted_server(lambda *_: reply_of[0]) as server:
        yield server


@settings(max_examples=30, deadline=None)
@example(["<|tool_call>", "é"])
@example(["<|tool_call>", "call:f{", "}", '<|"|>'])
@given(st.lists(st.sampled_from(PARTS)))
def test_whatever_marks_say_every_api_says_it(repeating: Scripted, parts: list[str]) -> None:
    reply_of[0] = "".join(parts)
    words = ChatWords()
    parser = ChannelParser(words)
    events = [e for token in words.encode(f"{reply_of[0]}<turn|>", add_bos=False, parse_special=True) for e in parser.feed(token)]
    text, thoughts = ("".join(e.text for e in events if isinstance(e, kind)) for kind in (Text, Thought))
    calls = [(e.name, e.arguments) for e in events if isinstance(e, ToolCall)]
    for said in everywhere(repeating):
        assert said == Said(text, thoughts, calls, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_call_has_the_beginning_of_its_arguments(stream: bool) -> None:
    with scripted_server(CALL) as server:
        limit = len('call:f{a:1,b:<|"|>') - 3
        assert chat(server, max_tokens=limit, stream=stream) == Said("", "", [("f", '{"a":1,"b":"')], "length")
        assert responses(server, max_output_tokens=limit, stream=stream) == Said("", "", [("f", '{"a":1,"b":"')], "length")
        begun = '{"a":1,"b":"' if stream else {"a": 1, "b": ""}
        assert messages(server, max_tokens=limit, stream=stream) == Said("", "", [("f", begun)], "length")
        # Arguments are an object in this API.
        assert ollama(server, options={"num_predict": limit}, stream=stream) == Said('call:f{a:1,b:<|"|>', "", [], "length")
        assert chat(server, max_tokens=6, stream=stream) == Said("call:", "", [], "length")


def test_what_the_server_wrote_is_taken_back() -> None:
    """Wherever a limit cuts a call, the conversation goes on."""
    again = [{"role": "user", "content": "again"}]
    with scripted_server(lambda _, output: "so" if "again" in output else CALL) as server:
        for limit in range(1, len(CALL) - 17):
            message = send(server, "POST", CHAT, {"messages": HI, "max_tokens": limit, "temperature": 0})[2]["choices"][0]["message"]
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "cut off"} for call in message.get("tool_calls", ())]
            assert chat(server, [*HI, message, *results, *again]).text == "so"
            items = send(server, "POST", "/v1/responses", {"input": "hi", "max_output_tokens": limit, "temperature": 0})[2]["output"]
            outputs = [
                {"type": "function_call_output", "call_id": i["call_id"], "output": "x"} for i in items if i["type"] == "function_call"
            ]
            assert responses(server, [ITEMS[0], *items, *outputs, *again]).text == "so"
            body = {"model": "x", "messages": HI, "stream": False, "options": {"num_predict": limit, "temperature": 0}}
            message = send(server, "POST", "/api/chat", body)[2]["message"]
            results = [{"role": "tool", "tool_name": "f", "content": "x"}] * len(message.get("tool_calls", ()))
            assert ollama(server, [*HI, message, *results, *again]).text == "so"
            content = send(server, "POST", "/v1/messages", {"messages": HI, "max_tokens": limit, "temperature": 0})[2]["content"]
            results = [{"type": "tool_result", "tool_use_id": block["id"]} for block in content if block["type"] == "tool_use"]
            turns = [
                *HI,
                {"role": "assistant", "content": content},
                {"role": "user", "content": [*results, {"type": "text", "text": "again"}]},
            ]
            assert messages(server, turns).text == "so"


@pytest.mark.parametrize("arguments", ['{"text": "Par', "null", "[]", "", "{", "oops", '{"a": 1} and so on', "{'a': 1}", {"a": 1}, '"x"'])
def test_a_conversation_with_any_arguments_goes_on(arguments: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "error"}
    with scripted_server("so") as server:
        assert chat(server, [*HI, {"role": "assistant", "tool_calls": [call]}, result]).text == "so"
        message = {"role": "assistant", "tool_calls": [{"function": call["function"]}]}
        assert ollama(server, [*HI, message, {"role": "tool", "content": "error"}]).text == "so"


def test_thoughts_of_a_channel_that_the_prompt_opened() -> None:
    messages = [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    messages += [{"role": "tool", "tool_name": "f", "content": "noon"}]
    with scripted_server("<|channel>thought\nhm<channel|>so", template=OPENING) as server:
        for stream in (False, True):
            assert chat(server, ANSWERED, stream=stream) == Said("so", "hm", [], "stop")
            assert responses(server, ITEMS, stream=stream) == Said("so", "hm", [], "stop")
            assert ollama(server, messages, stream=stream) == Said("so", "hm", [], "stop")
            assert chat(server, ANSWERED, stream=stream, max_tokens=2) == Said("", "hm", [], "length")
        usage = send(server, "POST", "/v1/responses", {"input": ITEMS, "temperature": 0})[2]["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] == len("hm")


SCHEMA = FUNCTION["parameters"]
JSON = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


def test_a_constrained_answer_comes_behind_free_thoughts() -> None:
    pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
    with scripted_server('<|channel>thought\nhm, "{\n<channel|>{"a": 1}') as server:
        expected = Said('{"a": 1}', 'hm, "{\n', [], "stop")
        assert chat(server, reasoning_effort="low", response_format=JSON) == expected
        assert chat(server, chat_template_kwargs={"enable_thinking": True}, response_format=JSON, tools=TOOLS, stream=True) == expected
        text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        assert responses(server, reasoning={"effort": "high"}, text=text) == expected
        assert ollama(server, think=True, format=SCHEMA) == expected
        output = {"format": {"type": "json_schema", "schema": SCHEMA}}
        assert messages(server, thinking={"type": "enabled"}, output_config=output) == expected
        assert chat(server, response_format=JSON, max_tokens=30).thoughts == ""
    with scripted_server("<|channel>thought\nhm<channel|><|tool_call>call:f{a:1}<tool_call|>") as server:
        expected = Said("", "hm", [("f", {"a": 1})], "tool_calls")
        assert chat(server, reasoning_effort="low", tools=TOOLS, tool_choice="required") == expected
        assert chat(server, tools=TOOLS, tool_choice="required").thoughts == ""


def test_an_answer_that_breaks_its_schema_behind_thoughts_is_kept_from_it() -> None:
    pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
    one = {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}
    for reply in ("<|channel>thought\nhm<channel|>no", "<|channel>thought\nhm<turn|>", "<|channel>thought\nhm<|tool_call>call:f{}"):
        with scripted_server(reply) as server:
            said = chat(server, reasoning_effort="low", response_format=one, max_tokens=60)
            assert (said.text, said.thoughts, said.calls) == ("1", "hm", [])


def test_a_constrained_answer_behind_thoughts_that_the_prompt_began() -> None:
    pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
    with scripted_server('<|channel>thought\nhm<channel|>{"a": 1}', template=OPENING) as server:
        assert chat(server, ANSWERED, response_format=JSON) == Said('{"a": 1}', "hm", [], "stop")


def test_calls_are_text_where_the_client_wants_none() -> None:
    with scripted_server(f"{CALL}<tool_call|>") as server:
        for stream in (False, True):
            assert chat(server, tools=TOOLS, tool_choice="none", stream=stream) == Said('call:f{a:1,b:<|"|>x<|"|>}', "", [], "stop")


def test_an_answer_ends_behind_its_call_where_the_client_wants_one() -> None:
    with scripted_server(f"so {CALL}{CALL}<tool_call|>more") as server:
        expected = Said("so ", "", [("f", {"a": 1, "b": "x"})], "tool_calls")
        for stream in (False, True):
            assert chat(server, tools=TOOLS, parallel_tool_calls=False, stream=stream) == expected
        assert len(chat(server, tools=TOOLS).calls) == 2
        items = [{"type": "function", **FUNCTION}]
        assert len(responses(server, tools=items, parallel_tool_calls=False).calls) == 1


def test_what_is_no_call_has_the_log_probabilities_of_text() -> None:
    with scripted_server('a<|tool_call>b<|"|>c<tool_call|>d') as server:
        choice = ask(client_of(server), logprobs=True).choices[0]
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content == 'ab<|"|>cd'
    with scripted_server(f"a{CALL}<tool_call|>d") as server:
        choice = ask(client_of(server), logprobs=True).choices[0]
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content == "ad"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_of_earlier_answers_reach_the_template(name: str) -> None:
    template = TURNS_TEMPLATE.replace("{{- message.content", "{{- message.reasoning_content or '' }}{{ message.content")
    with scripted_server(lambda _, output: str("hm" in output), template=template) as server:
        said = chat(server, [*HI, {"role": "assistant", "content": "so", name: "hm"}, *HI])
        assert said.text == "True"
