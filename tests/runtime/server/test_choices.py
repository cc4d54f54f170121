"""Several answers, log probabilities and demanded calls, over scripted chats."""

from __future__ import annotations

import json
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="needs edge-mtp[dev]")

from chat_server import ask, client_of, scripted_server


def test_n_answers_have_their_numbers_and_one_prompt() -> None:
    with scripted_server("hello", count=2) as server:
        answer = ask(client_of(server), n=3)
        assert [(choice.index, choice.message.content) for choice in answer.choices] == [(i, "hello") for i in range(3)]
        item = ask(client_of(server))
        assert answer.usage.prompt_tokens == item.usage.prompt_tokens
        assert answer.usage.completion_tokens == 3 * item.usage.completion_tokens
        chunks = list(ask(client_of(server), n=3, stream=True, stream_options={"include_usage": True}))
        for i in range(3):
            mine = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == i]
            assert "".join(choice.delta.content or "" for choice in mine) == "hello"
            assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
        with pytest.raises(openai.BadRequestError, match="at most 6"):
            ask(client_of(server), n=7)


def test_log_probabilities_are_those_of_the_answers_tokens() -> None:
    with scripted_server("<|channel>thought\nhm<channel|>né, end") as server:
        choice = ask(client_of(server), logprobs=True, top_logprobs=3, stop=", en").choices[0]
        entries = choice.logprobs.content
        assert (choice.message.content, b"".join(bytes(entry.bytes) for entry in entries)) == ("né", "né".encode())
        assert all(-1e-6 < entry.logprob <= 0 for entry in entries), "the script is certain"
        for entry in entries:
            assert len(entry.top_logprobs) == 3
            assert entry.top_logprobs[0].bytes == entry.bytes
            assert entry.top_logprobs[1].logprob == pytest.approx(-100, abs=0.1)
        chunks = list(ask(client_of(server), logprobs=True, stream=True))
        streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
        assert b"".join(bytes(entry.bytes) for entry in streamed) == "né, end".encode()
        assert ask(client_of(server)).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_is_made(stream: bool) -> None:
    """The script wants to chat; the grammar leaves it no choice but a call, whose free parts the model fills with its blanks."""
    pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
    parameters = {
        "type": "object",
        "properties": {"zone": {"enum": ["UTC", "CET"]}, "day": {"const": 3}, "exact": {"type": "boolean"}},
        "required": ["zone", "day", "exact"],
    }
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("now", "then")]
    with scripted_server("I would rather chat.") as server:
        for choice in ("required", {"type": "function", "function": {"name": "then"}}):
            answer = ask(client_of(server), tools=tools, tool_choice=choice, parallel_tool_calls=False, stream=stream, max_tokens=200)
            if stream:
                chunks = [chunk.choices[0] for chunk in answer]
                calls, reason = [call for chunk in chunks for call in chunk.delta.tool_calls or []], chunks[-1].finish_reason
                assert {call.index for call in calls} == {0}
                calls[0].function.arguments = "".join(call.function.arguments for call in calls)
                del calls[1:]
            else:
                calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
            assert (len(calls), reason) == (1, "tool_calls")
            assert calls[0].function.name in ({"now", "then"} if choice == "required" else {"then"})
            arguments = json.loads(calls[0].function.arguments)
            assert set(arguments) == {"zone", "day", "exact"}
            assert arguments["zone"] in ("UTC", "CET")
            assert arguments["day"] == 3
            assert type(arguments["exact"]) is bool


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
def test_an_answer_is_the_json_that_was_asked_for(kind: str) -> None:
    """The script wants to chat; beside tools a call would do, too. llama.cpp's server takes a schema beside json_object."""
    pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
    schema: Any = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"], "additionalProperties": False}
    schema |= {"x-guidance": {"whitespace_flexible": False}}  # else the script goes on with blanks
    asked = {"schema": schema} if kind == "json_object" else {"json_schema": {"name": "answer", "schema": schema, "strict": True}}
    with scripted_server("I would rather chat.") as server:
        for tools in ({}, {"tools": [{"type": "function", "function": {"name": "now"}}]}):
            choice = ask(client_of(server), max_tokens=100, response_format={"type": kind, **asked}, **tools).choices[0]
            assert choice.message.tool_calls or json.loads(choice.message.content) == {"ok": True}


def test_several_prompts_have_an_answer_each(several: str) -> None:
    client = client_of(several)
    prompts = ["def add(a, b):", "class Stack:"]

    def complete(prompt: Any, **fields: Any) -> Any:
        return client.completions.create(model="any", prompt=prompt, max_tokens=12, temperature=0, **fields)

    alone = [complete(prompt).choices[0].text for prompt in prompts]
    batch = complete(prompts)
    assert [choice.text for choice in batch.choices] == alone
    assert [choice.text for choice in complete(prompts, n=2).choices] == [alone[0], alone[0], alone[1], alone[1]]
    streamed = ["", ""]
    for chunk in complete(prompts, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == alone
    sampled = client.completions.create(model="any", prompt="#", max_tokens=12, temperature=1, seed=5, n=3)
    assert len({choice.text for choice in sampled.choices}) > 1, "each choice has a seed of its own"
