"""The server over scripted chats, in a thread: real HTTP, no model. And the server as a command in a child process."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

for library in ("uvicorn", "starlette"):
    pytest.importorskip(library, reason="needs edge-mtp[serve]")

import uvicorn.server

from chat_words import SavableSpeakingTarget, SpeakingTarget, chat_session
from edge_devices.energy.live import SharedWatch
from edge_runtime.interfaces import DraftRequest, Logits
from edge_runtime.server.engine.worker import Worker
from edge_runtime.server.serve import client_names
from edge_runtime.session.batch import Sessions
from edge_runtime.session.row_equality import RowEquality
from edge_runtime.session.session import Session
from edge_runtime.text.chat_template import ChatTemplate, bundle_template
from polling import wait

# Whether reading rows from the prompt cache pays is measured; for a small pair on a busy machine it may not. Here it always does.
MAIN = """
from edge_runtime.cli.run import main
from edge_runtime.session import prompt_cache
prompt_cache.SPEEDUP = 0.0
main()
"""


class _Impatient:
    """asyncio for uvicorn, which looks every 0.1 seconds whether it shall end, and waits as long when it does: every 0.01 for tests."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


uvicorn.server.asyncio = _Impatient()  # type: ignore[assignment]
HI: Any = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
CALL = '<|tool_call>call:now{zone:<|"|>UTC<|"|>}<tool_call|>'
clients: list[Any] = []


class SpeakingTogether:
    """Sessions of `chat_words` side by side; `before_forward` is called before each verify."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.sessions = list(sessions)
        self.targets: list[Any] = [session.target for session in sessions]
        self.before_forward: Callable[[], None] = lambda: None

    def draft_all(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[] for _ in requests]

    def verify_all(self, batches: Sequence[tuple[int, Sequence[int]]]) -> list[Logits]:
        self.before_forward()
        return [self.targets[number].verify(tokens) for number, tokens in batches]

    def close(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True, kw_only=True)
class Scripted:
    """A server that runs: where, on what, what it said to the person who started it, and its line about each request."""

    url: str
    batch: SpeakingTogether
    worker: Worker
    notes: list[str]
    lines: list[str]

    @property
    def vocabulary(self) -> Any:
        """That of its pair, which the threads for prompts ask."""
        return self.batch.sessions[0].vocabulary


def scripted_worker(
    *replies: str | Callable[[int, str], str],
    count: int = 1,
    waiting: int = 4,
    context: int = 2048,
    watch: SharedWatch | None = None,
    clients: Sequence[str] = ("",),
    savable: bool = False,
    template: str | None = None,
    **options: Any,
) -> tuple[Worker, SpeakingTogether, list[str]]:
    """A worker, not started, whose `count` sessions all give these replies; where `savable`, their rows can be copied.

    `template`: the source of the chat template, where it is not the built-in one.
    """
    kind = SavableSpeakingTarget if savable else SpeakingTarget
    own = [chat_session(*replies, context=context, kind=kind) for _ in range(count)]
    batch = SpeakingTogether(own)
    notes: list[str] = []
    vocabulary = own[0].vocabulary
    turns = bundle_template(own[0].bundle, vocabulary) if template is None else ChatTemplate(template, vocabulary)
    worker = Worker(Sessions(own, batch), turns, waiting=waiting, notify=notes.append, watch=watch, clients=clients, **options)
    return worker, batch, notes


@contextlib.contextmanager
def scripted_server(
    *replies: Any,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    description: str | None = None,
    answers: bool = False,
    buffer: int | None = None,
    connections: int = 64,
    **sessions: Any,
) -> Iterator[Scripted]:
    """Serves scripted replies on a free port until the block ends; the model says that it is `description`, and whether it answers.

    `buffer`: bytes that the system keeps of what a client has not read; `connections`: how many there is room for.
    """
    from edge_runtime.server.app import Api, make_app
    from edge_runtime.server.engine.idle import WorkerOnDemand
    from edge_runtime.server.http.connections import server_config
    from edge_runtime.server.http.guard import LOOPBACK_NAMES, AccessLog, Guard
    from edge_runtime.server.model_card import ModelCard
    from edge_runtime.session.monitor import Monitor

    worker, batch, notes = scripted_worker(*replies, **sessions, clients=client_names(keys))
    card = ModelCard(
        name="scripted",
        context=2048,
        trained_context=4096,
        sessions=1,
        drafter="none",
        kernels=None,
        files_format="gguf",
        template="",
        manifest=replace(batch.sessions[0].bundle.manifest, description=description),
        answers=answers,
        rows=RowEquality(compared=13, different=0, largest=0.0),
        fingerprint="fp_scripted",
    )
    lines: list[str] = []
    api = Api(WorkerOnDemand(lambda: contextlib.nullcontext(worker), watch=worker.watch), Monitor(), card, notes.append)
    app = AccessLog(Guard(make_app(api), hosts=LOOPBACK_NAMES, keys=keys, origins=origins), lines.append)
    server = uvicorn.Server(server_config(app, connections))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)  # connections inherit it
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        worker.start()
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield Scripted(url=url, batch=batch, worker=worker, notes=notes, lines=lines)
        finally:
            worker.close()
            server.should_exit = True
            thread.join()


class Held:
    """A method of an object that waits for `going` where `holds` its first argument; `begun` is set when it does."""

    def __init__(self, owner: Any, name: str, holds: Callable[[Any], bool] = lambda _: True) -> None:
        self.begun, self.going = threading.Event(), threading.Event()
        self.arguments: list[Any] = []
        self.threads: set[str] = set()
        method = getattr(owner, name)

        def held(argument: Any, **options: Any) -> Any:
            self.arguments.append(argument)
            self.threads.add(threading.current_thread().name.partition("_")[0])
            if holds(argument):
                self.begun.set()
                self.going.wait(30)
            return method(argument, **options)

        setattr(owner, name, held)


def settled(server: Scripted) -> None:
    """Waits until no request runs or waits."""
    assert wait(lambda: server.worker.load() == (0, 0))


def asked(server: Scripted, body: Any, path: str = CHAT, **headers: str) -> http.client.HTTPConnection:
    """Sends a request whose answer nobody has read yet."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    connection.request("POST", path, json.dumps(body).encode(), headers)
    return connection


