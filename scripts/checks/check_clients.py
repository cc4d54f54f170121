"""Counts the answers of a server with many clients that differ from the same request's answer alone.

    python scripts/checks/check_clients.py BUNDLE --clients 64 --sessions 4

Half of the requests are greedy, half have a seed. Each is sent alone first, then all at once. Options after -- go to `edge-run serve`.
"""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from check_neighbours import served

PROMPTS = Path(__file__).parents[2] / "exporter" / "edge_export" / "reference_pair"
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
    several = [] if "--deterministic" in options else ["--sessions", str(sessions)]
    asked = requests(clients, tokens)
    with served(bundle, "--waiting", str(clients), *several, *options) as (address, _), ThreadPoolExecutor(clients) as pool:
        alone = [answer(address, request) for request in asked]
        begin = time.monotonic()
        together = list(pool.map(lambda request: answer(address, request), asked))
        seconds = time.monotonic() - begin
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
