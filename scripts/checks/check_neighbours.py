"""Measures how much one client's preparation (body, template, tokens, grammar, images, sound) delays the first token of another.

    python scripts/checks/check_neighbours.py BUNDLE --seconds 10

Serves BUNDLE on 127.0.0.1, sends short chats one after the other, alone and then beside each attack of the list; two attackers send, wait
at most two seconds and leave. An attack lasts --seconds. The exit code is 1 if the 99th percentile of the delay is above --limit.
Images and sound are decoded only by a bundle with an encoder for them.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import os
import re
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

Request = tuple[str, dict[str, Any]]

ATTACKERS = 2
PATIENCE_SECONDS = 2.0
CHAT = "/v1/chat/completions"
_ADDRESS = re.compile(r"http://\S+")


def chat(content: Any, **fields: Any) -> Request:
    """Returns a chat request of one message."""
    return CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0, **fields}


def jpeg(scans: int) -> bytes:
    """Returns a progressive JPEG with that many scans, most of them the same."""
    from PIL import Image

    file = io.BytesIO()
    Image.linear_gradient("L").resize((1600, 1200)).convert("RGB").save(file, "JPEG", progressive=True, quality=60)
    data = file.getvalue()
    begin, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[begin:end] * max(0, scans - data.count(b"\xff\xda")) + data[end:]


def image(data: bytes) -> dict[str, Any]:
    """Returns the part of a message."""
    return {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64," + base64.b64encode(data).decode()}}


def sound(rate: int) -> dict[str, Any]:
    """Returns the part of a message: three seconds in 8 bits, to be resampled from an odd rate."""
    body = os.urandom(3 * rate)
    form = struct.pack("<HHIIHH", 1, 1, rate, rate, 1, 8)
    data = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(body)) + body
    wav = b"RIFF" + struct.pack("<I", len(data)) + data
    return {"type": "input_audio", "input_audio": {"format": "wav", "data": base64.b64encode(wav).decode()}}


def attacks() -> dict[str, list[Request]]:
    """Returns the requests of each attack; made here, so that nothing is computed while they are sent."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["a"] * 65_000}}}
    many = {"type": "function", "function": {"name": "f", "parameters": {"enum": ["a"] * 116_000}}}
    turns = [{"role": "user", "content": "<|turn" * 20}, {"role": "assistant", "content": "b"}] * 1024
    angles = {"type": "function", "function": {"name": "f", "description": "<" * (15 << 20)}}
    call = {"function": {"name": "f", "arguments": {}}}
    calls = [{"role": "assistant", "content": "", "tool_calls": [call] * 120}] * 250
    results = [{"role": "tool", "tool_name": "f", "content": "x"}] * 1000
    schema = {"type": "object", "properties": {f"p{number}": True for number in range(20_000)}}
    return {
        "images of 100 scans": [chat([image(jpeg(100))] * 16)],
        "images of 900 scans": [chat([image(jpeg(900))] * 4)],
        "sounds of odd rates": [chat([sound(191_999)] * 8)],
        "template: texts of tools": [chat("hi", tools=[tool])],
        "template: too many texts": [chat("hi", tools=[many])],
        "template: 2048 messages": [(CHAT, {"messages": turns, "max_tokens": 1})],
        "template: 15 MB of <": [chat("hi", tools=[angles])],
        "texts: 2000 pieces of an answer": [("/v1/responses", {"input": [{"role": "assistant", "content": "x" * 7000}] * 2000})],
        "calls: 30,000 and their results": [("/api/chat", {"messages": [*calls, *results]})],
        "grammar: 20,000 properties": [chat("hi", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})],
        "texts: 15 MB in a message": [chat("x" * (15 << 20)), chat("\u4e2d\n" * (15 << 17))],
        "tokens: a long prompt": [chat("word " * 400_000), chat("<" * 60_000), ("/tokenize", {"content": "a b" * 20_000})],
        "tokens: a prediction": [chat("hi", prediction={"type": "content", "content": "predicted " * 800_000})],
        "body: 131,000 values": [chat("hi", metadata={"a": [[]] * 65_000, "b": "x" * (8 << 20)})],
    }


