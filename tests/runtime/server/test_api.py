"""The API over scripted chats, through real HTTP and the openai client: shapes, choices, calls, refusals, queues, failures."""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

openai = pytest.importorskip("openai", reason="needs edge-mtp[dev]")

from chat_server import CALL, HI, Scripted, ask, asked, client_of, scripted_server, send, settled
from edge_runtime.errors import BackendError
from edge_runtime.server.http.body import MEDIA_BODY, TEXT_BODY
from edge_runtime.server.json_text import MAX_DEPTH
from edge_runtime.server.requests.messages import MAX_MESSAGES
from polling import wait

TOOLS: Any = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
PART = "messages[0].content[0]"
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "ogg"}}


def user(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def refused(server: Scripted, value: Any, path: str = "/v1/chat/completions") -> dict[str, Any]:
    status, _, body = send(server, "POST", path, value)
    assert status == 400, body
    return body["error"]


@pytest.fixture(scope="module")
def hello() -> Iterator[Scripted]:
    with scripted_server("Hello é, friend.", count=2) as server:
        yield server


def test_a_whole_answer(hello):
    answer = ask(client_of(hello))
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello é, friend.", "stop")
    assert choice.message.tool_calls is None
    tokens = len("Hello é, friend.".encode()) + 1
    assert (answer.object, answer.model, answer.usage.completion_tokens) == ("chat.completion", "scripted", tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + tokens
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == answer.usage.accepted_tokens == 0


def test_a_stream_is_the_same_in_pieces(hello):
    chunks = list(ask(client_of(hello), stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello é, friend."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len("Hello é, friend.".encode()) + 1
    assert len(chunks) > 10
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_usage_may_come_with_every_chunk(hello):
    chunks = list(ask(client_of(hello), stream=True, stream_options={"continuous_usage_stats": True}))
    counts = [c.usage.completion_tokens for c in chunks[1:]]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


def test_stop_strings_and_limits_cut(hello):
    client = client_of(hello)
    stopped = ask(client, stop=[", fr", "zzz"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("Hello é", "stop")
    assert stopped.usage.completion_tokens == len("Hello é, fr".encode())
    for name in ("max_tokens", "max_completion_tokens"):
        cut = ask(client, **{name: 5})
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("Hello", "length")


def test_thoughts_and_calls_have_fields_of_their_own():
    with scripted_server(f"<|channel>thought\nclock<channel|>so {CALL}<|tool_response>", "noon") as server:
        client = client_of(server)
        choice = ask(client, tools=TOOLS).choices[0]
        assert (choice.message.reasoning_content, choice.message.content, choice.finish_reason) == ("clock", "so ", "tool_calls")
        call = choice.message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("now", {"zone": "UTC"})
        chunks = [c.choices[0] for c in ask(client, tools=TOOLS, stream=True)]
        assert "".join(getattr(c.delta, "reasoning_content", None) or "" for c in chunks) == "clock"
        streamed = [call for c in chunks for call in c.delta.tool_calls or []]
        assert [(c.index, c.function.name) for c in streamed] == [(0, "now"), *[(0, None)] * (len(streamed) - 1)]
        assert json.loads("".join(c.function.arguments for c in streamed)) == {"zone": "UTC"}
        assert chunks[-1].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "12:00"}
        answer = ask(client, tools=TOOLS, messages=[*HI, choice.message.model_dump(exclude_none=True), result])
        assert answer.choices[0].message.content == "noon"


def test_later_turns_reuse_the_cache():
    with scripted_server("one", "two", count=2) as server:
        client = client_of(server)
        first = ask(client)
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        turns = [*HI, {"role": "assistant", "content": "one"}, {"role": "user", "content": "and?"}]
        second = ask(client, messages=turns)
        assert second.choices[0].message.content == "two"
        assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens + len("one")
        assert ask(client, messages=turns, seed=3).usage.prompt_tokens_details.cached_tokens == 0


def test_text_and_its_places(hello):
    status, headers, body = send(hello, "GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    body = body.replace(b"http://www.w3.org/2000/svg", b"")  # the name of SVG's elements, which nothing loads
    assert not [mark for mark in (b"://", b"src=", b"href=", b"@import", b"url(") if mark in body], "the page loads nothing else"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert send(hello, "GET", "/health")[2]["status"] == "ok"
    assert client_of(hello).models.list().data[0].id == "scripted"
    assert client_of(hello).models.retrieve("scripted").created > 0
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client_of(hello).models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="not trained to make embeddings"):
        client_of(hello).embeddings.create(model="any", input="hi")
    assert send(hello, "GET", "/v2/none")[2]["error"]["type"] == "invalid_request_error"
    assert send(hello, "GET", "/v1/completions")[0] == 405


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"n": 0}, "n", "1 to 32"),
        ({"n": 33}, "n", "1 to 32"),
        ({"n": 7}, "n", "at most 6"),
        ({"top_logprobs": 2}, "top_logprobs", "requires logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"prediction": {"type": "x"}}, "prediction.type", "content"),
        ({"temperature": 3}, "temperature", "0 to 2"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": 1.5}, "top_p", "0 to 1"),
        ({"max_tokens": 0}, "max_tokens", "it must be 1 or more, or -1"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "more than the limit"),
        ({"max_tokens": 10**50}, "max_tokens", "40 digits"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": ["x" * 1001]}, None, "1001"),
        ({"stop": [1]}, "stop", "strings"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-2 to 2"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "-100 to 100"),
        ({"logit_bias": {"99999": 1}}, None, "vocabulary"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": "must"}, "tool_choice", "'required'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "then"}}}, "tool_choice", "not among"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "cat", "content": ""}]}, "messages[0].role", "one of system"),
        ({"messages": user({"type": "image_url"})}, f"{PART}.image_url.url", "fetches nothing"),
        ({"messages": user(image("https://example.com/a.png"))}, f"{PART}.image_url.url", "fetches nothing"),
        ({"messages": user(image("file:///etc/passwd"))}, f"{PART}.image_url.url", "fetches nothing"),
        ({"messages": user(image("data:image/png;base64,%%%"))}, f"{PART}.image_url.url", "is not base64"),
        ({"messages": user(SOUND)}, f"{PART}.input_audio.format", "one of wav, mp3, flac"),
        ({"messages": user({"type": "video_url"})}, f"{PART}.type", "one of text, input_text, output_text, image_url, input_audio"),
        ({"messages": [{"role": "tool", "content": "", "tool_call_id": "x"}]}, "messages[0].tool_call_id", "earlier"),
        ({"messages": [HI[0]] * (MAX_MESSAGES + 1)}, "messages", "at most"),
        ({"tools": [{"name": "x"}]}, "tools[0].type", "function"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a text or a list of parts"),
        ({"seed": 1.5}, "seed", "an integer"),
        ({"stream": "yes"}, "stream", "true or false"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(hello, fields, param, says):
    error = refused(hello, {"messages": HI, **fields})
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


def test_the_servers_output_has_no_traceback_of_a_clients_mistake(hello, caplog):
    log = logging.getLogger("uvicorn.error")
    log.addHandler(caplog.handler)
    try:
        refused(hello, {"messages": HI, "stop": ["x" * 1001]})
        send(hello, "GET", "/health")  # by now the first request has ended on the server too
    finally:
        log.removeHandler(caplog.handler)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "list"),
        (b'{"temperature": NaN}', "NaN"),
        (b"\xff", "not JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a":' * 100_000, "levels"),
        (b'{"messages":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "levels"),
    ],
)
def test_bodies_that_are_no_requests(hello, body, says):
    assert says in refused(hello, body)["message"]


def test_sizes_are_limited(hello):
    for path, limit in (("/v1/completions", TEXT_BODY), ("/v1/chat/completions", MEDIA_BODY)):
        status, _, body = send(hello, "POST", path, b" " * (limit.size + 1))
        assert (status, body["error"]["type"]) == (413, "invalid_request_error")
    chunked = iter([b" " * 65536] * (TEXT_BODY.size // 65536 + 1))  # no length is announced
    connection = http.client.HTTPConnection(urlsplit(hello.url).netloc, timeout=30)
    connection.request("POST", "/v1/completions", chunked, encode_chunked=True, headers={"Transfer-Encoding": "chunked"})
    assert connection.getresponse().status == 413
    connection.close()
    assert refused(hello, {"prompt": [1, 10**7]}, "/v1/completions")["message"].startswith("the prompt has a token id outside")


def test_other_names_and_websites_are_turned_away(hello):
    assert send(hello, "GET", "/health", Host="localhost:1")[0] == 200
    assert send(hello, "GET", "/health", Host="[::1]:8080")[0] == 200
    for host in ("rebound.example", "[::1]evil.com", "[::1", "localhost:80.evil.com", "localhost]"):
        status, _, body = send(hello, "GET", "/health", Host=host)
        assert (status, body["error"]["code"]) == (403, "wrong_host")
    status, headers, body = send(hello, "POST", "/v1/chat/completions", b"{}", Origin="https://site.example")
    assert (status, body["error"]["code"]) == (403, "wrong_origin")
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert send(hello, "GET", "/health", Origin=hello.url)[0] == 200


def test_a_key_is_asked_for():
    with scripted_server("ok", keys=["secret"]) as server:
        assert ask(client_of(server, "secret")).choices[0].message.content == "ok"
        for wrong in ("secre", "secret2", "é"):
            status, headers, _ = send(server, "GET", "/v1/models", Authorization=f"Bearer {wrong}")
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
        with pytest.raises(openai.AuthenticationError):
            ask(client_of(server, "wrong"))
        assert send(server, "GET", "/metrics")[0] == 401
        assert send(server, "GET", "/health")[0] == 200
        assert send(server, "GET", "/")[0] == 200


def test_the_queue_is_bounded_and_waiting_clients_may_leave():
    going = threading.Event()
    with scripted_server("a long answer", waiting=1) as server:
        server.batch.before_forward = lambda: going.wait(30) and None
        threads = [threading.Thread(target=lambda: answers.append(ask(client_of(server)))) for _ in range(2)]
        answers: list[Any] = []
        try:
            for i, thread in enumerate(threads):
                thread.start()
                assert wait(lambda count=i + 1: sum(server.worker.load()) == count)
            status, headers, body = send(server, "POST", "/v1/chat/completions", {"messages": HI})
            assert (status, body["error"]["code"]) == (503, "queue_full")
            assert int(headers["retry-after"]) > 0
            status, headers, body = send(server, "POST", "/v1/messages", {"messages": HI})
            assert (status, body["error"]["type"]) == (503, "overloaded_error")
            assert int(headers["retry-after"]) > 0
        finally:
            going.set()
        for thread in threads:
            thread.join()
        assert [a.choices[0].message.content for a in answers] == ["a long answer"] * 2
        settled(server)


def test_a_client_that_leaves_frees_its_session_and_disturbs_nobody():
    with scripted_server(lambda _, before: "x" * 1900 if "much" in before else "y" * 900, count=2, waiting=0) as server:
        server.batch.before_forward = lambda: time.sleep(0.002)
        much: Any = [{"role": "user", "content": "much"}]
        beside: list[Any] = []
        thread = threading.Thread(target=lambda: beside.append(ask(client_of(server))))
        thread.start()
        assert wait(lambda: server.worker.load()[0] == 1)
        with ask(client_of(server), messages=much, stream=True) as stream:
            for _ in range(5):
                next(stream)
            assert server.worker.load() == (2, 0)
        assert wait(lambda: server.worker.load()[0] < 2)
        leaving = asked(server, {"messages": much, "temperature": 0})
        time.sleep(0.1)
        leaving.close()
        thread.join()
        assert beside[0].choices[0].message.content == "y" * 900
        settled(server)
        assert max(len(target.rows) for target in server.batch.targets) < 1000, "nobody went on for 1900 tokens"


def test_a_failing_backend_ends_what_runs_and_nothing_else():
    failures = iter([BackendError("llama.cpp failed in /secret/path"), ValueError("a bug")])

    def fail() -> None:
        raise next(failures)

    with scripted_server("fine") as server:
        for _ in range(2):
            server.batch.before_forward = fail
            with pytest.raises(openai.InternalServerError, match="the model failed") as caught:
                ask(client_of(server))
            assert caught.value.status_code == 500
            assert "secret" not in str(caught.value)
            assert "Traceback" not in str(caught.value)
        server.batch.before_forward = lambda: None
        assert ask(client_of(server)).choices[0].message.content == "fine"
        assert "secret" in server.notes[0]
        assert "ValueError: a bug" in server.notes[1]


def test_what_runs_is_told_when_the_server_ends():
    with scripted_server("z" * 1900) as server:
        server.batch.before_forward = lambda: time.sleep(0.002)
        stream = ask(client_of(server), stream=True)
        next(stream)
        server.worker.close()
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client_of(server))
        assert caught.value.status_code == 503


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
