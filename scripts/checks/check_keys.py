"""Measures how long one key waits behind another key's long answers, and whether those stay the same.

    python scripts/checks/check_keys.py BUNDLE --tokens 4000 --seconds 60 -- --backend onnx --sessions 1

Serves BUNDLE with two keys. Key A's eight prompts are answered one after the other, alone; then all eight at once, again and again, while
key B sends chats of four tokens, one after the other. The exit code is 1 if a chat's answer took longer than --limit beyond the median of
the same chats alone, or if an answer of A differs from what it was alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

_ADDRESS = re.compile(r"http://\S+")
KEYS = ("key-of-a", "key-of-b")
PROMPTS = [f"class Stack{number}:\n    def push(self, item):\n        " for number in range(8)]


@contextlib.contextmanager
def served(bundle: Path, *options: str) -> Iterator[str]:
    """Serves a bundle in a child process; yields the address."""
    code = "from edge_runtime.cli.run import main; main()"
    command = [sys.executable, "-c", code, "serve", str(bundle), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        try:
            address = next((match for line in server.stdout if line.startswith("serving") and (match := _ADDRESS.search(line))), None)
            if address is None:
                raise click.ClickException("the server did not start; try the same options with edge-run serve")
            threading.Thread(target=lambda: [None for _ in server.stdout or ()], daemon=True).start()
            yield address.group()
        finally:
            server.terminate()


def percentile(values: list[float], share: float) -> float:
    """Returns the value below which that share of the values is."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def answer(address: str, key: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Sends a request; returns the body of its answer. Raises ClickException for a refusal."""
    with contextlib.closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=900)) as connection:
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        connection.request("POST", path, json.dumps({"temperature": 0, **fields}).encode(), headers)
        response = connection.getresponse()
        body: dict[str, Any] = json.loads(response.read())
        if response.status != 200:
            raise click.ClickException(f"a request was refused with status {response.status}: {body}")
        return body


def long_answer(address: str, prompt: str, tokens: int) -> dict[str, Any]:
    """One of key A's answers."""
    return answer(address, KEYS[0], "/v1/completions", {"prompt": prompt, "max_tokens": tokens})


def chats(address: str, seconds: float) -> list[float]:
    """Returns the seconds that each of key B's chats took."""
    measured, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.perf_counter()
        answer(address, KEYS[1], "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
        measured.append(time.perf_counter() - begin)
        time.sleep(0.02)
    return measured


class Load:
    """Key A's requests without end; `texts` are the answers that ended, `tokens` their tokens."""

    def __init__(self, address: str, tokens: int) -> None:
        self.texts: list[tuple[str, str]] = []
        self.tokens = 0
        self._address, self._limit, self._over = address, tokens, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(prompt,)) for prompt in PROMPTS]

    def _run(self, prompt: str) -> None:
        while not self._over.is_set():
            body = long_answer(self._address, prompt, self._limit)
            self.texts.append((prompt, body["choices"][0]["text"]))
            self.tokens += body["usage"]["completion_tokens"]

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """Around what runs beside the load; waits for the answers that have begun."""
        for thread in self._threads:
            thread.start()
        time.sleep(1)
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()


def figures(measured: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest."""
    values = {"median_s": statistics.median(measured), "p99_s": percentile(measured, 0.99), "max_s": max(measured)}
    return {name: round(value, 3) for name, value in values.items()}


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--tokens", type=click.IntRange(1), default=4000, help="Most tokens of one of key A's answers.")
@click.option("--seconds", type=click.FloatRange(1), default=60.0, help="How long key B sends chats behind them.")
@click.option("--limit", type=float, default=2.0, help="Most seconds that a chat may take beyond the same chats alone.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(bundle: Path, tokens: int, seconds: float, limit: float, options: tuple[str, ...]) -> None:
    """Serve BUNDLE for two keys and print how long one waits for the other, as JSON lines. OPTIONS after -- go to `edge-run serve`."""
    keys = [word for key in KEYS for word in ("--api-key", key)]
    with served(bundle, *keys, *options) as address:
        alone = chats(address, 5)
        click.echo(json.dumps({"chats": "alone", "requests": len(alone), **figures(alone)}))
        expected, begin = {prompt: long_answer(address, prompt, tokens) for prompt in PROMPTS}, time.monotonic()
        load = Load(address, tokens)
        with load.going():
            behind = chats(address, seconds)
        took = time.monotonic() - begin
    changed = sum(expected[prompt]["choices"][0]["text"] != text for prompt, text in load.texts)
    line = {"chats": "behind long answers", "requests": len(behind), **figures(behind)}
    long = {"long_answers": len(load.texts), "changed": changed, "tokens": load.tokens, "tokens_per_second": round(load.tokens / took, 1)}
    click.echo(json.dumps(line | long))
    if max(behind) - statistics.median(alone) > limit or changed:
        raise click.ClickException(f"a chat may take {limit:g} s longer than alone, and no answer of the other key may change")


if __name__ == "__main__":
    main()
