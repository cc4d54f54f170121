"""The line that the terminal shows of each request, its id, and the paths that clients write."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openai", reason="needs edge-mtp[dev]")
import openai

from chat_server import CHAT, HI, Scripted, ask, asked, client_of, clients, scripted_server, send
from edge_runtime.server.http.guard import AccessLog
from polling import wait

SAID = "Hello, friend."


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with scripted_server(SAID, count=2) as running:
        yield running


def lines_of(server: Scripted, send_it: Any, count: int = 1) -> list[str]:
    before = len(server.lines)
    send_it()
    assert wait(lambda: len(server.lines) == before + count)
    return server.lines[before:]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI}),
        ("/v1/completions", {"prompt": "<|turn>model\n", "max_tokens": 15}),
        ("/v1/responses", {"input": "hi"}),
        ("/api/chat", {"messages": HI}),
    ],
)
def test_a_line_has_tokens_and_speed_and_no_text(server: Scripted, path: str, body: Any, stream: bool) -> None:

    def read() -> None:
        with contextlib.closing(asked(server, {**body, "stream": stream}, path)) as connection:
            connection.getresponse().read()

    (line,) = lines_of(server, read)
    pattern = rf"POST {path} 200 in \d+\.\d\d s: \d+ prompt tokens( \(\d+ cached\))?, 15 generated, \d+\.\d tok/s"
    assert re.fullmatch(pattern, line), line


def test_a_line_has_the_cached_part_of_a_prompt() -> None:
    with scripted_server(SAID) as server:
        turns: Any = [*HI, {"role": "assistant", "content": SAID}, {"role": "user", "content": "and?"}]
        first, second = (lines_of(server, lambda sent=sent: ask(client_of(server), messages=sent))[0] for sent in (HI, turns))
    assert "cached" not in first
    assert re.search(r"\d+ prompt tokens \(\d+ cached\)", second)


def test_refusals_name_the_field_and_other_requests_their_status(server: Scripted) -> None:
    (line,) = lines_of(server, lambda: send(server, "POST", CHAT, {"messages": HI, "top_p": 2}))
    assert re.fullmatch(rf"POST {CHAT} 400 in \d+\.\d\d s: top_p", line)
    (line,) = lines_of(server, lambda: send(server, "GET", "/health"))
    assert re.fullmatch(r"GET /health 200 in \d+\.\d\d s", line)
    (line,) = lines_of(server, lambda: send(server, "GET", "/%1b[31mred%0a?key=secret"))
    assert re.fullmatch(r"GET /\\x1b\[31mred\\n 404 in \d+\.\d\d s", line), "nothing that a terminal would obey, and no query"
    (line,) = lines_of(server, lambda: send(server, "GET", "/health", Host="elsewhere.example"))
    assert line.startswith("GET /health 403 in ")


def test_a_client_that_leaves_is_in_its_line() -> None:
    with scripted_server("x" * 1500) as server:
        leaving = asked(server, {"messages": HI, "stream": True})
        leaving.getresponse().read(200)
        (line,) = lines_of(server, leaving.close)
        assert line.startswith(f"POST {CHAT} 200 in ")
        assert line.endswith(", the client left")


def test_a_terminal_that_is_gone_ends_no_request() -> None:
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    def gone(_line: str) -> None:
        raise BrokenPipeError

    asyncio.run(AccessLog(app, gone)({"type": "http", "method": "GET", "path": "/", "headers": []}, None, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 200


def test_a_response_has_an_id(server: Scripted) -> None:
    answer = client_of(server).chat.completions.with_raw_response.create(model="scripted", messages=HI)
    assert answer.parse()._request_id == answer.headers["x-request-id"]
    assert answer.headers["x-request-id"].startswith("req_")
    assert send(server, "GET", "/health", X_Request_Id="mine-7")[1]["x-request-id"] == "mine-7"
    assert send(server, "GET", "/health", X_Request_Id="not mine")[1]["x-request-id"].startswith("req_")
    assert send(server, "GET", "/none")[1]["x-request-id"] != send(server, "GET", "/none")[1]["x-request-id"]


def test_paths_without_their_prefix_or_with_a_slash_at_the_end(server: Scripted) -> None:
    bare = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    clients.append(bare)
    assert ask(bare).choices[0].message.content == SAID
    assert bare.responses.create(model="scripted", input="hi").output_text == SAID
    assert [model.id for model in bare.models.list()] == ["scripted"]
    assert bare.models.retrieve("scripted").id == "scripted"
    for path in ("/v1/chat/completions/", "/chat/completions/", "//v1//chat/completions"):
        assert send(server, "POST", path, {"messages": HI})[0] == 200
    for path in ("/v1/models/", "/models/", "/v1/models/scripted/", "/health/", "/v1/health", "/props/"):
        assert send(server, "GET", path)[0] == 200


def test_health_is_open_by_each_of_its_paths() -> None:
    with scripted_server(SAID, keys=["secret"]) as server:
        assert [send(server, "GET", path)[0] for path in ("/health", "/v1/health", "/health/", "/models")] == [200, 200, 200, 401]


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/completions", "/v1/completions?"),
        ("/v2/none", "GET /v1/models"),
        ("/v1/v1/chat/completions", "/v1/chat/completions?"),
        ("/api/chats", "/api/chat?"),
        ("/v1/chat/completion", "/v1/chat/completions?"),
    ],
)
def test_a_path_that_does_not_exist_is_told_the_nearest(server: Scripted, path: str, near: str) -> None:
    status, headers, body = send(server, "POST", path, {"messages": HI})
    assert (status, "location" in headers) == (404, False), "no path is redirected"
    assert near in str(body["error"])


def test_a_wrong_method_is_told_the_right_one(server: Scripted) -> None:
    status, _, body = send(server, "GET", CHAT)
    assert (status, "this path takes POST" in body["error"]["message"]) == (405, True)


@pytest.mark.parametrize("origin", ["http://localhost", "http://localhost:3000", "https://127.0.0.1:5173", "http://[::1]:80"])
def test_pages_of_this_machine_may_be_allowed_at_any_port(origin: str) -> None:
    preflight = {"Origin": origin, "Access_Control_Request_Method": "POST"}
    with scripted_server(SAID, origins=["localhost"]) as server:
        status, headers, _ = send(server, "OPTIONS", CHAT, **preflight)
        assert (status, headers["access-control-allow-origin"]) == (200, origin)
        assert send(server, "POST", CHAT, {"messages": HI}, Origin=origin)[0] == 200
        for other in (
            "https://site.example",
            "http://localhost.evil.example",
            "http://evil.example:80@localhost",
            "null",
            "file://localhost",
        ):
            assert send(server, "POST", CHAT, {"messages": HI}, Origin=other)[0] == 403
    with scripted_server(SAID) as server:
        assert send(server, "OPTIONS", CHAT, **preflight)[0] == 403
