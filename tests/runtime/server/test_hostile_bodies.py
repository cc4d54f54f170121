"""Bodies that would stop the server or take its memory: predictions, ids to decode, lists without end, numbers beyond the range."""

from __future__ import annotations

import http.client
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("uvicorn", reason="needs edge-mtp[serve]")
pytest.importorskip("starlette", reason="needs edge-mtp[serve]")

from chat_server import scripted_server, send
from edge_runtime.session.session import Session

HI = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def test_a_prediction_is_cut_and_tokenized_in_the_thread_for_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "_weighs", True)
    with scripted_server("Hello.", context=256) as server:
        vocabulary = server.worker._sessions[0].vocabulary
        encode, calls = vocabulary.encode, []

        def watched(text: str, **options: Any) -> list[int]:
            if "predicted" in text:
                calls.append((threading.current_thread().name.startswith("edge-mtp prompts"), len(text)))
            return encode(text, **options)

        vocabulary.encode = watched  # type: ignore[method-assign]
        status, _, body = send(
            server, "POST", "/v1/chat/completions", HI | {"prediction": {"type": "content", "content": "predicted " * 400_000}}
        )
        assert (status, body["choices"][0]["message"]["content"]) == (200, "Hello.")
        assert calls == [(True, 16 * 256)]


def test_ids_are_decoded_in_the_thread_for_prompts_and_count_as_waiting() -> None:
    with scripted_server("Hello.", waiting=0) as server:
        vocabulary = server.worker._sessions[0].vocabulary
        piece, begun, going = vocabulary.piece, threading.Event(), threading.Event()

        def wait(token: int, **options: Any) -> bytes:
            threads.add(threading.current_thread().name.partition("_")[0])
            begun.set()
            going.wait(30)
            return piece(token, **options)

        vocabulary.piece = wait  # type: ignore[method-assign]
        threads: set[str] = set()
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.append(send(server, "POST", "/detokenize", {"tokens": [100 + ord("a")]})))
        asking.start()
        begun.wait(30)
        assert send(server, "GET", "/health")[2]["waiting"] == 1
        assert send(server, "POST", "/detokenize", {"tokens": [2]})[0] == 503
        going.set()
        asking.join()
        assert (found[0][0], found[0][2]["content"], threads) == (200, "a", {"edge-mtp prompts"})


def test_ids_beyond_the_context_are_refused() -> None:
    with scripted_server("Hello.") as server:
        server.worker._sessions[0].vocabulary.piece = lambda *_, **__: pytest.fail("it was decoded")  # type: ignore[method-assign]
        status, _, body = send(server, "POST", "/detokenize", {"tokens": [2] * 2049})
        assert (status, body["error"]["message"]) == (400, "tokens has 2049 items; at most 2048 are allowed")


def test_ids_of_a_client_that_left_are_not_decoded() -> None:
    with scripted_server("Hello.") as server:
        begun, going, decoded = threading.Event(), threading.Event(), []
        encode, decode = server.worker._prompts.encode, server.worker._prompts.decode
        server.worker._prompts.encode = lambda prompt: (begun.set(), going.wait(30), encode(prompt))[2]  # type: ignore[method-assign]
        server.worker._prompts.decode = lambda tokens: (decoded.append(tokens), decode(tokens))[1]  # type: ignore[method-assign]
        first = threading.Thread(target=lambda: send(server, "POST", "/tokenize", {"content": "a"}))
        first.start()
        begun.wait(30)
        gone = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
        gone.request("POST", "/detokenize", b'{"tokens": [2]}')
        while server.worker.load() != (0, 2):
            time.sleep(0.001)
        gone.close()
        while server.worker.load() != (0, 1):
            time.sleep(0.001)
        going.set()
        first.join()
        assert send(server, "POST", "/detokenize", {"tokens": [3]})[0] == 200
        assert decoded == [[3]]
