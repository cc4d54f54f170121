"""Runs of edge-bench on a device whose benchmark is played: start one, wait for its middle, hold it there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner, Result

from edge_bench.cli.main import main
from edge_devices.transports.adb import AdbTransport
from fake_adbd import FakeAdbd


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], env={"COLUMNS": "250"})


def hold(daemon: FakeAdbd) -> Path:
    """Keeps played benchmarks of this phone in the middle until the file is removed."""
    path = daemon.phone.path(f"{AdbTransport.FOLDER}/hold")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def until_seen(daemon: FakeAdbd, words: str, times: int = 1) -> None:
    """Waits until the watch on the phone has written something."""
    folder, end = daemon.phone.path(f"{AdbTransport.FOLDER}/runs"), time.monotonic() + 30
    while not any(path.read_text().count(words) >= times for path in folder.glob("*/watch.jsonl")):
        assert time.monotonic() < end
        time.sleep(0.05)


def when_running(daemon: FakeAdbd, then: Callable[[], object]) -> threading.Thread:
    """Does something once the benchmark is in its middle."""

    def wait() -> None:
        until_seen(daemon, '"look"', times=4)
        then()

    return in_background(wait)
