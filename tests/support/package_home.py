"""What a package's README promises: each of its commands is run as it is written there, on this machine or on an emulated one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_records import ONE_OF_EACH
from edge_bench.measure.records import Records, read_records
from edge_export.cli.command import main as edge_export
from kept import kept

KEY = "CHOOSE-A-KEY"  # as the README names it
QUESTION, ANSWER = "How many seconds are in an hour?", "1 hour is 3600 seconds."
SCHEMA = {"type": "object", "properties": {"well": {"type": "boolean"}}, "required": ["well"], "additionalProperties": False}
SHORT = ("--drafters", "split", "--backend", "onnx", "--max-tokens", "4", "--context", "256")


def chat_bundle() -> Path:
    """The shipped pair that answers, as graphs."""
    words = ["reference", "--chat", "--format", "onnx", "--no-verify", "--output"]
    return kept("chat-bundle", {"words": words}, lambda output: edge_export([*words, str(output)], standalone_mode=False))


@dataclass(frozen=True, kw_only=True)
class Home:
    """A device with a package and `my-bundle` in its user's `folder`, as this machine sees it.

    `command` gives the command that runs a line of the shell there, in `environment`.
    """

    folder: Path
    readme: str
    command: Callable[[str], list[str]]
    environment: Mapping[str, str]

    def lines(self) -> list[str]:
        """The commands of the README, in their order."""
        return re.findall(r"^    (.+)$", self.readme, re.MULTILINE)

    def run(self, line: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(line), env=self.environment, cwd=self.folder, input=stdin, capture_output=True, text=True, timeout=600, check=False
        )

    def chat(self, line: str) -> None:
        done = self.run(line, QUESTION + "\n")
        assert (done.returncode, done.stdout.strip()) == (0, ANSWER), done.stderr[-3000:]

    def serve(self, line: str) -> None:
        """Asks the server for an answer by a schema, and for the chat page; other clients are turned away."""
        with self._served(f"{line} --port 0") as address:
            asked: dict[str, Any] = {
                "messages": [{"role": "user", "content": QUESTION}],
                "max_tokens": 20,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            }
            answer = self._get(address + "/v1/chat/completions", json.dumps(asked).encode())
            assert set(json.loads(json.loads(answer)["choices"][0]["message"]["content"])) == {"well"}
            assert b"<!doctype html>" in self._get(address + "/")

    def bench(self, line: str) -> Records:
        """Measures a little, and returns the records."""
        done = self.run(" ".join((line, *ONE_OF_EACH, *SHORT)))
        assert done.returncode == 0, done.stderr[-3000:]
        return read_records(self.folder / "runs.jsonl")

    @contextlib.contextmanager
    def _served(self, line: str) -> Iterator[str]:
        """The address that a server prints, until it is ended."""
        server = subprocess.Popen(
            self.command(line), env=self.environment, cwd=self.folder, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert server.stderr is not None
        said = ""
        try:
            for text in server.stderr:
                said += text
                if found := re.search(r"serving at http://0\.0\.0\.0(:\d+)", text):
                    yield f"http://127.0.0.1{found[1]}"
                    return
            raise AssertionError(said)
        finally:
            try:
                os.killpg(server.pid, signal.SIGTERM)  # proot passes no signal on
                server.communicate(timeout=60)
            finally:
                if server.poll() is None:
                    os.killpg(server.pid, signal.SIGKILL)

    @staticmethod
    def _get(address: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(address, body, {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return bytes(answer.read())
