"""Peak memory of opening a bundle and serving it once, each in a process of its own: a peak never goes down again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click

from edge_devices.memory import peak_memory_bytes
from edge_runtime.bench.records import Memory
from edge_runtime.errors import BackendError, EdgeRuntimeError
from edge_runtime.opening import open_sessions

TIMEOUT_SECONDS = 600
DRAFT_LENGTH = 3


def measure_memory(bundle: Path, *, drafter: str, sequences: int, context: int | None, threads: int) -> Memory:
    """Opens the bundle in a child process. Raises BackendError if that fails."""
    command = [sys.executable, "-m", "edge_runtime.bench.memory", str(bundle), drafter, str(sequences), str(context or 0), str(threads)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"the process whose memory is measured gave no answer in {TIMEOUT_SECONDS} seconds") from error
    if child.returncode:
        said = child.stderr.strip().splitlines()[-1:] or [f"it ended with {child.returncode}"]
        raise BackendError(f"the process whose memory is measured failed: {said[0].removeprefix('Error: ')}")
    answer = json.loads(child.stdout.splitlines()[-1])
    return Memory(drafter=drafter, sequences=sequences, context=int(answer["context"]), peak_bytes=int(answer["peak_bytes"]))


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("drafter")
@click.argument("sequences", type=int)
@click.argument("context", type=int)
@click.argument("threads", type=int)
def main(bundle: Path, drafter: str, sequences: int, context: int, threads: int) -> None:
    """What the child does: one request of half the context on each sequence, all at once."""
    try:
        with open_sessions(
            bundle, sequences, drafter=drafter, context=context or None, threads=threads, check_hashes=False  # type: ignore[arg-type]
        ) as opened:  # fmt: skip
            first = opened.sessions[0]
            prompt = [max(first.vocabulary.bos, 0)] * (first.target.context // 2)
            length = min(DRAFT_LENGTH, first.settings.longest_draft)
            for _ in opened.run([s.generate(prompt, max_tokens=8, draft_length=length) for s in opened.sessions]):
                pass
            click.echo(json.dumps({"context": first.target.context, "peak_bytes": peak_memory_bytes()}))
    except EdgeRuntimeError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
