"""Sends many random requests to a server and checks its memory, child processes, descriptors and threads.

    python scripts/checks/soak_server.py BUNDLE --hours 8 --output soak-server.jsonl

Clients send texts, images, sound, constrained and sampled requests, predictions of many megabytes, what is to be tokenized, and what is
refused; a fifth of them leave before their answer, or in the middle of it. Every --rounds part of the time they stop until the server is
idle, and its processes are measured. The last line is a summary. The exit code is 1 if a request failed that must not, if the idle server
has more children, descriptors or threads than in its warm-up, or if its memory still grows. Linux only.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import statistics
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from check_neighbours import CHAT, Request, chat, image, jpeg, served, sound

CLIENTS = 6
PATIENCE_SECONDS = 60.0
IDLE_SECONDS = 120.0
# Share of the run that is not counted, and by how much the server's own memory may grow in the rest.
WARM_UP = 0.25
MAX_GROWTH = 0.05
# Refused as bad, for being too many, or because a client was too slow.
_REFUSED = range(400, 500)
_BUSY = 503


@dataclass(frozen=True, kw_only=True)
class Idle:
    """A server without requests; memory in bytes. `children` are all processes below it."""

    seconds: float
    requests: int
    resident: int
    anonymous: int
    children: int
    descriptors: int
    threads: int


class Clients:
    """Threads that send random requests while `going` is set; they count the answers."""

    def __init__(self, address: str, seed: int) -> None:
        self.going = threading.Event()
        self.over = False
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []
        self._netloc = urlsplit(address).netloc
        self._media = [image(jpeg(scans)) for scans in (8, 60)] + [sound(16_000), sound(44_100)]
        self._threads = [threading.Thread(target=self._run, args=(random.Random(f"{seed} {number}"),)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads."""
        self.over = True
        self.going.set()
        for thread in self._threads:
            thread.join()

    def _run(self, chance: random.Random) -> None:
        while self.going.wait() and not self.over:
            path, fields = self._request(chance)
            leaves = chance.random() < 0.2
            try:
                answer = self._sent(path, json.dumps(fields).encode(), chance.uniform(0, 0.5) if leaves else PATIENCE_SECONDS)
            except (OSError, http.client.HTTPException) as error:
                answer = "left" if leaves else type(error).__name__
                if not leaves:
                    self.failures.append(f"{path}: {error}")
            self.answers[answer] += 1

    def _sent(self, path: str, body: bytes, seconds: float) -> str:
        with contextlib.closing(http.client.HTTPConnection(self._netloc, timeout=seconds)) as connection:
            connection.request("POST", path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read()
            if response.status not in (200, _BUSY, *_REFUSED):
                self.failures.append(f"{path}: {response.status} {text[:200]!r}")
            return str(response.status)

    def _request(self, chance: random.Random) -> Request:
        """Returns a request of a random kind."""
        text = "".join(chance.choices("abcdefgh .,\n", k=chance.choice((20, 200, 2000))))
        limit, kind = chance.choice((1, 8, 40)), chance.randrange(12)
        schema = {"type": "object", "properties": {f"p{chance.randrange(9)}": {"type": "string", "maxLength": 8}}}
        fields: dict[str, Any] = {
            3: {"stream": True, "temperature": 1},
            4: {
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
                "stream": chance.random() < 0.5,
            },
            5: {"prediction": {"type": "content", "content": "predicted " * chance.choice((10, 1_200_000))}},
            6: {"n": chance.randint(2, 4), "seed": chance.randrange(99), "temperature": 1, "logprobs": True},
            7: {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
            8: chance.choice(({"n": 0}, {"stop": 5}, {"messages": []}, {"unknown": 1}, {"max_tokens": "a"})),
        }.get(kind, {})
        if kind == 9:
            return chat([chance.choice(self._media) for _ in range(chance.randint(1, 3))], max_tokens=limit)
        if kind == 10:
            return "/tokenize", {"content": text * chance.choice((1, 1000))}
        if kind == 11:
            return chance.choice((("/v1/completions", {"prompt": text}), ("/api/chat", {"messages": [{"role": "user", "content": text}]})))
        return CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": limit, "temperature": 0, **fields}


def wait_until_idle(address: str) -> None:
    """Returns when no request runs or waits. Raises ClickException after `IDLE_SECONDS`."""
    end = time.monotonic() + IDLE_SECONDS
    while time.monotonic() < end:
        with contextlib.closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)) as connection:
            connection.request("GET", "/health")
            health = json.loads(connection.getresponse().read())
        if (health["running"], health["waiting"]) == (0, 0):
            time.sleep(1)  # children and connections end a little later
            return
        time.sleep(0.1)
    raise click.ClickException(f"the server was not idle after {IDLE_SECONDS:g} s: {health}")


