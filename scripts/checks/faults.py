"""Exports over an existing bundle repeatedly, injects a fault each time, and checks what is left.

    python scripts/checks/faults.py kill --runs 200

    kill         SIGKILL at a random moment, in half the runs while the new bundle replaces the old one
    interrupt    SIGINT (Ctrl-C) at a moment chosen in the same way
    file-size    a random limit on file size (RLIMIT_FSIZE), as on a full disk
    memory       a random limit on memory (RLIMIT_AS)

After each fault, the complete old or new bundle is in place. There may be none only if the process was killed between the two renames on a
file system that cannot exchange names; the next start then restores the old one. The next start removes all temporary files. A process that
was not killed ends with a one-sentence error and the right exit code. Linux only.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import click

from edge_export.cli.command import main as export
from edge_export.output import REPLACE_EVENT, check_output, exchange
from edge_runtime.bundle.bundle import open_bundle
from edge_runtime.bundle.manifest import MANIFEST_NAME
from edge_runtime.errors import BundleError

KINDS = ("kill", "interrupt", "file-size", "memory")
# The exporter's modules are loaded, then the fault is set, so that it hits the export and not Python's start.
PROGRAM = f"""
import resource, sys
from edge_export.cli.command import main
import edge_export.gguf.writer, edge_export.parity.gguf, llama_cpp
sys.addaudithook(lambda event, _: print("moving", flush=True) if event == "{REPLACE_EVENT}" else None)
what, amount = sys.argv[1], int(sys.argv[2])
if what == "memory":
    amount += int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = {{"memory": resource.RLIMIT_AS, "file-size": resource.RLIMIT_FSIZE}}.get(what)
if limit is not None:
    resource.setrlimit(limit, (amount, amount))
print("ready", flush=True)
main(sys.argv[3:], standalone_mode=True)
"""
_MAX_SECONDS = 900
# The replacement of the old bundle, with its removal, takes at most this long.
_MOVING_SECONDS = 0.01
_LARGEST_FILE, _MAX_MEMORY = 20 << 20, 30 << 20


class FaultError(Exception):
    """The state, the message or the exit code after a fault is wrong."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one fault.

    `left`: the bundle before the next start, "old", "new" or "none". `message`: the last line of standard error.
    """

    kind: str
    left: str
    code: int
    message: str


def arguments(output: Path) -> list[str]:
    """Returns the arguments of an export of the shipped pair, which takes a second or two."""
    return ["reference", "-o", str(output), "--force", "--no-verify", "--context", "256"]


def one_fault(kind: str, output: Path, chance: random.Random, seconds: float) -> Outcome:
    """Exports over the bundle at `output` with one fault; without a fault it takes `seconds`. Raises FaultError."""
    before = (output / MANIFEST_NAME).read_bytes()
    limit = {"file-size": _LARGEST_FILE, "memory": _MAX_MEMORY}.get(kind, 0)
    command = [sys.executable, "-c", PROGRAM, kind, str(chance.randrange(limit + 1)), *arguments(output)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "500"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        child.stdout.readline()
        if limit == 0:
            if chance.random() < 0.5:
                child.stdout.readline()
                time.sleep(chance.random() * _MOVING_SECONDS)
            else:
                time.sleep(chance.random() * seconds)
            child.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGINT)
        _, errors = child.communicate(timeout=_MAX_SECONDS)
    left = _state(output, before)
    if left == "none" and has_exchange(output.parent):
        raise FaultError("no bundle was left, though the file system can exchange two names")
    _check_next_start(output)
    outcome = Outcome(kind=kind, left=left, code=child.returncode, message=errors.strip().splitlines()[-1] if errors.strip() else "")
    _check_message(outcome, errors)
    return outcome


def _state(output: Path, before: bytes) -> str:
    if not output.exists():
        return "none"
    try:
        open_bundle(output, check="full")
    except BundleError as error:
        raise FaultError(f"half a bundle was left: {error}") from error
    return "old" if (output / MANIFEST_NAME).read_bytes() == before else "new"


def has_exchange(folder: Path) -> bool:
    """Returns whether the file system of `folder` can exchange two folders atomically."""
    with tempfile.TemporaryDirectory(dir=folder) as first, tempfile.TemporaryDirectory(dir=folder) as other:
        return exchange(Path(first), Path(other))


def _check_next_start(output: Path) -> None:
    check_output(output, force=True)
    names = sorted(path.name for path in output.parent.iterdir())
    if names != [output.name]:
        raise FaultError(f"the next start left {names}")
    open_bundle(output, check="full")


def _check_message(outcome: Outcome, errors: str) -> None:
    allowed = {"kill": (-9, 0), "interrupt": (130, 0), "file-size": (1, 0), "memory": (1, 0)}[outcome.kind]
    if outcome.kind == "interrupt" and outcome.code == -2 and outcome.left == "new":
        return  # Python itself was ending
    if outcome.code not in allowed or "Traceback" in errors:
        raise FaultError(f"{outcome.kind}: exit code {outcome.code}, standard error: {errors.strip()[-1500:]}")
    if outcome.code == 1 and not outcome.message.startswith(("Error: ", "OpenBLAS error: ")):
        raise FaultError(f"{outcome.kind}: unexpected message {outcome.message!r}")
    if outcome.code == 0 and outcome.left != "new":
        raise FaultError(f"{outcome.kind}: exit code 0, but the bundle is {outcome.left}")


def _seconds_of_an_export(output: Path) -> float:
    """Returns the duration of an export without a fault, from the moment the modules are loaded."""
    command = [sys.executable, "-c", PROGRAM, "none", "0", *arguments(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        child.stdout.readline()
        begin = time.monotonic()
        child.communicate(timeout=_MAX_SECONDS)
        return time.monotonic() - begin


@click.command(context_settings={"show_default": True})
@click.argument("kind", type=click.Choice(KINDS))
@click.option("--runs", type=click.IntRange(min=1), default=200)
@click.option("--seed", default=1)
def main(kind: str, runs: int, seed: int) -> None:
    """Export RUNS times with a fault of this KIND and print the results; end at the first wrong one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts in the background ignore Ctrl-C, children too
    chance, counts, messages = random.Random(f"{kind}:{seed}"), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "bundle"
        export(arguments(output), standalone_mode=False)
        seconds = _seconds_of_an_export(output)
        for run in range(runs):
            try:
                outcome = one_fault(kind, output, chance, seconds)
            except FaultError as error:
                raise click.ClickException(f"after {run} runs: {error}") from error
            counts[f"{outcome.left}, exit code {outcome.code}"] += 1
            messages[outcome.message.partition("(")[2].partition(":")[0][:80]] += 1
    click.echo(json.dumps({"kind": kind, "runs": runs, "seed": seed, "left": counts, "said": dict(messages.most_common(6))}))


if __name__ == "__main__":
    main()
