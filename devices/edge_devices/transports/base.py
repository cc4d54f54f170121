"""What a device can be asked, whatever cable leads to it. Files (`tree.py`) and detached jobs (`jobs.py`) are built on these three verbs.

A command is a list of arguments, as `subprocess` takes it; quoting is the transport's business, so any path or prompt arrives as it is.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edge_devices.errors import TransportError
from edge_devices.machine.system import CommandResult

COMMAND_SECONDS = 60.0
MAX_OUTPUT_BYTES = 64 << 20  # bytes; the longest one lists the files of a device package with their hashes


class Transport(Protocol):
    """A device and the way to it. `name` is for people, `folder` the place on the device that is ours to write to."""

    name: str
    folder: str

    def run(self, arguments: Sequence[str], *, seconds: float = COMMAND_SECONDS) -> CommandResult:
        """Runs a command and returns what it said and its exit code (124: it took too long). Raises LinkError when the device went away."""

    def put(self, source: Path, target: str) -> None:
        """Copies one file to the device, over what is there; `target`'s folder exists. May leave a part of it when the link breaks."""

    def get(self, source: str, target: Path) -> None:
        """Copies one file from the device. May leave a part of it when the link breaks."""


def shell(transport: Transport, script: str, *arguments: str, seconds: float = COMMAND_SECONDS) -> str:
    """Runs an sh script ($1, $2, ... are `arguments`) and returns its output. Raises TransportError with its last words when it fails."""
    done = transport.run(["sh", "-c", script, "sh", *arguments], seconds=seconds)
    if done.code != 0:
        raise TransportError(f"{transport.name}: {last_line(done)}")
    return done.text


def parse_integer(text: str) -> int | None:
    """Returns the number that a device's decimal digits say; None for anything else, and for more digits than any real answer has."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def prepare_folder(transport: Transport) -> str:
    """Returns the transport's folder as an absolute path, made if need be. Raises TransportError where it may not be written to."""
    return shell(transport, 'mkdir -p "$1" && cd "$1" && pwd && test -w .', transport.folder).strip()


def last_line(done: CommandResult) -> str:
    """Returns what a failed command said last."""
    said = [line for line in (done.errors or done.text).splitlines() if line.strip()]
    return said[-1].strip() if said else f"exit code {done.code}"


@dataclass(frozen=True)
class FramedCommand:
    """A command line that tells its own exit code at the end of its output, so that a broken link is never taken for a failed command.

    `separate`: standard error has a way of its own; else it is collected and sent after the code.
    """

    line: str
    mark: bytes

    def open(self, output: bytes, errors: str) -> CommandResult | None:
        """Returns the command's own answer; None when its end never arrived."""
        body, found, rest = output.rpartition(self.mark)
        code, _, collected = rest.partition(b"\n")
        number = parse_integer(code.decode("ascii", "replace"))
        if not found or number is None:
            return None
        return CommandResult(code=number, output=body, errors=errors + collected.decode("utf-8", "replace"))

    def answer(self, done: CommandResult, failure: Callable[[CommandResult], TransportError]) -> CommandResult:
        """Returns the command's own answer, or `done` where it took too long. Raises what `failure` makes of a link that broke."""
        if done.code == 124:
            return done
        answer = self.open(done.output, done.errors)
        if answer is None:
            raise failure(done)
        return answer


def frame_command(arguments: Sequence[str], *, separate: bool = True) -> FramedCommand:
    """Quotes a command for a POSIX shell and seals it. Raises TransportError for what no command line can carry."""
    if any("\0" in argument for argument in arguments):
        raise TransportError("an argument with a NUL byte cannot be passed to a command; leave it out")
    mark = f"[{secrets.token_hex(8)}]"
    command = shlex.join(arguments)
    if separate:
        return FramedCommand(f"{command}; echo '{mark}'$?", mark.encode())
    # Descriptor 3 is the output; what goes to standard error lands in the variable.
    return FramedCommand(f"{{ e=$({{ {command}; }} 2>&1 1>&3 3>&-); c=$?; }} 3>&1; echo '{mark}'$c; printf %s \"$e\"", mark.encode())
