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


def test_rows_are_dropped_before_a_request_of_another_client_can_fail() -> None:
    worker, batch, _ = scripted_worker("Hello.", clients=KEYS)
    target = batch.targets[0]
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
