"""docs/raspberry-pi.md, "A Raspberry Pi with a USB meter", command by command as it is written there.

Real are ssh and its daemon, the benchmark, the protocol with its windows and the joining of both clocks. The Pi is a folder of this
machine, and the meter in its supply line a file of watts that follow what the Pi's programs compute, with a clock of its own.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import fmean

import pytest

import ssh_host
from device_power import traced_below
from edge_bench.measure.records import read_records
from fake_phone import FakePhone
from ssh_host import SshHost
from stub_package import stub_package

PAGE = Path(__file__).parents[1] / "docs/raspberry-pi.md"
SECTION = "### A Raspberry Pi with a USB meter, step by step"
COMMANDS = Path(sys.executable).parent
# So that a machine that is shared ends soon: one prompt, short answers, the shortest protocol.
SMALL = (
    "--domains code --max-tokens 16 --drafters dense --lengths 2 --policies none --contexts none --repeats 1 --warm-up 0 --threads 1"
    " --check none"
)
AHEAD_S = 7_000.0  # by which the meter's clock is ahead
EVERY_S = 0.6
# On the Pi and its meter time goes by so many times as fast, so that nobody waits for minutes of windows.
FAST = 3.0
FAST_CLOCKS = f"""
import time
def faster(clock): return lambda: {FAST} * clock()
time.perf_counter, time.monotonic = faster(time.perf_counter), faster(time.monotonic)
time.sleep = lambda seconds, sleep=time.sleep: sleep(seconds / {FAST})
"""

pytestmark = [
    pytest.mark.slow(100),
    pytest.mark.skipif("proot" in ssh_host.NEEDS or shutil.which("proot") is None, reason="needs proot (apt install proot)"),
    pytest.mark.skipif(bool(ssh_host.NEEDS), reason=ssh_host.NEEDS),
]


def steps() -> list[list[str]]:
    """The commands of the section, in its order."""
    text = PAGE.read_text(encoding="utf-8").partition(SECTION)[2].partition("\n## ")[0]
    return [shlex.split(line) for line in re.findall(r"^ {7}(edge-.*)$", text, re.MULTILINE)]


class UsbMeter:
    """A meter in the supply line that records a table: watts for each thread of the Pi's Python that computes or wants to, however little
    of this machine it gets.
    """

    def __init__(self, pi: FakePhone) -> None:
        self._pi, self._rows, self._ended, self._random = pi, list[str](), threading.Event(), random.Random(1)
        self._thread = threading.Thread(target=self._record, daemon=True)

    def _record(self) -> None:
        while not self._ended.is_set():
            programs = [number for number in traced_below(self._pi.root) if _says(number, "comm").startswith("python")]
            begin, seen = time.monotonic(), list[int]()
            while time.monotonic() - begin < EVERY_S / FAST:
                seen.append(sum(map(running_threads, programs)))
                time.sleep(0.01)
            watts = (2.2 + 1.5 * fmean(seen)) * self._random.gauss(1.0, 0.003)
            self._rows.append(f"{FAST * begin + AHEAD_S:.2f},{watts:.4f}")

    def start(self) -> None:
        self._thread.start()

    def save(self, path: Path) -> None:
        self._ended.set()
        self._thread.join()
        path.write_text("\n".join(["Time (s),Power (W)", *self._rows, ""]))


def running_threads(number: int) -> int:
    """Returns how many threads of a process run, or wait for a processor."""
    states = [_says(number, f"task/{thread.name}/stat") for thread in Path(f"/proc/{number}/task").glob("*")]
    return [text.rpartition(")")[2][:2] for text in states].count(" R")


def _says(number: int, name: str) -> str:
    try:
        return Path(f"/proc/{number}/{name}").read_text()
    except OSError:
        return ""


def drafts(path: Path) -> list[tuple[str, str | None, int, int]]:
    """Returns each variant's output and drafts; in one order, as variants take turns."""
    return sorted(((run.variant.label, run.output, run.drafted, run.accepted) for run in read_records(path).runs), key=str)


def test_the_walk(exported_pair: Path, tmp_path: Path) -> None:
    package, run, join = steps()
    assert package == ["edge-export", "package", "linux-arm64", "-o", "pi-package"]
    libraries = stub_package(tmp_path / "pi-package", real=True) / "lib"
    assert [path.name for path in (libraries / "edge_bench").iterdir()] == ["measure"], "what makes reports stays here"
    (libraries / "sitecustomize.py").write_text(FAST_CLOCKS)
    (tmp_path / "my-bundle").symlink_to(exported_pair)
    pi = FakePhone(tmp_path / "pi", pi="Raspberry Pi 4 Model B Rev 1.4")
    shell = Path(__file__).parent / "support/pi_shell.py"
    host, meter = SshHost(tmp_path / "ssh", command=f"{sys.executable} {shell} {pi.root}"), UsbMeter(pi)

    def command(words: list[str], *more: str) -> subprocess.CompletedProcess[str]:
        words = [word.replace("pi@raspberrypi", "pi").replace("ssh-pi-raspberrypi", "ssh-pi") for word in words]
        environment = os.environ | {"PATH": f"{COMMANDS}:{os.environ['PATH']}", "COLUMNS": "100", "EDGE_MTP_CACHE": str(tmp_path / "cache")}
        done = subprocess.run([*words, *more], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    try:
        meter.start()
        assert run[run.index("--minutes") :][:2] == ["--minutes", "20"]
        run[run.index("--minutes") + 1] = "1"
        where = "--ssh-config", str(host.config), "--device-folder", str(tmp_path / "device folder")
        done = command(run, *SMALL.split(), *where)
        meter.save(tmp_path / "usb-meter.csv")
    finally:
        host.stop()
        pi.close()
    assert "the recording of the external meter must run from now until the end" in done.stderr
    assert "dense 2" in done.stdout, "the table of speeds"
    command(["edge-bench", "run", "my-bundle", *SMALL.split(), "--runs", "here.jsonl"])
    assert drafts(tmp_path / "bench-results/usb/ssh-pi/runs.jsonl") == drafts(tmp_path / "here.jsonl")
    assert "edge-bench report bench-results/usb/ssh-pi/energy.jsonl --external TABLE" in done.stdout
    joined = command(join)
    heads = [cell.strip() for cell in next(line for line in joined.stdout.splitlines() if "interval" in line).strip("┃").split("┃")]
    assert heads == ["plain", "drafts", "ratio", "interval", "scope"]
    cells = [cell.strip() for cell in next(line for line in joined.stdout.splitlines() if "external" in line).strip("│").split("│")]
    assert float(cells[0]) > 0
    assert re.fullmatch(r"[\d.e-]+ \(dense 2\)", cells[1])
    assert cells[-1] == "external_dc"
