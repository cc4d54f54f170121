"""POST /v1/responses through the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="needs edge-mtp[dev]")

from chat_server import CALL, Scripted, client_of, scripted_server

IMAGE: Any = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
TOOLS: Any = [{"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module")
def refusing() -> Iterator[Scripted]:
    with scripted_server("ok") as server:
        yield server


def respond(server: Scripted, **fields: Any) -> Any:
    return client_of(server).responses.create(**{"model": "scripted", "input": "hi", "temperature": 0, **fields})


def test_a_response_has_thoughts_text_and_calls_as_items() -> None:
    with scripted_server(f"<|channel>thought\nclock<channel|>so {CALL}<|tool_response>", "noon") as server:
        first = respond(server, tools=TOOLS, instructions="Be brief.", metadata={"a": "b"})
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert (first.status, first.output_text, first.output[0].content[0].text) == ("completed", "so ", "clock")
        assert (first.instructions, first.metadata, first.store) == ("Be brief.", {"a": "b"}, False)
        call = first.output[2]
        assert (call.name, json.loads(call.arguments)) == ("now", {"zone": "UTC"})
        assert first.usage.output_tokens_details.reasoning_tokens == len("thought\nclock") + 1
        items = [{"role": "user", "content": "hi"}, *(item.model_dump(exclude_none=True) for item in first.output)]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
        assert respond(server, tools=TOOLS, input=[*items, result]).output_text == "noon"


def test_a_stream_is_the_same_in_events() -> None:
    with scripted_server(f"<|channel>thought\nclock<channel|>so {CALL}<|tool_response>") as server:
        events = list(respond(server, tools=TOOLS, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "so "
        assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "clock"
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.id for item in done] == [item.id for item in events[-1].response.output]
        assert json.loads(next(e.arguments for e in events if e.type == "response.function_call_arguments.done")) == {"zone": "UTC"}
        with client_of(server) as client, client.responses.stream(model="scripted", input="hi", tools=TOOLS) as stream:
            for _ in stream:
                pass
            assert stream.get_final_response().output_text == "so ", "the client's own accumulation"


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_a_namespace_are_called_in_it(stream: bool) -> None:
    with scripted_server(f"{CALL}<|tool_response>", "noon") as server:
        grouped: Any = [{"type": "namespace", "name": "clock", "description": "Times.", "tools": TOOLS}]
        answer = respond(server, tools=grouped, stream=stream)
        response = list(answer)[-1].response if stream else answer
        (call,) = response.output
        assert (call.name, call.namespace) == ("now", "clock")
        items = [{"role": "user", "content": "hi"}, call.model_dump(exclude_none=True)]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
        assert respond(server, tools=grouped, input=[*items, result]).output_text == "noon"
        assert not server.notes, "nothing is left out"


def test_stream_options_of_the_older_api_are_taken() -> None:
    with scripted_server("Hello.") as server:
        events = list(respond(server, stream=True, extra_body={"stream_options": {"include_usage": True}}))
        assert events[-1].response.usage.output_tokens == len("Hello.") + 1


def test_limits_and_log_probabilities() -> None:
    with scripted_server("Hello, friend.") as server:
        cut = respond(server, max_output_tokens=5, include=["message.output_text.logprobs"], top_logprobs=2)
        assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "Hello")
        assert "".join(entry.token for entry in cut.output[0].content[0].logprobs) == "Hello"
        assert len(cut.output[0].content[0].logprobs[0].top_logprobs) == 2


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"previous_response_id": "resp_1"}, "keeps no conversations"),
        ({"background": True}, "not supported"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "there are no tools"),
        ({"tools": [{"type": "namespace", "tools": TOOLS}]}, "name is missing"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "stores no items"),
        ({"input": [{"type": "mcp_call", "id": "x"}]}, "takes messages"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "fetches nothing"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "earlier message"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema is missing"),
        *(
            ({"instructions": "x", "input": [{"role": role, "content": [IMAGE]}]}, "content has images; only a user's")
            for role in ("assistant", "system", "developer")
        ),
    ],
)
def test_what_cannot_be_served_is_refused(refusing: Scripted, fields: Any, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        respond(refusing, **fields)
