"""Times each step to a first figure, from download to table: on an emulated phone with rails, and on this machine as a laptop.

    python scripts/checks/check_first_figure.py phone WORK     # needs adb, proot, qemu-aarch64-static (apt), and a network
    python scripts/checks/check_first_figure.py laptop WORK    # needs proot and a network

Real are the commands, packages, wheels, adb and the energy protocol with its windows; the phone's processor is qemu, whose times mean
nothing, and the meters are doubles: a Pixel's rails, a battery that updates every second. Small answers, so that an emulator ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

sys.path.append(str(Path(__file__).parents[2] / "tests/support"))

from device_power import DevicePower, rails
from fake_phone import FakePhone
from phones import Desk

ROOT = Path(__file__).parents[2]
SMALL = ("--domains", "code", "--max-tokens", "16", "--lengths", "none", "--contexts", "none", "--repeats", "2", "--context", "256")
BATTERY_S, FULL_WH = 1.0, 50.0


class Steps:
    """Runs the commands of a page one after the other; prints what each says at its end, and a table of the seconds."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = os.environ | environment
        self._seconds: list[tuple[str, float]] = []

    def run(self, title: str, *words: str | Path, lines: int = 12) -> None:
        command = [str(word) for word in words]
        click.echo(f"\n## {title}\n$ {' '.join(command)}")
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, env=self._environment, check=False)
        self._seconds.append((title, time.monotonic() - begin))
        click.echo("\n".join((done.stdout or done.stderr).strip().splitlines()[-lines:]))
        if done.returncode:
            raise click.ClickException(f"{title} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")

    def table(self) -> None:
        click.echo("\n| step | seconds |\n|:--|--:|")
        for title, seconds in (*self._seconds, ("all", sum(seconds for _, seconds in self._seconds))):
            click.echo(f"| {title} | {seconds:.0f} |")
        # A busy machine is slower, and never steady.
        click.echo(f"\nload of this machine with {os.cpu_count()} processors over 15 minutes: {os.getloadavg()[2]:.1f}")


def installed(name: str) -> Path:
    """A command beside this Python."""
    return Path(sys.executable).parent / name


@click.group()
def main() -> None:
    """Times the steps to a first figure."""


@main.command()
@click.argument("work", type=click.Path(path_type=Path))
@click.option("--minutes", default=5, show_default=True, help="Of the energy protocol.")
def phone(work: Path, minutes: int) -> None:
    """The page docs/phones.md, on an emulated phone."""
    work.mkdir(parents=True)
    desk = Desk(work / "desk")
    daemon = desk.phone(cpu="cortex-a76")
    power = DevicePower(daemon.phone, rails(daemon.phone), idle_watts=0.9, core_watts=1.1)
    try:
        steps = Steps(desk.environment | {"EDGE_MTP_CACHE": str(work / "cache"), "COLUMNS": "110"})
        export, bench = installed("edge-export"), installed("edge-bench")
        steps.run("1. adb lists the phone", "adb", "devices", "-l")
        steps.run("2a. package", export, "package", "android-arm64", "--output", work / "package")
        steps.run("2b. bundle", export, "reference", "--format", "onnx", "--output", work / "bundle")
        # Our folder has the same path on the device as here: qemu checks files with a system call that proot does not translate.
        where = ("--package", work / "package", "--adb", daemon.serial, "--device-folder", work / "device", "--results", work / "results")
        steps.run("3. speed", bench, "devices", work / "bundle", *where, "--run", "speed", *SMALL, lines=30)
        energy = ("--energy", "--minutes", str(minutes))
        steps.run("4. joules", bench, "devices", work / "bundle", *where, "--run", "joules", *SMALL, *energy, lines=45)
        steps.run("5. clean", bench, "devices", "--adb", daemon.serial, "--device-folder", work / "device", "--clean")
    finally:
        power.close()
        desk.close()
    steps.table()


@contextmanager
def battery(work: Path) -> Iterator[tuple[str, ...]]:
    """A laptop's battery; yields the words before a command that make its power show on it."""
    laptop = FakePhone(work / "laptop")
    supply = laptop.root / "sys/class/power_supply"
    latest, ended = [0.0, 0.0], threading.Event()
    for name, text in {
        "AC/type": "Mains",
        "AC/online": "0",
        "BAT0/type": "Battery",
        "BAT0/present": "1",
        "BAT0/status": "Discharging",
    }.items():
        laptop.write(f"/sys/class/power_supply/{name}", f"{text}\n")

    def show(joules: float, watts: float) -> None:
        latest[:] = joules, watts

    def update() -> None:
        while True:
            joules, watts = latest
            laptop.write("/sys/class/power_supply/BAT0/power_now", f"{round(watts * 1e6)}\n")
            laptop.write("/sys/class/power_supply/BAT0/energy_now", f"{round((FULL_WH * 0.8 - joules / 3600) * 1e6)}\n")
            laptop.write("/sys/class/power_supply/BAT0/energy_full", f"{round(FULL_WH * 1e6)}\n")
            laptop.write("/sys/class/power_supply/BAT0/capacity", "80\n")
            if ended.wait(BATTERY_S):
                return

    power = DevicePower(laptop, show, idle_watts=6.0, core_watts=8.0)
    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    try:
        yield ("proot", "-b", f"{supply}:/sys/class/power_supply")
    finally:
        ended.set()
        thread.join()
        power.close()
        laptop.close()


@main.command()
@click.argument("work", type=click.Path(path_type=Path))
@click.option("--minutes", default=6, show_default=True, help="Of the energy protocol.")
def laptop(work: Path, minutes: int) -> None:
    """From a checkout to joules per token on this machine, whose battery is a double."""
    work.mkdir(parents=True)
    steps = Steps({"EDGE_MTP_CACHE": str(work / "cache"), "COLUMNS": "110"})
    binaries = work / "venv/bin"
    with battery(work) as words:
        steps.run("1. environment", sys.executable, "-m", "venv", work / "venv", lines=1)
        steps.run("2. wheels", binaries / "pip", "install", "--quiet", f"{ROOT}[onnx,export-onnx]", lines=1)
        steps.run("3. bundle", binaries / "edge-export", "reference", "--format", "onnx", "--output", work / "bundle")
        run = (binaries / "edge-bench", "run", work / "bundle", *SMALL)
        steps.run("4. speed", *run, lines=30)
        energy = ("--energy", work / "energy.jsonl", "--minutes", str(minutes))
        steps.run("5. joules", *words, *run, *energy, lines=45)
    steps.table()


if __name__ == "__main__":
    main()
