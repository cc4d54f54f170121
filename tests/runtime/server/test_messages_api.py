"""POST /v1/messages, Anthropic's API: the events in their order over HTTP, and what the anthropic client makes of them."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest

from chat_server import CALL, Scripted, scripted_server, send
from edge_runtime.errors import BackendError
from edge_runtime.media.soft_rows import MEDIA
from edge_runtime.server.apis.messages_api import read_message
from edge_runtime.server.errors import ApiError
from edge_runtime.server.requests.messages import Conversation

MESSAGES = "/v1/messages"
HI: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}}}]
THOUGHT_AND_CALL = f"<|channel>thought\nclock<channel|>so {CALL}<|tool_response>"
PIXEL = base64.b64encode(b"\x89PNG").decode()
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "now", "input": {"zone": "UTC"}}]}


def ask(server: Scripted, **fields: Any) -> Any:
    body = {"model": "scripted", "max_tokens": 100, "messages": HI, "temperature": 0, **fields}
    status, _, answer = send(
        server, "POST", MESSAGES, body, anthropic_version="2023-06-01", anthropic_beta="interleaved-thinking-2025-05-14"
    )
    assert status == 200, answer
    return answer


def events(data: bytes) -> list[tuple[str, Any]]:
    """The names and the data of server-sent events."""
    pairs = [block.split(b"\n") for block in data.strip().split(b"\n\n")]
    return [(name.removeprefix(b"event: ").decode(), json.loads(text.removeprefix(b"data: "))) for name, text in pairs]


def read(**fields: Any) -> Conversation:
    prompt = read_message({"max_tokens": 8, "messages": HI, **fields}).choices[0].prompt
    assert isinstance(prompt, Conversation)
    return prompt


def test_a_message_has_thinking_text_and_calls_as_blocks() -> None:
    with scripted_server(THOUGHT_AND_CALL, "noon") as server:
        first = ask(server, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
        thinking, text, call = first["content"]
        assert (first["type"], first["role"], first["stop_reason"], first["stop_sequence"]) == ("message", "assistant", "tool_use", None)
        assert (thinking, text) == ({"type": "thinking", "thinking": "clock", "signature": ""}, {"type": "text", "text": "so "})
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "now", {"zone": "UTC"})
        assert first["usage"]["output_tokens_details"]["thinking_tokens"] == len("thought\nclock") + 1
        turns = [*HI, {"role": "assistant", "content": first["content"]}]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "12:00"}]}
        second = ask(server, tools=TOOLS, thinking={"type": "enabled"}, messages=[*turns, {"role": "user", "content": [result]}])
        assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "noon"}], "end_turn")


def test_a_stream_has_its_events_in_order() -> None:
    with scripted_server(THOUGHT_AND_CALL) as server:
        stream = events(ask(server, tools=TOOLS, stream=True))
        assert all(name == data["type"] for name, data in stream)
        names = [name for name, _ in stream]
        assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
        start = stream[0][1]["message"]
        assert (start["content"], start["stop_reason"]) == ([], None)
        assert start["usage"]["input_tokens"] > 0
        blocks: list[Any] = []
        open_block = None
        for name, data in stream[1:-2]:
            if name == "content_block_start":
                assert (open_block, data["index"]) == (None, len(blocks))
                open_block = data["index"]
                blocks.append((data["content_block"]["type"], []))
            elif name == "content_block_delta":
                assert data["index"] == open_block
                blocks[-1][1].append(data["delta"])
            else:
                assert (name, data["index"]) == ("content_block_stop", open_block)
                open_block = None
        assert open_block is None
        kinds = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}
        assert [kind for kind, _ in blocks] == ["thinking", "text", "tool_use"]
        assert blocks[0][1].pop() == {"type": "signature_delta", "signature": ""}
        assert all(delta["type"] == kinds[kind] for kind, deltas in blocks for delta in deltas)
        assert "".join(delta["text"] for delta in blocks[1][1]) == "so "
        assert len(blocks[2][1]) > 1, "the arguments come in pieces"
        assert json.loads("".join(delta["partial_json"] for delta in blocks[2][1])) == {"zone": "UTC"}
        last = stream[-2][1]
        assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert last["usage"]["input_tokens"] == start["usage"]["input_tokens"]
        assert last["usage"]["output_tokens"] > 20


def test_a_stream_that_computes_its_prompt_for_long_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_runtime.server.streaming.IDLE_SECONDS", 0.05)
    with scripted_server("Hello.") as server:
        waits = iter([0.3])
        server.batch.before_forward = lambda: time.sleep(next(waits, 0))
        stream = events(ask(server, stream=True))
        names = [name for name, _ in stream]
        assert names[:2] == ["message_start", "ping"]
        assert stream[0][1]["message"]["usage"]["input_tokens"] == stream[-2][1]["usage"]["input_tokens"]
        assert "".join(data["delta"]["text"] for name, data in stream if name == "content_block_delta") == "Hello."


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ended(stream: bool) -> None:
    def reasons(**fields: Any) -> tuple[str, str | None]:
        answer = ask(server, stream=stream, **fields)
        end = events(answer)[-2][1]["delta"] if stream else answer
        return end["stop_reason"], end["stop_sequence"]

    with scripted_server("one, two, three") as server:
        assert reasons() == ("end_turn", None)
        assert reasons(max_tokens=3) == ("max_tokens", None)
        assert reasons(stop_sequences=["zzz", ", t"]) == ("stop_sequence", ", t")


def test_an_answer_that_is_begun_goes_on() -> None:
    for content in ("{", [{"type": "text", "text": "{"}]):
        begun = read(messages=[*HI, {"role": "assistant", "content": content}])
        assert (begun.continues, begun.messages[-1]["content"]) == (True, "{")


def test_tokens_are_counted_without_an_answer() -> None:
    with scripted_server("ok") as server:
        used = ask(server, system="Be brief.", tools=TOOLS)["usage"]
        body = {"model": "scripted", "messages": HI, "system": "Be brief.", "tools": TOOLS}
        assert send(server, "POST", f"{MESSAGES}/count_tokens", body)[2]["input_tokens"] == (
            used["input_tokens"] + used["cache_read_input_tokens"]
        )


def test_results_of_tools_come_before_what_the_user_says() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "no "}, IMAGE], "is_error": True},
        {"type": "text", "text": "go on"},
    ]
    tool, user = read(messages=[*HI, CALLED, {"role": "user", "content": results}]).messages[2:]
    assert (tool["role"], tool["name"], tool["content"]) == ("tool", "now", "Error: no ")
    assert ([part["type"] for part in user["content"]], len(user[MEDIA])) == (["image", "text"], 1)
    plain = [*HI, CALLED, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]
    assert [message["content"] for message in read(messages=plain).messages[2:]] == [""]


def test_thoughts_come_back_to_the_model_and_hidden_ones_do_not() -> None:
    thoughts = [{"type": "thinking", "thinking": "clock", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]
    called = {**CALLED, "content": [*thoughts, *CALLED["content"]]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "noon"}]}
    answer = read(messages=[*HI, called, result]).messages[1]
    assert (answer["reasoning_content"], answer["content"], len(answer["tool_calls"])) == ("clock", "", 1)


def test_an_image_for_a_model_without_an_encoder_is_refused_by_words_that_clients_know() -> None:
    with scripted_server("ok") as server:
        for content in ([IMAGE], [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]):
            status, _, answer = send(server, "POST", MESSAGES, {"messages": [*HI, CALLED, {"role": "user", "content": content}]})
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert "image input is not supported" in answer["error"]["message"]


def test_the_line_that_changes_with_each_request_is_left_out() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.197.e51; cc_entrypoint=cli; cch=a5145;"
    blocks = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    for system in (f"{line}Be brief.", f"{line}\nBe brief.", blocks, "Be brief."):
        assert read(system=system).messages[0] == {"role": "system", "content": "Be brief."}
    said = f"Do not say {line}"
    assert read(system=said).messages[0]["content"] == said


def test_fields_become_what_the_other_apis_have() -> None:
    request = read_message(
        {
            "model": "claude",
            "messages": HI,
            "max_tokens": 7,
            "top_k": 5,
            "stop_sequences": ["x"],
            "metadata": {"user_id": "u"},
            "thinking": {"type": "adaptive"},
            "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "context_management": {"edits": []},
        }
    )
    (choice,) = request.choices
    assert (choice.max_tokens, choice.sampling.top_k, choice.stop, choice.max_calls) == (7, 5, ("x",), 1)
    assert isinstance(choice.prompt, Conversation)
    assert (choice.prompt.thinking, len(choice.prompt.tools)) == (True, 1)
    assert {"web_search", "context_management"} <= {word.strip("'_0123456789") for note in request.remarks for word in note.split()}
    assert not read(thinking={"type": "disabled"}).thinking
    assert read(tools=TOOLS, tool_choice={"type": "none"}).tools == ()


def test_calls_are_demanded() -> None:
    pytest.importorskip("llguidance", reason="needs edge-mtp[grammar]")
    closed = [{**TOOLS[0], "input_schema": {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}}]
    with scripted_server("I would rather chat.") as server:
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "now"}):
            answer = ask(server, tools=closed, tool_choice=choice)
            assert [(block["name"], block["input"]) for block in answer["content"]] == [("now", {"zone": "UTC"})]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "one of user, assistant, system"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "it must be text, image"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]}, "fetches nothing"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}, "keeps no files"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]}, "plain text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "earlier message"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "an assistant's message has"),
        ({"tool_choice": {"type": "required"}}, "one of auto, any"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tools": [{"input_schema": {}}]}, "name is missing"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "schema is missing"),
        ({"thinking": {"type": "much"}}, "one of enabled"),
    ],
)
def test_what_cannot_be_served_is_refused(fields: Any, says: str) -> None:
    with pytest.raises(ApiError, match=says):
        read(**fields)


def test_errors_have_the_form_of_the_api() -> None:
    with scripted_server("ok", keys=["k"], context=64) as server:
        refused = send(server, "POST", MESSAGES, {"messages": HI}, x_api_key="other")
        assert (refused[0], refused[2]["type"], refused[2]["error"]["type"]) == (401, "error", "authentication_error")
        status, headers, answer = send(server, "POST", MESSAGES, {"messages": []}, x_api_key="k")
        assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
        assert headers["request-id"] == headers["x-request-id"]
        long = send(server, "POST", MESSAGES, {"messages": [{"role": "user", "content": "x" * 100}]}, authorization="Bearer k")
        assert long[0] == 400
        assert long[2]["error"]["message"].startswith("prompt is too long: ")
        assert long[2]["error"]["n_ctx"] == 64


def test_a_failure_has_the_form_of_the_api_also_in_mid_stream() -> None:
    with scripted_server("fine words") as server:
        for stream, rounds in ((False, 1), (True, 4)):
            left = iter(range(rounds))

            def fail(left: Any = left) -> None:
                if next(left, None) is None:
                    raise BackendError("gone")

            server.batch.before_forward = fail
            status, _, answer = send(server, "POST", MESSAGES, {"messages": HI, "temperature": 0, "stream": stream})
            if stream:
                name, answer = events(answer)[-1]
                assert (status, name) == (200, "error")
            else:
                assert status == 500
            assert (answer["type"], answer["error"]["type"]) == ("error", "api_error")
        assert server.worker.load() == (0, 0)


def test_the_anthropic_client() -> None:
    anthropic = pytest.importorskip("anthropic", reason="needs the package anthropic")
    with scripted_server(THOUGHT_AND_CALL, keys=["k"], count=2) as server, anthropic.Anthropic(base_url=server.url, api_key="k") as client:
        fields: Any = {"model": "scripted", "max_tokens": 100, "messages": HI, "tools": TOOLS}
        answer = client.messages.create(**fields)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert (answer._request_id or "").startswith("req_")
        with client.messages.stream(**fields) as stream:
            assert "".join(stream.text_stream) == "so "
            whole = stream.get_final_message()
        assert (whole.content[2].input, whole.stop_reason) == ({"zone": "UTC"}, "tool_use")
        assert client.messages.count_tokens(model="scripted", messages=HI).input_tokens > 3
        assert [(model.id, model.type) for model in client.models.list()] == [("scripted", "model")]
        assert client.models.retrieve("scripted").display_name == "scripted"
        with pytest.raises(anthropic.BadRequestError, match="messages is empty"):
            client.messages.create(**{**fields, "messages": []})
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="other").messages.create(**fields)
