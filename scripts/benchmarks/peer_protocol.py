"""How bench_peers.py and the programs that it compares speak: JSON lines over pipes, one process for each engine.

A worker writes one line about itself, then answers each line it reads with one line: figures of a request, or why it failed. Workers run in
environments of their own, so this file and they need nothing but Python's library and their engine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

# The reply about a request whose tokens came in `seconds` after the first one's.
Answer = Callable[[dict[str, Any]], dict[str, Any]]
# What an engine is, and its answers; a module of a worker has a function `engine` that opens it.
Engine = AbstractContextManager[tuple[dict[str, Any], Answer]]


def main(module: str) -> None:
    """Serves the engine of a worker's module until the input ends. What engines print goes to standard error, from the first import on."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as output:
        os.dup2(2, 1)
        engine: Callable[[], Engine] = importlib.import_module(module).engine
        with engine() as (about, answer):
            for reply in replies(about, answer):
                output.write(json.dumps(reply) + "\n")
                output.flush()


def worker_options(model: str) -> argparse.ArgumentParser:
    """Returns what each worker's command line has: its `model`, a path, and the threads and tokens of context, of which it may use less."""
    parser = argparse.ArgumentParser()
    parser.add_argument(model, type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--context", type=int)
    return parser


def replies(about: dict[str, Any], answer: Answer) -> Iterator[dict[str, Any]]:
    """Yields what the engine is, then the answer to each line of standard input."""
    yield about
    for line in sys.stdin:
        try:
            yield answer(json.loads(line))
        except Exception as error:  # noqa: BLE001  # an engine of others may raise anything, and the next request may work
            yield {"error": f"{type(error).__name__}: {error}"}


def timed(prefill: Callable[[], object], tokens: Iterator[object]) -> dict[str, float]:
    """Runs a request that yields something for each token or group of tokens; returns its first token's and its decoding's seconds.

    Decoding begins where the prefill ends.
    """
    begin = time.perf_counter()
    prefill()
    filled = time.perf_counter()
    first = None
    for _ in tokens:
        first = first or time.perf_counter()
    return {
        "prefill_seconds": filled - begin,
        "first_token_seconds": (first or time.perf_counter()) - begin,
        "seconds": time.perf_counter() - filled,
    }
