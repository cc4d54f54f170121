"""The take-home kit, whole: `edge-bench devices --energy` on an emulated Pi and phone with the real package, and a report of both files.

Real are the package (its own Python, edge-bench and backend, run by qemu), adb and ssh, and the protocol with its windows. Played are the
meters: they show the watts that the device's programs take in a model (device_power.py).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from device_power import DevicePower, pmic, rails
from edge_bench.cli.main import main
from edge_bench.devices import remote_run
from edge_bench.measure.energy import read_energy
from edge_bench.measure.records import read_records
from fake_phone import PI, FakePhone
from phones import Desk
from ssh_host import SshHost

if shutil.which("qemu-aarch64-static") is None:
    pytest.skip("needs qemu-aarch64-static (apt install qemu-user-static)", allow_module_level=True)
PACKAGES = os.environ.get("EDGE_MTP_KIT_PACKAGES", "")
if not PACKAGES:
    pytest.skip("takes ten minutes: EDGE_MTP_KIT_PACKAGES names a folder with linux-arm64 and android-arm64", allow_module_level=True)

pytestmark = pytest.mark.slow
# Small enough for an emulator: one prompt, few tokens; the protocol's windows stay as they are.
SMALL = ("--domains", "code", "--lengths", "none", "--contexts", "none", "--max-tokens", "16", "--threads", "1", "--context", "256")


def bench(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments], env={"COLUMNS": "130"})
    print(f"$ edge-bench {' '.join(map(str, arguments))}\n{result.output}")
    return result


@contextmanager
def a_pi(folder: Path) -> Iterator[tuple[str, ...]]:
    """A Raspberry Pi 5 behind a real sshd; yields the options that reach it."""
    pi = FakePhone(folder / "disk", cpu="cortex-a76", pi=PI)
    shell = Path(__file__).parent / "support/pi_shell.py"
    power = DevicePower(pi, pmic(pi), idle_watts=2.7, core_watts=1.4)
    host = SshHost(folder / "ssh", command=f"{sys.executable} {shell} {pi.root} cortex-a76")
    try:
        yield "--ssh", "pi", "--ssh-config", str(host.config)
    finally:
        host.stop()
        power.close()
        pi.close()


@contextmanager
def a_phone(desk: Desk) -> Iterator[tuple[str, ...]]:
    """A phone with rail monitors behind the real adb client; yields the options that reach it."""
    daemon = desk.phone(cpu="cortex-a76")
    power = DevicePower(daemon.phone, rails(daemon.phone), idle_watts=0.9, core_watts=1.1)
    try:
        yield "--adb", daemon.serial
    finally:
        power.close()
        desk.adb("disconnect", daemon.serial)
        daemon.close()


@pytest.mark.parametrize(("platform", "scope"), [("linux-arm64", "board_sensed"), ("android-arm64", "rails")])
def test_a_record_is_brought_home(
    platform: str, scope: str, onnx_pair: Callable[[str], Path], desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_run, "POLL_SECONDS", 2.0)
    folders = ("--package", Path(PACKAGES) / platform, "--results", tmp_path / "results", "--device-folder", tmp_path / "device")
    with a_pi(tmp_path) if platform == "linux-arm64" else a_phone(desk) as reach:
        result = bench("devices", onnx_pair("int4"), *reach, *folders, *SMALL, "--energy", "--minutes", "5", "--run", "kit")
    assert result.exit_code == 0
    (runs,) = (tmp_path / "results").rglob("runs.jsonl")
    report, log = read_energy(runs.with_name("energy.jsonl"))
    assert report.scope == scope
    assert {variant.name for variant in report.variants} == {"plain", "split profit"}
    assert all(variant.n for variant in report.variants)
    assert not any(load.is_busy for load in log.others)
    assert log.environment["run"] == read_records(runs).header.run
    assert "Joules per output token, scope" in bench("report", runs, runs.with_name("energy.jsonl")).stdout
