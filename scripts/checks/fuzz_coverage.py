"""Fuzzes the readers of edge-mtp by coverage: libFuzzer keeps the inputs that reach new lines, and mutates those.

    pip install atheris
    python scripts/checks/fuzz_coverage.py manifest onnx-header --inputs 500000 --seed 1

Readers, limits and failures are those of fuzz.py, whose inputs are random mutations of the corpus. Each reader runs in a child process; one
that dies or hangs counts as a failure, its input is kept, and the campaign goes on with another child. atheris has wheels for Linux on
x86-64 only.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

# Those that see a stranger's file first, and need no model.
READERS = ("gguf-header", "onnx-header", "manifest", "state-file", "chat-template", "run-log", "image", "sound", "api-request", "config")
COUNTS = ("inputs", "read", "refused")
_TIMEOUT_SECONDS, _MEMORY_MB = 60, 2048
_MAX_CHILDREN = 50
_LONGEST = 1 << 16


class Counts:
    """Counts in a file that parent and child map."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(COUNTS)))
        with path.open("r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def add(self, name: str) -> None:
        """Counts one more."""
        self._cells[COUNTS.index(name)] += 1

    def __getitem__(self, name: str) -> int:
        return self._cells[COUNTS.index(name)]


def fuzz(name: str, folder: Path, inputs: int, seed: int) -> None:
    """Runs one reader in this process, which libFuzzer ends. Failures go to failures.jsonl, their inputs beside it."""
    import atheris

    with atheris.instrument_imports(include=["edge_runtime", "edge_devices", "edge_export", "jinja2"]):
        from fuzzing.campaign import Guard, outcome_of, read_corpus
        from fuzzing.mutation import input_of
        from fuzzing.registry import all_readers

        reader = all_readers()[name]
        opened = reader.open(folder / "work", None)
        read_corpus(reader, opened)
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, data in enumerate(opened.seeds):
        (corpus / f"seed-{number}").write_bytes(data)
    counts, guard, known = Counts(folder / "counts"), Guard(opened.folder), set[str]()

    def read_input(data: bytes) -> None:
        counts.add("inputs")
        guard.on = reader.guarded
        outcome = outcome_of(reader, opened.read, data)
        guard.on = False
        if outcome in ("read", "refused"):
            counts.add(outcome)
        elif (place := outcome[-60:]) not in known:
            known.add(place)
            (folder / f"failure-{len(known)}-{os.getpid()}").write_bytes(data)
            with (folder / "failures.jsonl").open("a") as file:
                file.write(json.dumps({"what": outcome}) + "\n")

    def mutate(data: bytes, max_size: int, chance: int) -> bytes:
        """Half by libFuzzer; half by fuzz.py's mutations, which keep JSON valid and know lengths."""
        if chance % 2 or not data:
            return bytes(atheris.Mutate(data, max_size))
        try:
            return input_of([data], chance, 0, structured=reader.structured)[:max_size]
        except RecursionError:
            return data

    longest = min(_LONGEST, 2 * max(len(data) for data in opened.seeds))
    limits = [f"-timeout={_TIMEOUT_SECONDS}", f"-rss_limit_mb={_MEMORY_MB}", f"-max_len={longest}", "-detect_leaks=0"]
    run = [f"-runs={inputs}", f"-seed={seed}", f"-artifact_prefix={folder}/died-", str(corpus)]
    atheris.Setup([sys.argv[0], *limits, *run], read_input, custom_mutator=mutate)
    atheris.Fuzz()


def campaign(name: str, folder: Path, inputs: int, seed: int) -> dict[str, Any]:
    """Runs a reader in child processes until it had `inputs` inputs; returns the counts and failures."""
    folder.mkdir(parents=True)
    counts, begin, failures = Counts(folder / "counts"), time.monotonic(), []
    for attempt in range(_MAX_CHILDREN):
        if counts["inputs"] >= inputs:
            break
        subprocess.run(["rm", "-rf", str(folder / "work")], check=True)
        arguments = [str(inputs - counts["inputs"]), str(seed + attempt)]
        with (folder / f"log-{attempt}").open("wb") as log:
            ended = subprocess.run(
                [sys.executable, __file__, "--child", name, str(folder), *arguments], stdout=log, stderr=log, check=False
            )
        if ended.returncode:
            failures.append({"what": f"the child ended with {ended.returncode}, see {folder}/log-{attempt}"})
    failures_file = folder / "failures.jsonl"
    failures += [json.loads(line) for line in failures_file.read_text().splitlines()] if failures_file.exists() else []
    kept = len(list((folder / "corpus").iterdir()))
    seconds = round(time.monotonic() - begin, 1)
    return {"reader": name, "seed": seed, **{key: counts[key] for key in COUNTS}, "corpus": kept, "seconds": seconds, "failures": failures}


@click.command(context_settings={"show_default": True})
@click.argument("names", nargs=-1, metavar="[READER]...")
@click.option("--inputs", type=click.IntRange(min=1), default=500_000, help="Inputs per reader.")
@click.option("--seed", type=click.IntRange(min=1), default=1)
@click.option("--folder", type=click.Path(path_type=Path), help="Keep corpus, logs and failing inputs here; without it they are removed.")
def main(names: tuple[str, ...], inputs: int, seed: int, folder: Path | None) -> None:
    """Fuzz each READER, or those that matter most. Prints one JSON object per reader; exit code 1 if any input failed."""
    failed = False
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        for name in names or READERS:
            result = campaign(name, (folder or Path(temporary)) / name, inputs, seed)
            failed = failed or bool(result["failures"])
            click.echo(json.dumps(result))
    sys.exit(failed)


def child(arguments: list[str], run: Callable[[str, Path, int, int], None] = fuzz) -> None:
    """The child's side of `campaign`."""
    name, folder, inputs, seed = arguments
    run(name, Path(folder), int(inputs), int(seed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        main()
