"""The peak memory of opening a bundle and running it once. It is measured in a child process, because a process's peak never goes down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import click

from edge_bench.measure.records import Memory
from edge_devices.children import limited_command, run_child
from edge_devices.command_line import one_sentence_errors
from edge_devices.machine.memory import peak_memory_bytes
from edge_runtime.backends.interface import CPU
from edge_runtime.drafting.policies import DrafterKind
from edge_runtime.errors import BackendError
from edge_runtime.session.generation import Generation
from edge_runtime.session.load_options import LoadOptions
from edge_runtime.session.open import open_session, open_sessions
from edge_runtime.session.session import Session

TIMEOUT_SECONDS = 600
DRAFT_LENGTH = 3


def measure_memory(bundle: Path, *, backend: str, drafter: str, sequences: int, context: int, threads: int, device: str | None) -> Memory:
    """Opens and runs the bundle in a child process. Raises BackendError if that fails."""
    sizes = map(str, (sequences, context, threads, device or CPU))
    command = limited_command("edge_bench.measure.memory", str(bundle), backend, drafter, *sizes)
    child = run_child(command, seconds=TIMEOUT_SECONDS, failure=BackendError)
    if child.late:
        raise BackendError(f"the memory measurement took more than {TIMEOUT_SECONDS} seconds; try a smaller --context")
    if child.end:
        raise BackendError(f"the memory measurement failed: {child.reason or f'it {child.end}'}")
    return Memory(drafter=drafter, sequences=sequences, context=context, peak_bytes=int(cast(int, child.answer["peak_bytes"])))


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("backend")
@click.argument("drafter")
@click.argument("sequences", type=int)
@click.argument("context", type=int)
@click.argument("threads", type=int)
@click.argument("device")
@one_sentence_errors()
def main(bundle: Path, backend: str, drafter: str, *, sequences: int, context: int, threads: int, device: str) -> None:
    """Runs in the child: one request after half the context on each sequence, all at once."""
    kind = cast(DrafterKind, drafter)
    options = LoadOptions(backend=backend, drafter=kind, context=context, threads=threads, check="none", device=device)
    if sequences == 1:
        with open_session(bundle, options) as session:
            for _ in _request(session).rounds():
                pass
    else:
        with open_sessions(bundle, sequences, options) as opened:
            for _ in opened.run([_request(session) for session in opened.sessions]):
                pass
    click.echo(json.dumps({"peak_bytes": peak_memory_bytes()}))


def _request(session: Session) -> Generation:
    prompt = [max(session.vocabulary.bos, 0)] * (session.target.context // 2)
    return session.generate(prompt, max_tokens=8, draft_length=min(DRAFT_LENGTH, session.settings.longest_draft))


if __name__ == "__main__":
    main()
