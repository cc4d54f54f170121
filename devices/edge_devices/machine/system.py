"""Access to a machine: files below a root, commands, a clock. Tests replace it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

LONGEST_TEXT = 1 << 20  # bytes kept of a file or a command's output; the longest in practice, dumpsys, has a few kilobytes
PIECE = 1 << 16
INTERRUPT_SECONDS = 0.25  # after Ctrl-C, which the command gets too: what it may take to end by itself


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """The result of a command. `code` is its exit status; 127: not found, 126: not permitted, 124: timed out.

    `cut`: it wrote more than it may and was ended; `output` has the beginning, `code` is 125.
    """

    code: int
    output: bytes
    errors: str = ""
    cut: bool = False

    @property
    def text(self) -> str:
        """Returns the output as text."""
        return self.output.decode("utf-8", errors="replace")


def run_command(arguments: Sequence[str], answer: bytes = b"", seconds: float = 10.0, most: int = LONGEST_TEXT) -> CommandResult:
    """Runs a command with `answer` as standard input. Failures are in the result, not raised.

    A command that writes more than `most` bytes to one of its outputs is ended, so that it cannot fill this machine's memory.
    """
    environment = os.environ | {"LC_ALL": "C"}  # no decimal commas
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(list(arguments), stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, env=environment)
    except PermissionError as error:
        return CommandResult(code=126, output=b"", errors=str(error))
    except OSError as error:
        return CommandResult(code=127, output=b"", errors=str(error))
    output, errors = (_Reader(process, each, most) for each in (process.stdout, process.stderr))
    try:
        ended = _finish(process, answer, (output, errors), time.monotonic() + seconds)
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPT_SECONDS)
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if output.cut or errors.cut:
        return CommandResult(code=125, output=bytes(output.kept[:most]), errors=f"the answer is longer than {most} bytes", cut=True)
    if not ended:
        return CommandResult(code=124, output=b"", errors=f"no answer in {seconds:g} s")
    return CommandResult(code=process.returncode, output=bytes(output.kept), errors=errors.kept[:4096].decode("utf-8", "replace"))


class _Reader(threading.Thread):
    """Keeps what a command writes to a pipe; one piece beyond the limit, it ends the command. The thread owns the pipe: a child of the
    command may hold the other end for longer than anybody waits.
    """

    def __init__(self, process: subprocess.Popen[bytes], pipe: IO[bytes] | None, most: int) -> None:
        super().__init__(daemon=True)
        self.kept, self.cut = bytearray(), False
        self._process, self._pipe, self._most = process, pipe, most

    def run(self) -> None:
        """Reads to the end or the limit."""
        if self._pipe is None:
            return
        with self._pipe:
            while piece := self._pipe.read(PIECE):
                self.kept += piece
                if len(self.kept) > self._most:
                    self.cut = True
                    self._process.kill()  # before the pipe is closed, so that the command does nothing after its child fails
                    return


def _finish(process: subprocess.Popen[bytes], answer: bytes, readers: Sequence[_Reader], end: float) -> bool:
    """Waits until the outputs and the process end, and returns whether they did before the time `end`."""
    feeder = threading.Thread(target=_feed, args=(process.stdin, answer), daemon=True)
    for thread in (feeder, *readers):
        thread.start()
    for reader in readers:
        reader.join(max(0.0, end - time.monotonic()))
        if reader.cut:
            return True
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return not any(reader.is_alive() for reader in readers)


def _feed(pipe: IO[bytes], answer: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.write(answer)


@dataclass(frozen=True, kw_only=True)
class System:
    """One machine. `clock`, in seconds, is also what decoding is timed with, so that marks and samples are comparable."""

    root: Path = Path("/")
    run: Callable[..., CommandResult] = run_command
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    platform: str = sys.platform

    def text(self, path: str) -> str:
        """Returns the text of a file below the root, stripped; raises OSError as open does."""
        with (self.root / path).open("rb") as file:
            return file.read(LONGEST_TEXT).decode("utf-8", errors="replace").strip()

    def text_or(self, path: str, default: str = "") -> str:
        """Returns the text of a file, or `default` where it cannot be read."""
        try:
            return self.text(path)
        except OSError:
            return default

    def number(self, path: str) -> int | None:
        """Returns the integer in a file; None without a file or an integer. Raises PermissionError."""
        try:
            return int(self.text(path))
        except PermissionError:
            raise
        except (OSError, ValueError):
            return None

    def paths(self, pattern: str) -> list[str]:
        """Returns the paths below the root that match a glob, sorted, relative to the root."""
        try:
            return sorted(str(p.relative_to(self.root)) for p in self.root.glob(pattern))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Returns whether a path exists below the root, readable or not."""
        try:
            return (self.root / path).exists()
        except OSError:
            return False

    @property
    def is_android(self) -> bool:
        """Returns whether this is Android (AOSP: /system/build.prop and the zygote's program)."""
        return self.exists("system/build.prop") or self.exists("system/bin/app_process")
