"""Runs code in a child process that could crash this one; a crash is a result too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from edge_runtime.errors import BackendError


@dataclass(frozen=True, kw_only=True)
class ChildReport:
    """The JSON object of the last line a child printed (empty if there was none), and how it ended if not with exit code 0.

    `late`: it was killed because it took too long.
    """

    answer: dict[str, object]
    end: str | None
    late: bool = False


def ask_child(command: Sequence[str], timeout_seconds: float) -> ChildReport:
    """Runs `command` and returns its report, without an answer if it is killed or hangs. Raises BackendError if it cannot start."""
    # Without this, ggml calls a debugger on the dying child to print its stack (ggml/src/ggml.c).
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    try:
        child = subprocess.run(command, capture_output=True, timeout=timeout_seconds, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return ChildReport(answer={}, end=f"gave no answer in {timeout_seconds:g} seconds", late=True)
    except OSError as error:
        raise BackendError(f"a child process could not be started ({error}); check that {command[0]} can be run") from error
    if child.returncode < 0:
        return ChildReport(answer={}, end=f"died of {signal_name(-child.returncode)}")
    end = f"ended with exit code {child.returncode}" if child.returncode else None
    return ChildReport(answer=_last_object(child.stdout), end=end)


def signal_name(number: int) -> str:
    """Returns "SIGSEGV" for 11; "signal N" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_object(output: bytes) -> dict[str, object]:
    lines = output.decode("utf-8", "replace").strip().splitlines()
    try:
        data = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
