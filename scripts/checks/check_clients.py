"""Counts the answers of a server with many clients that differ from the same request's answer alone.

    python scripts/checks/check_clients.py BUNDLE --clients 64 --sessions 4

Half of the requests are greedy, half have a seed. Each is sent alone first, then all at once. Options after -- go to `edge-run serve`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

PROMPTS = Path(__file__).parents[2] / "exporter" / "edge_export" / "reference_pair"
_ADDRESS = re.compile(r"http://\S+")
_LIMIT_SECONDS = 600


def requests(count: int, tokens: int) -> list[dict[str, Any]]:
    """Returns `count` requests, greedy and seeded in turn."""
    texts = [text for name in ("prompts.code.json", "prompts.prose.json") for text in json.loads((PROMPTS / name).read_text())]
    drawn = ({"temperature": 0}, {"temperature": 0.8})
    return [
        {"prompt": texts[number // 2 % len(texts)], "max_tokens": tokens, "seed": number, **drawn[number % 2]} for number in range(count)
    ]


def answer(address: str, request: dict[str, Any]) -> str:
    """Returns the text of /v1/completions."""
    body = json.dumps(request).encode()
    post = urllib.request.Request(f"{address}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(post, timeout=_LIMIT_SECONDS) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--clients", type=click.IntRange(min=1), default=64)
@click.option("--sessions", type=click.IntRange(min=1), default=4)
@click.option("--tokens", type=click.IntRange(min=1), default=48, help="Tokens per answer.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(bundle: Path, clients: int, sessions: int, tokens: int, options: tuple[str, ...]) -> None:
    """Serve BUNDLE and print how many of the answers differ, as JSON."""
    code = "from edge_runtime.cli.run import main; main()"
    several = [] if "--deterministic" in options else ["--sessions", str(sessions)]
    command = [sys.executable, "-c", code, "serve", str(bundle), "--port", "0", "--waiting", str(clients), *several, *options]
    asked = requests(clients, tokens)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        try:
            matched = next((match for line in server.stdout if line.startswith("serving") and (match := _ADDRESS.search(line))), None)
            if matched is None:
                raise click.ClickException("the server did not start; try the same options with edge-run serve")
            address = matched.group()
            alone = [answer(address, request) for request in asked]
            begin = time.monotonic()
            with ThreadPoolExecutor(clients) as pool:
                together = list(pool.map(lambda request: answer(address, request), asked))
            seconds = time.monotonic() - begin
        finally:
            server.terminate()
    different = [number for number, (first, second) in enumerate(zip(alone, together, strict=True)) if first != second]
    click.echo(
        json.dumps(
            {
                "requests": clients,
                "sessions": sessions,
                "options": options,
                "different_greedy": sum(number % 2 == 0 for number in different),
                "different_seeded": sum(number % 2 for number in different),
                "seconds_together": round(seconds, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
