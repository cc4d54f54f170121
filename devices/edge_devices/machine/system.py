"""The machine as the meters see it: files below a root, commands, a clock. Tests put another one in its place."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

LONGEST_TEXT = 1 << 20  # bytes kept of one file or one command's answer; the longest real one, dumpsys, is a few kilobytes


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """What a command answered. `code` is its exit status; 127: there is no such command, 124: it took too long."""

    code: int
    output: bytes
    errors: str = ""

    @property
    def text(self) -> str:
        """Returns the output as text."""
        return self.output.decode("utf-8", errors="replace")


def run_command(arguments: Sequence[str], answer: bytes = b"", seconds: float = 10.0, most: int = LONGEST_TEXT) -> CommandResult:
    """Runs a command with `answer` on its standard input, and keeps `most` bytes of its output; never raises for what the command does."""
    environment = os.environ | {"LC_ALL": "C"}  # a decimal comma would be read as another number
    try:
        done = subprocess.run(list(arguments), input=answer, capture_output=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return CommandResult(code=124, output=b"", errors=f"no answer in {seconds:g} s")
    except PermissionError as error:
        return CommandResult(code=126, output=b"", errors=str(error))
    except OSError as error:
        return CommandResult(code=127, output=b"", errors=str(error))
    return CommandResult(code=done.returncode, output=done.stdout[:most], errors=done.stderr[:4096].decode("utf-8", "replace"))


@dataclass(frozen=True, kw_only=True)
class System:
    """One machine. `clock` is in seconds and is the one that decoding is timed with, so marks and samples share it."""

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
        """Returns the whole number a file holds; None where there is no file or no number. PermissionError passes through."""
        try:
            return int(self.text(path))
        except PermissionError:
            raise
        except (OSError, ValueError):
            return None

    def paths(self, pattern: str) -> list[str]:
        """Returns what matches a glob below the root, sorted, relative to it."""
        try:
            return sorted(str(p.relative_to(self.root)) for p in self.root.glob(pattern))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Returns whether a path below the root is there, readable or not."""
        try:
            return (self.root / path).exists()
        except OSError:
            return False

    @property
    def is_android(self) -> bool:
        """Returns whether this is Android (AOSP: /system/build.prop and the zygote's program)."""
        return self.exists("system/build.prop") or self.exists("system/bin/app_process")
