"""Runs of edge-bench on a device whose benchmark is played: start one, wait for its middle, hold it there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner, Result

from edge_bench.cli.main import main
from edge_devices.remote.transport import AdbTransport
from fake_adbd import FakeAdbd
from polling import wait


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], env={"COLUMNS": "250"})


def ran(*arguments: str | Path) -> Result:
    """Runs a command that succeeds."""
    result = bench(*arguments)
    assert result.exit_code == 0, result.output
    return result


def hold(daemon: FakeAdbd, name: str = "hold") -> Path:
    """Keeps played benchmarks of this phone in the middle until the file is removed; other names are in `stub_package`."""
    path = daemon.phone.path(f"{AdbTransport.FOLDER}/{name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def wait_for(daemon: FakeAdbd, words: str, times: int = 1) -> None:
    """Waits until the watch on the phone has written something."""
    folder = daemon.phone.path(f"{AdbTransport.FOLDER}/runs")
    assert wait(lambda: any(path.read_text().count(words) >= times for path in folder.glob("*/watch.jsonl")))


def when_running(daemon: FakeAdbd, then: Callable[[], object]) -> threading.Thread:
    """Does something once the benchmark is in its middle."""

    def wait() -> None:
        wait_for(daemon, '"look"', times=4)
        then()

    return in_background(wait)
