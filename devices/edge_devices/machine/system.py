"""Access to a machine: files below a root, commands and a clock. Tests replace it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_devices.children import run_child
from edge_devices.errors import DeviceError

NOT_FOUND = 127  # the exit code if there is no such command
MOVED_S, DRIFT = 5.0, 1e-3  # a clock that was set differs by more than both together; one that is slewed does not (adjtimex(2): 500 ppm)
LONGEST_TEXT = 1 << 20  # the most bytes that are read from a file or a command; real ones have a few kilobytes at most


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """The result of a command.

    `code` is its exit status, or 127 if it was not found, 126 if it was not permitted, 124 if it timed out. With `cut`, it wrote more than
    allowed and was ended; then `output` has the beginning, and `code` is 125.
    """

    code: int
    output: bytes
    errors: str = ""
    cut: bool = False

    @property
    def text(self) -> str:
        return self.output.decode("utf-8", errors="replace")

    @property
    def first_line(self) -> str:
        """The first line of the output, else of the errors, else the exit code."""
        return (self.text.strip() or self.errors.strip() or str(self.code)).splitlines()[0]


def run_command(arguments: Sequence[str], answer: bytes = b"", seconds: float = 10.0, max_bytes: int = LONGEST_TEXT) -> CommandResult:
    """Runs a command with `answer` as standard input. Failures are in the result, not raised.

    A command that writes more than `max_bytes` to one of its outputs is ended, so that it cannot fill this machine's memory.
    """
    try:
        child = run_child(arguments, answer, seconds=seconds, output_bytes=max_bytes, environment={"LC_ALL": "C"})  # no decimal commas
    except DeviceError as error:
        return CommandResult(code=126 if isinstance(error.__cause__, PermissionError) else 127, output=b"", errors=str(error.__cause__))
    if child.cut:
        return CommandResult(code=125, output=child.output, errors=f"the answer is longer than {max_bytes} bytes", cut=True)
    if child.late:
        return CommandResult(code=124, output=b"", errors=f"no answer in {seconds:g} s")
    return CommandResult(code=child.code, output=child.output, errors=child.errors[:4096].decode("utf-8", "replace"))


@dataclass(frozen=True, kw_only=True)
class System:
    """A machine. Decoding is timed with the same `clock`, in seconds, so that its times are comparable with samples."""

    root: Path = Path("/")
    run: Callable[..., CommandResult] = run_command
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    platform: str = sys.platform

    def text(self, path: str) -> str:
        """Returns the stripped text of a file below the root. Raises OSError, as open does."""
        with (self.root / path).open("rb") as file:
            return file.read(LONGEST_TEXT).decode("utf-8", errors="replace").strip()

    def text_or(self, path: str, default: str = "") -> str:
        """Returns the text of a file, or `default` if it cannot be read."""
        try:
            return self.text(path)
        except OSError:
            return default

    def number(self, path: str) -> int | None:
        """Returns the integer in a file; None if there is no file or no integer. Raises PermissionError."""
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


def files_below(folder: str, names: str) -> tuple[str, ...]:
    """Returns patterns for files in folders that match `folder`. `names` are the files' names, separated by blanks."""
    return tuple(f"{folder}/{name}" for name in names.split())


class WallClock:
    """Detects whether the time of day was set while a program runs, by comparing it with a monotonic clock, which measures durations."""

    def __init__(self, now: Callable[[], float] | None = None, clock: Callable[[], float] | None = None) -> None:
        self._now, self._clock = now or time.time, clock or time.monotonic
        self._began = self._now(), self._clock()

    def moved_by(self) -> float:
        """Returns by how many seconds the time of day was set forward since this object was made; below 0 if it was set back.

        Sleep of the machine looks the same. Small differences, as from a clock that is slewed, are returned as 0.
        """
        wall, steady = self._now() - self._began[0], self._clock() - self._began[1]
        return wall - steady if abs(wall - steady) > MOVED_S + DRIFT * steady else 0.0
