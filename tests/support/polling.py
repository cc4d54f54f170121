"""Waiting for what another thread or process does: no test rests on how long that takes. And processes that run, or have ended."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def wait(condition: Callable[[], Any], seconds: float = 300) -> bool:
    """Whether a condition holds within these seconds, which only a test that fails spends."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def packed_weights_written() -> None:
    for thread in threading.enumerate():
        if thread.name == "edge-mtp packed cache":
            thread.join()


def dead_process() -> int:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


def is_running(pid: int | str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
