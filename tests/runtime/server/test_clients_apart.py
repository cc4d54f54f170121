"""Clients with different keys: nothing that a server keeps of one is used for another, or revealed to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chat_server import Scripted, scripted_server, scripted_worker, send
from edge_runtime.media.encoder_inputs import SIDE, Image
from edge_runtime.media.soft_rows import LazyEncoder
from edge_runtime.server.engine.jobs import Job
from edge_runtime.server.requests.completions import read_chat
from edge_runtime.server.serve import client_names
from edge_runtime.session.session import Session

SECRET = {"messages": [{"role": "user", "content": "the secret is long and has many words " * 8}], "temperature": 0, "max_tokens": 4}
KEYS = ("first", "second")


def cached(server: Scripted, key: str, body: dict[str, Any] = SECRET) -> int:
    status, _, answer = send(server, "POST", "/v1/chat/completions", body, authorization=f"Bearer {key}")
    assert status == 200
    assert answer["usage"]["prompt_tokens"] > 300
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_no_prefix_is_reused_for_another_key() -> None:
    with scripted_server("Hello.", keys=KEYS) as server:
        reused = [cached(server, key) > 300 for key in ("first", "first", "second", "second", "first")]
    assert reused == [False, True, False, True, False]


def test_with_several_sessions_both_keep_their_own() -> None:
    with scripted_server("Hello.", keys=KEYS, count=3) as server:
        reused = [cached(server, key) > 300 for key in ("first", "first", "second", "first", "second")]
    assert reused == [False, True, False, True, True]


def test_another_key_has_not_even_a_token_of_them() -> None:
    with scripted_server("Hello.", keys=KEYS) as server:
        assert [cached(server, "first"), cached(server, "second")] == [0, 0]


def test_one_key_has_its_prefixes_back() -> None:
    with scripted_server("Hello.", keys=["first"]) as server:
        assert [cached(server, "first") > 0 for _ in range(3)] == [False, True, True]


def test_rows_are_dropped_before_a_request_of_another_client_can_fail() -> None:
    worker, _, _ = scripted_worker("Hello.", clients=KEYS)
    target = worker._sessions[0].target
    target.prefill([2, 101, 102, 103])
    job = Job(read_chat(SECRET).choices[0], lambda _: None, client=1)
    job.prompt = [2, 101, 102, 103, 104]
    worker._waiting.append(job)
    worker._assign()
    assert (target.length, worker._clients) == (0, [1])


def test_each_key_has_prompts_of_its_own_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, _, _ = scripted_worker("Hello.", count=2, clients=client_names(KEYS))
    generate, names = Session.generate, []

    def named(self: Session, *arguments: Any, client: str = "", **options: Any) -> Any:
        names.append(client)
        return generate(self, *arguments, client=client, **options)

    monkeypatch.setattr(Session, "generate", named)
    for client in (1, 0):
        job = Job(read_chat(SECRET).choices[0], lambda _: None, client=client)
        job.prompt = [2, 101, 102, 103, 104]
        worker._waiting.append(job)
    worker._assign()
    assert sorted(names) == sorted(client_names(KEYS))
    assert names[0] != names[1] != client_names([])[0]
    assert not any(key in name for key in KEYS for name in names)  # files lie about for long


def test_encoded_images_are_kept_for_one_client() -> None:
    encoder = LazyEncoder(lambda: pytest.fail("it was loaded"), "0")
    picture = Image(np.zeros((4 * SIDE, 4 * SIDE, 3), np.uint8))
    assert encoder.digest(picture) == encoder.digest(picture, 0)
    assert len({encoder.digest(picture, client) for client in range(3)}) == 3
