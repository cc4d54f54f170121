"""The interface to another machine: run and put. File transfer (`file_sync.py`) and detached jobs (`jobs.py`) are built on it.

A command is a list of arguments, as `subprocess` takes it; quoting is the transport's business, so any path or prompt arrives as it is.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge_devices.errors import LinkError, TransportError
from edge_devices.files.limited_read import parse_integer
from edge_devices.machine.system import CommandResult

COMMAND_SECONDS = 60.0
TIMED_OUT = 124  # the exit code of a command that was ended because it took too long
MAX_OUTPUT_BYTES = 64 << 20  # the longest output lists the files of a device package with their hashes


class Transport(Protocol):
    """A connection to a device. `name`: for messages; `folder`: the only folder on the device that is written to, but
    for `lock`, the link that says which job runs there, whatever its folder, and `settings`, the file with a phone's own settings while
    a job changes them; empty where no settings are changed.
    """

    name: str
    folder: str
    lock: str
    settings: str

    def run(self, arguments: Sequence[str], *, seconds: float = COMMAND_SECONDS) -> CommandResult:
        """Runs a command and returns its output and exit code (124: timed out). Raises LinkError if the connection is lost."""

    def put(self, source: Path, target: str) -> None:
        """Copies one file to the device and replaces `target`, whose folder must exist. A broken link may leave a part of it."""


def shell(transport: Transport, script: str, *arguments: str, seconds: float = COMMAND_SECONDS) -> str:
    """Runs an sh script ($1, $2, ... are `arguments`) and returns its output.

    Raises TransportError with its last line if it fails, and LinkError if it does not end in time: a device may be busy, or swap.
    """
    done = transport.run(["sh", "-c", script, "sh", *arguments], seconds=seconds)
    if done.code == TIMED_OUT:
        raise LinkError(f"{transport.name}: no answer in {seconds:g} s; files on the device are kept")
    if done.code != 0:
        raise TransportError(f"{transport.name}: {last_line(done)}")
    return done.text


def prepare_folder(transport: Transport) -> str:
    """Creates the transport's folder if needed and returns its absolute path. Raises TransportError if it is not writable."""
    folder = transport.folder if transport.folder.startswith("/") else f"./{transport.folder}"  # it may begin with a dash
    return shell(transport, 'mkdir -p "$1" && cd "$1" && pwd && test -w .', folder).strip()


def last_line(done: CommandResult) -> str:
    """Returns the last line of a failed command's output, or its exit code."""
    lines = [line for line in (done.errors or done.text).splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {done.code}"


@dataclass(frozen=True)
class FramedCommand:
    """A command line that prints its exit code after its output, so that a broken link is never taken for a failed command.

    `mark`: precedes the exit code in the output; standard error follows the code where it has no channel of its own.
    """

    line: str
    mark: bytes

    def parse(self, output: bytes, errors: str) -> CommandResult | None:
        """Returns the command's result; None if the end of its output is missing."""
        body, mark, rest = output.rpartition(self.mark)
        code, end, collected = rest.partition(b"\n")
        number = parse_integer(code.decode("ascii", "replace"))
        if not (mark and end) or number is None:  # without the line's end, 13 may be the beginning of 137
            return None
        return CommandResult(code=number, output=body, errors=errors + collected.decode("utf-8", "replace"))

    def result(self, done: CommandResult, failure: Callable[[CommandResult], TransportError]) -> CommandResult:
        """Returns the command's result, or `done` if it timed out. Raises the error that `failure` makes of a broken link or a flood."""
        if done.code == TIMED_OUT:
            return done
        result = None if done.cut else self.parse(done.output, done.errors)
        if result is None:
            raise failure(done)
        return result


def frame_command(arguments: Sequence[str], *, separate: bool = True) -> FramedCommand:
    """Quotes a command for a POSIX shell and frames it with a marker. Raises TransportError for an argument with a NUL byte."""
    if any("\0" in argument for argument in arguments):
        raise TransportError("an argument with a NUL byte cannot be passed to a command; leave it out")
    mark = f"[{secrets.token_hex(8)}]"
    command = shlex.join(arguments)
    if separate:
        return FramedCommand(f"{command}; echo '{mark}'$?", mark.encode())
    # Descriptor 3 is the output; standard error is collected in the variable e.
    return FramedCommand(f"{{ e=$({{ {command}; }} 2>&1 1>&3 3>&-); c=$?; }} 3>&1; echo '{mark}'$c; printf %s \"$e\"", mark.encode())