def below(process: int) -> list[int]:
    """Returns the ids of all processes below one."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    known: set[int] = {process}
    while more := {child for child, parent in parents.items() if parent in known} - known:
        known |= more
    return sorted(known - {process})


def state_of(process: int, seconds: float, requests: int) -> Idle:
    """Returns the state of a server."""
    folder = Path("/proc") / str(process)
    fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    resident, anonymous = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
    return Idle(
        seconds=round(seconds, 1),
        requests=requests,
        resident=resident,
        anonymous=anonymous,
        children=len(below(process)),
        descriptors=len(list((folder / "fd").iterdir())),
        threads=int(fields["Threads"]),
    )


def problems(samples: list[Idle]) -> list[str]:
    """Returns what grew after the warm-up."""
    warm = [idle for idle in samples if idle.seconds <= WARM_UP * samples[-1].seconds] or samples[:1]
    rest = samples[len(warm) :] or samples[-1:]
    tenth = max(1, len(rest) // 10)
    before, after = (statistics.median(idle.anonymous for idle in part) for part in (rest[:tenth], rest[-tenth:]))
    grown = [
        f"{name}: {getattr(samples[-1], name)} at the end, at most {allowed} in the warm-up"
        for name in ("children", "descriptors", "threads")
        if getattr(samples[-1], name) > (allowed := max(getattr(idle, name) for idle in warm))
    ]
    return grown + ([f"the server's own memory grew from {before:.0f} to {after:.0f} bytes"] if after > (1 + MAX_GROWTH) * before else [])


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--hours", type=click.FloatRange(0.001), default=1.0, help="How long requests are sent.")
@click.option("--rounds", type=click.IntRange(4), default=40, help="How often the idle server is measured.")
@click.option("--seed", default=1)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), default=Path("soak-server.jsonl"), help="A JSON line a round.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(bundle: Path, hours: float, rounds: int, seed: int, output: Path, options: tuple[str, ...]) -> None:
    """Serve BUNDLE and send random requests for some HOURS. OPTIONS after -- go to `edge-run serve`."""
    samples: list[Idle] = []
    with served(bundle, "--sessions", "3", "--waiting", "16", *options) as (address, process), output.open("w", encoding="utf-8") as log:
        clients, begin = Clients(address, seed), time.monotonic()
        try:
            for _ in range(rounds):
                clients.going.set()
                time.sleep(3600 * hours / rounds)
                clients.going.clear()
                wait_until_idle(address)
                samples.append(state_of(process, time.monotonic() - begin, clients.answers.total()))
                log.write(json.dumps(asdict(samples[-1])) + "\n")
                log.flush()
        finally:
            clients.close()
    load = round(os.getloadavg()[0], 1)
    click.echo(json.dumps({**asdict(samples[-1]), "first": asdict(samples[0]), "answers": clients.answers, "load": load}))
    if wrong := clients.failures + problems(samples):
        raise click.ClickException("; ".join(wrong[:5]))


if __name__ == "__main__":
    main()
