"""Bodies that would stop the server or take its memory: predictions, ids to decode, lists without end, numbers beyond the range."""

from __future__ import annotations

import threading
from typing import Any

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