def send(server: Scripted | Child | str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
    """Sends a request, with a body as bytes or as JSON; returns status, headers and the response, parsed where it is JSON."""
    connection = http.client.HTTPConnection(urlsplit(server if isinstance(server, str) else server.url).netloc, timeout=30)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        text, fields = response.read(), {name.lower(): value for name, value in response.getheaders()}
        return response.status, fields, json.loads(text) if fields.get("content-type", "").startswith("application/json") else text or None
    finally:
        connection.close()


def client_of(server: Scripted | str, key: str = "none") -> Any:
    """An openai client of a server; the tests of a process close all of them at their end."""
    openai = pytest.importorskip("openai", reason="needs edge-mtp[dev]")
    url = server if isinstance(server, str) else server.url
    clients.append(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120))
    return clients[-1]


def ask(client: Any, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "scripted", "messages": HI, "temperature": 0, **fields})


class Child:
    """`edge-run serve BUNDLE` in a child process on a free port."""

    def __init__(self, bundle: Path, *options: str, **environment: str) -> None:
        self.lines: list[str] = []
        self._unread: queue.Queue[str | None] = queue.Queue()
        command = [sys.executable, "-c", MAIN, "serve", str(bundle), "--port", "0", *options]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = self._wait_for("serving at ").partition("serving at ")[2].split()[0]

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends a signal, waits for the end, and returns the exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(timeout=60)
        finally:
            self.process.kill()
            self._reader.join()
            assert self.process.stderr is not None
            self.process.stderr.close()

    def _wait_for(self, words: str) -> str:
        deadline = time.monotonic() + 300
        while (line := self._unread.get(timeout=deadline - time.monotonic())) is not None:
            if words in line:
                return line
        raise AssertionError(f"the server ended: {self.lines}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            self._unread.put(line)
        self._unread.put(None)
