"""Processes that write one draft store, are killed at random and have it removed meanwhile: what is lost, and what comes back.

    python scripts/checks/draft_store_stress.py --writers 4 --texts 60 --forgets 1000

First each writer remembers its texts; a killed one goes on behind the last text that it reported. All of them must be there. Then two
writers write without end while the file is removed again and again: no text that was in it may be in the next one, and no other file may
lie in the folder. The exit code is 1 otherwise.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from edge_runtime.drafting.draft_store import read_store

PROGRAM = """
import random, sys
from pathlib import Path
from edge_runtime.drafting.draft_store import DraftStore
class Letters:
    def encode(self, text, add_bos): return [ord(letter) for letter in text]
path, name, first, end, limit = sys.argv[1:]
store = DraftStore(Path(path), Letters(), limit=int(limit), notify=lambda sentence: sys.exit(sentence))
for number in range(int(first), int(end)):
    store.remember(f"{name}-{number} " + "x" * random.randrange(100))
    print(number, flush=True)
"""
# The sizes at which the oldest texts make room often, and never.
SMALL, LARGE = 4 << 10, 1 << 20
KILLS_PER_WRITER = 2
_MAX_SECONDS = 60.0


class Writer:
    """A process that remembers numbered texts."""

    def __init__(self, path: Path, name: str, *, end: int = 1 << 40, limit: int) -> None:
        """Starts with number 0; `limit` in bytes."""
        self._path, self._name, self._end, self._limit = path, name, end, limit
        self.reported = 0
        self._start()

    def _start(self) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `finish` closes it
        arguments = [str(self._path), self._name, str(self.reported), str(self._end), str(self._limit)]
        self._process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=self._output)

    def finish(self) -> None:
        """Waits for its end, and reads how far it got."""
        self._process.wait()
        self._output.seek(0)
        self.reported = max([self.reported, *(int(line) + 1 for line in self._output if line.endswith("\n"))])
        self._output.close()

    @property
    def runs(self) -> bool:
        """Whether it still writes. Raises ClickException if the store became unusable to it."""
        if self._process.poll():
            raise click.ClickException(f"a writer ended with {self._process.returncode}; its message is above")
        return self._process.returncode is None

    def kill(self) -> None:
        """Kills it at once, and reads how far it had got."""
        self._process.kill()
        self.finish()

    def restart(self) -> None:
        """Kills it and lets another one go on behind the last reported text."""
        self.kill()
        self._start()


def kept_texts(folder: Path, *, writers: int, texts: int) -> int:
    """Returns how many of the writers' texts are there after all of them were remembered, by processes that were killed in between."""
    folder.mkdir()
    path = folder / "store"
    running = [Writer(path, str(number), end=texts, limit=LARGE) for number in range(writers)]
    for _ in range(KILLS_PER_WRITER):
        for writer in running:
            _wait_for_texts(path)
            time.sleep(random.uniform(0, 0.02))
            if writer.runs:
                writer.restart()
    for writer in running:
        writer.finish()
    return len({text.split()[0] for text in read_store(path)})


def resurrected_texts(folder: Path, *, forgets: int) -> tuple[int, int]:
    """Returns how often the store was removed, and how many removed texts came back or lay in another file, while two writers wrote."""
    folder.mkdir()
    path = folder / "store"
    running = [Writer(path, str(number), limit=SMALL) for number in range(2)]
    done = resurrected = 0
    try:
        while done < forgets:
            before = _wait_for_texts(path)
            if done % 10 == 9:
                random.choice(running).restart()
            path.unlink()
            done += 1
            resurrected += len(set(before) & set(_wait_for_texts(path)))
            resurrected += sum(entry != path for entry in folder.iterdir())
            time.sleep(random.uniform(0, 0.004))
    finally:
        for writer in running:
            writer.kill()
    return done, resurrected


def _wait_for_texts(path: Path) -> list[str]:
    end = time.monotonic() + _MAX_SECONDS
    while time.monotonic() < end:
        if texts := read_store(path):
            return texts
        time.sleep(0.0005)
    raise click.ClickException(f"nothing was written in {_MAX_SECONDS:.0f} s")


@click.command()
@click.option("--writers", default=4, show_default=True, help="Processes that write at once.")
@click.option("--texts", default=60, show_default=True, help="Texts of each.")
@click.option("--forgets", default=1000, show_default=True, help="How often the store is removed.")
def main(writers: int, texts: int, forgets: int) -> None:
    """Write one draft store from several processes, kill them, remove it, and count what is lost or comes back."""
    with tempfile.TemporaryDirectory() as folder:
        kept = kept_texts(Path(folder) / "kept", writers=writers, texts=texts)
        done, resurrected = resurrected_texts(Path(folder) / "forgotten", forgets=forgets)
    click.echo(json.dumps({"texts": writers * texts, "kept": kept, "forgets": done, "resurrected": resurrected}))
    sys.exit(kept != writers * texts or resurrected > 0)


if __name__ == "__main__":
    main()
