"""Clients with different keys: nothing that a server keeps of one is used for another, or revealed to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chat_server import Scripted, scripted_server, send
from edge_runtime.media.encoder_inputs import SIDE, Image
from edge_runtime.media.soft_rows import LazyEncoder
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
