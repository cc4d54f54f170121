"""Who may use the server and how, and that nothing which it keeps of one key is used for another key, or revealed to it."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from chat_server import CHAT, Held, Scripted, asked, scripted_server, send
from chat_words import chat_session
from edge_runtime.media.encoder_inputs import SIDE, Image
from edge_runtime.media.soft_rows import LazyEncoder
from edge_runtime.server.engine.prompts import Prompts
from edge_runtime.server.errors import ApiError
from edge_runtime.server.requests.messages import Conversation
from edge_runtime.server.serve import allowed_hosts, client_names
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import ChatTemplate
from polling import wait

ALLOWED = "https://chat.example"
HI = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with scripted_server("Hello.", keys=["secret"], origins=[ALLOWED]) as running:
        yield running


def test_an_allowed_website_may_call_with_the_key(server: Scripted) -> None:
    preflight = {"Origin": ALLOWED, "Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization,content-type"}
    status, headers, _ = send(server, "OPTIONS", "/v1/chat/completions", **preflight)
    assert (status, headers["access-control-allow-origin"]) == (200, ALLOWED)
    assert headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in headers["access-control-allow-methods"]
    status, headers, body = send(server, "POST", "/v1/chat/completions", HI, Origin=ALLOWED, Authorization="Bearer secret")
    assert (status, headers["access-control-allow-origin"]) == (200, ALLOWED)
    assert body["choices"][0]["message"]["content"] == "Hello."
    status, headers, _ = send(server, "POST", "/v1/chat/completions", HI, Origin=ALLOWED)
    assert (status, headers["access-control-allow-origin"]) == (401, ALLOWED), "the script may read why"


def test_other_websites_may_not(server: Scripted) -> None:
    for origin in ("https://chat.example.evil", "http://chat.example", "null", "https://other.example"):
        status, headers, _ = send(server, "OPTIONS", "/v1/models", Origin=origin, Access_Control_Request_Method="GET")
        assert (status, "access-control-allow-origin" in headers) == (403, False)


def test_names_of_the_host_header() -> None:
    assert allowed_hosts("127.0.0.1") == {"localhost", "127.0.0.1", "::1"}
    assert allowed_hosts("0.0.0.0") is None
    assert allowed_hosts("0.0.0.0", ["My.Name"]) == {"localhost", "127.0.0.1", "::1", "0.0.0.0", "my.name"}


def test_several_origins_are_refused(server: Scripted) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    connection.putrequest("GET", "/v1/models")
    for name, value in (("Origin", "https://evil.example"), ("Origin", ALLOWED), ("Authorization", "Bearer secret")):
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == 403
    connection.close()


def test_a_websocket_is_refused(server: Scripted) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec_WebSocket_Version": "13",
        "Sec_WebSocket_Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    status, _, body = send(server, "GET", "/", **upgrade)
    assert (status, body["error"]["code"]) == (400, "no_websocket")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/api/chat", "/tokenize"])
def test_a_name_that_is_no_text_is_a_clients_mistake(server: Scripted, path: str) -> None:
    status, _, body = send(server, "POST", path, b'{"\\ud800": 1}', Authorization="Bearer secret")
    assert status == 400
    assert "not supported" in str(body["error"])


def test_half_a_surrogate_in_a_message_is_replaced(server: Scripted) -> None:
    body = b'{"messages": [{"role": "user", "content": "a\\ud800b"}], "temperature": 0}'
    assert send(server, "POST", "/v1/chat/completions", body, Authorization="Bearer secret")[0] == 200


def test_tokens_and_model_details() -> None:
    with scripted_server("Hello.") as server:
        chat = send(server, "POST", "/tokenize", {"messages": HI["messages"]})[2]
        usage = send(server, "POST", "/v1/chat/completions", HI)[2]["usage"]
        assert (chat["count"], chat["max_model_len"]) == (usage["prompt_tokens"], 2048)
        assert send(server, "POST", "/detokenize", {"tokens": [10**6]})[0] == 400
        assert send(server, "GET", "/props")[2]["default_generation_settings"]["n_ctx"] == 2048
        model = send(server, "GET", "/v1/models")[2]["data"][0]
        assert (model["max_model_len"], model["meta"]["rows"]["verdict"]) == (2048, "exact")
        assert send(server, "GET", "/props")[2]["rows"] == model["meta"]["rows"]
        assert send(server, "POST", "/api/show", {"model": "scripted"})[2]["model_info"]["edge_mtp.rows"] == "exact"


def test_a_prompt_of_megabytes_is_refused_before_it_is_tokenized() -> None:
    with scripted_server("Hello.", count=2) as server:
        encoded = Held(server.vocabulary, "encode", lambda _: False)
        for path, body in {
            "/v1/completions": {"prompt": "word " * 400_000},
            CHAT: {"messages": [{"role": "user", "content": "word " * 400_000}]},
        }.items():
            status, _, result = send(server, "POST", path, body)
            assert (status, result["error"]["code"]) == (400, "context_length_exceeded")
        assert max(map(len, encoded.arguments), default=0) < 100_000


def test_what_a_template_writes_besides_the_messages_is_measured_too() -> None:
    session = chat_session("Hello.")
    template = ChatTemplate("{{ tools }}{{ messages[0].tool_calls }}{{ messages[0].reasoning_content }}", session.vocabulary)
    long: Any = "word " * 400_000
    for message, tools in (
        ({"reasoning_content": long}, ()),
        ({"tool_calls": [{"name": "f", "arguments": {"x": long}}]}, ()),
        ({}, ({"description": long},)),
    ):
        prompt = Conversation(messages=({"role": "assistant", "content": "", **message},), tools=tools)
        session.vocabulary.encode = lambda *_, **__: pytest.fail("it was tokenized")  # type: ignore[method-assign]
        with pytest.raises(ApiError, match="at least"):
            Prompts(session, template).encode(prompt)


def test_abandoned_texts_are_not_tokenized_and_count_in_the_limit() -> None:
    with scripted_server("Hello.", waiting=2) as server:
        encoded = Held(server.vocabulary, "encode")
        gone = [asked(server, {"content": str(number)}, "/tokenize") for number in range(3)]
        assert encoded.begun.wait(30)
        assert wait(lambda: server.worker.load() == (0, 3))
        status, headers, _ = send(server, "POST", "/tokenize", {"content": "one more"})
        assert (status, headers["retry-after"]) == (503, "2")
        for connection in gone:
            connection.close()
        assert wait(lambda: server.worker.load() == (0, 1)), "the one that began cannot be stopped"
        encoded.going.set()
        assert send(server, "POST", CHAT, HI)[0] == 200
        assert sum(text in ("0", "1", "2") for text in encoded.arguments) == 1
        assert server.worker.load() == (0, 0)
        assert not server.notes


def test_a_slow_tokenizer_delays_nobodys_rounds() -> None:
    with scripted_server("x" * 300, count=2) as server:
        encoded = Held(server.vocabulary, "encode", lambda text: "slow" in text)
        server.batch.before_forward = lambda: time.sleep(0.002)
        done: list[int] = []
        first = threading.Thread(target=lambda: done.append(send(server, "POST", CHAT, HI)[0]))
        first.start()
        assert wait(lambda: server.worker.load()[0] > 0)
        second = threading.Thread(target=lambda: send(server, "POST", "/v1/completions", {"prompt": "slow"}))
        second.start()
        assert encoded.begun.wait(30)
        first.join()
        assert done == [200], "it ended while the other prompt was being tokenized"
        encoded.going.set()
        second.join()


SECRET = {"messages": [{"role": "user", "content": "the secret is long and has many words " * 8}], "temperature": 0, "max_tokens": 4}
KEYS = ("first", "second")


def cached(server: Scripted, key: str, body: dict[str, Any] = SECRET) -> int:
    status, _, answer = send(server, "POST", "/v1/chat/completions", body, authorization=f"Bearer {key}")
    assert status == 200
    assert answer["usage"]["prompt_tokens"] > 300
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(
    ("keys", "count", "order", "reused"),
    [
        (KEYS, 1, (0, 0, 1, 1, 0), (False, True, False, True, False)),
        (KEYS, 3, (0, 0, 1, 0, 1), (False, True, False, True, True)),
        (KEYS[:1], 1, (0, 0, 0), (False, True, True)),
    ],
    ids=["of one session", "of several sessions both keep their own", "one key has its own back"],
)
def test_no_prefix_is_reused_for_another_key(keys: tuple[str, ...], count: int, order: tuple[int, ...], reused: tuple[bool, ...]) -> None:
    with scripted_server("Hello.", keys=keys, count=count) as server:
        found = [cached(server, keys[number]) for number in order]
    assert tuple(tokens > 300 for tokens in found) == reused
    assert {found[at] for at, again in enumerate(reused) if not again} == {0}, "not even a token of another's"


def test_a_request_that_fails_leaves_another_client_no_rows() -> None:
    with scripted_server("Hello.", keys=KEYS) as server:
        assert cached(server, "first") == 0
        fails = SECRET | {"logit_bias": {"99999": 1}}
        assert send(server, "POST", "/v1/chat/completions", fails, authorization="Bearer second")[0] == 400
        assert cached(server, "second") == 0


def test_each_key_has_prompts_of_its_own_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    generate, names = Session.generate, list[str]()

    def named(self: Session, *arguments: Any, client: str = "", **options: Any) -> Any:
        names.append(client)
        return generate(self, *arguments, client=client, **options)

    monkeypatch.setattr(Session, "generate", named)
    with scripted_server("Hello.", keys=KEYS) as server:
        for key in KEYS:
            cached(server, key)
    assert names == client_names(KEYS)
    assert len({*names, *client_names([])}) == 3
    assert not any(key in name for key in KEYS for name in names)  # files lie about for long


def test_encoded_images_are_kept_for_one_client() -> None:
    encoder = LazyEncoder(lambda: pytest.fail("it was loaded"), "0")
    picture = Image(np.zeros((4 * SIDE, 4 * SIDE, 3), np.uint8))
    assert encoder.digest(picture) == encoder.digest(picture, 0)
    assert len({encoder.digest(picture, client) for client in range(3)}) == 3
