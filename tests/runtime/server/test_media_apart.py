"""Images and sound are decoded apart: nobody else's text waits, their processor time is limited together, and they end with the client."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from chat_server import HI, asked, scripted_server, send
from edge_devices import children
from edge_runtime.media import reading
from edge_runtime.media.soft_rows import MediaPrompt
from edge_runtime.server.engine import worker as engine
from edge_runtime.session.session import Session
from polling import wait

SPIN = "import time\nwhile time.process_time() < 60: pass"
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(100)).decode()}}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[list[float], list[subprocess.Popen[bytes]]]]:
    """Replaces the decoder by a program; returns the seconds that each was given, and the processes."""

    def replace(code: str) -> tuple[list[float], list[subprocess.Popen[bytes]]]:
        value: list[float] = []
        processes: list[subprocess.Popen[bytes]] = []

        def command(_: int, seconds: float) -> tuple[str, ...]:
            value.append(seconds)
            return sys.executable, "-c", code

        class Noted(subprocess.Popen[bytes]):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                super().__init__(*arguments, **options)
                if code in self.args:  # the renderer of templates has a process too
                    processes.append(self)

        monkeypatch.setattr(reading, "_command", command)
        monkeypatch.setattr(children.subprocess, "Popen", Noted)
        monkeypatch.setattr(Session, "check_media", lambda _: None)
        monkeypatch.setattr(Session, "media_prompt", lambda _, ids, __: MediaPrompt(list(ids), ()))
        return value, processes

    return replace


def test_text_does_not_wait_for_images_and_these_end_with_their_client(decoding: Any) -> None:
    _, processes = decoding(SPIN)
    with scripted_server("Hello.") as server:
        hostile = [asked(server, chat(*[PART] * 3)) for _ in range(3)]
        assert wait(lambda: len(processes) == engine.DECODERS)
        assert send(server, "POST", "/v1/chat/completions", {"messages": HI})[0] == 200
        assert [process.returncode for process in processes] == [None] * engine.DECODERS
        for connection in hostile:
            connection.close()
        assert wait(lambda: server.worker.load() == (0, 0))
        assert wait(lambda: all(process.returncode is not None for process in processes))
        assert len(processes) <= 3  # no second image of any request was begun


def test_the_media_of_a_request_share_their_processor_time(decoding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "DECODING_SECONDS", 1.0)
    value, processes = decoding("import time\nwhile time.process_time() < 0.6: pass\nprint('{\"shape\": [48, 48, 3]}')\nprint(' ' * 6911)")
    with scripted_server("Hello.") as server:
        status, _, body = send(server, "POST", "/v1/chat/completions", chat(*[PART] * 8, n=2))
    assert (status, "took too much time" in body["error"]["message"]) == (400, True)
    assert value[0] == 1.0
    assert 0 < value[1] < 0.4
    assert len(processes) == 2


def test_a_server_that_stops_ends_the_decoding(decoding: Any) -> None:
    _, processes = decoding(SPIN)
    answers: list[str] = []
    with scripted_server("Hello.") as server:
        asking = threading.Thread(target=lambda: answers.append(str(send(server, "POST", "/v1/chat/completions", chat(PART))[2])))
        asking.start()
        assert wait(lambda: processes)
        server.worker.close()
        asking.join()
    assert processes[0].returncode is not None
    assert "decoding took" not in answers[0], "it was ended, and did not come to its own limit"