def post(address: str, path: str, body: bytes, seconds: float) -> int:
    """Sends a request and reads the answer's first bytes; returns its status. Raises OSError after `seconds`."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=seconds)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def delays(address: str, seconds: float) -> list[float]:
    """Returns the seconds to the first token of short chats, one after the other."""
    path, fields = chat("hi")
    body, measured = json.dumps(fields).encode(), []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.perf_counter()
        status = post(address, path, body, 60)
        if status != 200:
            raise click.ClickException(f"a short chat was refused with status {status}")
        measured.append(time.perf_counter() - begin)
        time.sleep(0.02)
    return measured


def under_attack(address: str, requests: list[Request], seconds: float) -> tuple[list[float], Counter[str]]:
    """Returns the same beside attackers, and how these were answered."""
    bodies = [(path, json.dumps(fields).encode()) for path, fields in requests]
    answers: Counter[str] = Counter()
    over = threading.Event()

    def attack() -> None:
        while not over.is_set():
            for path, body in bodies:
                try:
                    answers[str(post(address, path, body, PATIENCE_SECONDS))] += 1
                except TimeoutError:
                    answers["left"] += 1
                except (OSError, http.client.HTTPException):
                    answers["broken off"] += 1

    threads = [threading.Thread(target=attack) for _ in range(ATTACKERS)]
    for thread in threads:
        thread.start()
    try:
        return delays(address, seconds), answers
    finally:
        over.set()
        for thread in threads:
            thread.join()


def percentile(values: list[float], share: float) -> float:
    """Returns the value below which that share of the values is."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def resident_mb(process: int) -> int | None:
    """Returns how much memory a process holds; None where the system does not say."""
    path = Path(f"/proc/{process}/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20 if path.exists() else None


def measure(address: str, process: int, seconds: float, report: Callable[[dict[str, Any]], None]) -> float:
    """Runs the list; returns the largest 99th percentile of the delay over the median of the same chats alone."""
    delays(address, 1)
    alone = delays(address, seconds)
    usual = statistics.median(alone)
    report({"attack": "none", "requests": len(alone), "median_s": round(usual, 4), "p99_s": round(percentile(alone, 0.99), 4)})
    largest = 0.0
    for name, requests in attacks().items():
        measured, answers = under_attack(address, requests, seconds)
        delay = percentile(measured, 0.99) - usual
        largest = max(largest, delay)
        figures = {"median_delay_s": statistics.median(measured) - usual, "p99_delay_s": delay, "max_delay_s": max(measured) - usual}
        rounded = {key: round(value, 4) for key, value in figures.items()}
        report(
            {
                "attack": name,
                "requests": len(measured),
                **rounded,
                "answers": dict(answers),
                "load": round(os.getloadavg()[0], 1),
                "resident_mb": resident_mb(process),
            }
        )
    return largest


@contextlib.contextmanager
def served(bundle: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Serves a bundle in a child process; yields the address and the process's id."""
    code = "from edge_runtime.cli.run import main; main()"
    command = [sys.executable, "-c", code, "serve", str(bundle), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        try:
            address = next((match for line in server.stdout if line.startswith("serving") and (match := _ADDRESS.search(line))), None)
            if address is None:
                raise click.ClickException("the server did not start; try the same options with edge-run serve")
            reader = threading.Thread(target=lambda: [None for _ in server.stdout or ()], daemon=True)
            reader.start()
            yield address.group(), server.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                server.terminate()
            server.wait(30)


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--seconds", type=click.FloatRange(1, 60), default=10.0, help="How long each attack lasts.")
@click.option("--limit", type=float, default=0.25, help="Largest 99th percentile of the delay, in seconds.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(bundle: Path, seconds: float, limit: float, options: tuple[str, ...]) -> None:
    """Serve BUNDLE, attack it, and print the delay of others as JSON lines. OPTIONS after -- go to `edge-run serve`."""
    with served(bundle, "--sessions", "4", "--waiting", "16", *options) as (address, process):
        largest = measure(address, process, seconds, lambda line: click.echo(json.dumps(line)))
    if largest > limit:
        raise click.ClickException(f"the 99th percentile of a delay was {largest:.3f} s; at most {limit:g} s are allowed")


if __name__ == "__main__":
    main()
