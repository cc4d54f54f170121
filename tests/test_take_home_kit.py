"""The take-home kit, whole: `edge-bench contribute` on an emulated Pi and phone with the real device package, and `pool` of both records.

Real are the package (its own Python, edge-bench and backend, run by qemu), adb and ssh, and the protocol with its windows. Played are the
meters: they show the watts that the device's programs take in a model (device_power.py).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from device_power import DevicePower, pmic, rails
from edge_bench.cli.contribute import PROTOCOL, Contribution
from edge_bench.cli.devices import ReachOptions
from edge_bench.cli.main import main
from edge_bench.contribution.energy_records import check_record, invalid, parsed_record
from edge_bench.devices import remote_run
from edge_bench.measure.request import MeterOptions
from edge_runtime.session.load_options import LoadOptions
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
SMALL = replace(PROTOCOL, domains=("code",), tokens=16, threads=1)


def bench(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments], env={"COLUMNS": "130"})
    print(f"$ edge-bench {' '.join(map(str, arguments))}\n{result.output}")
    return result


@contextmanager
def a_pi(folder: Path) -> Iterator[dict[str, Any]]:
    """A Raspberry Pi 5 behind a real sshd; yields what reaches it."""
    pi = FakePhone(folder / "disk", cpu="cortex-a76", pi=PI)
    shell = Path(__file__).parent / "support/pi_shell.py"
    power = DevicePower(pi, pmic(pi), idle_watts=2.7, core_watts=1.4)
    host = SshHost(folder / "ssh", command=f"{sys.executable} {shell} {pi.root} cortex-a76")
    try:
        yield {"ssh": ("pi",), "ssh_config": host.config}
    finally:
        host.stop()
        power.close()
        pi.close()


@contextmanager
def a_phone(desk: Desk) -> Iterator[dict[str, Any]]:
    """A phone with rail monitors behind the real adb client; yields what reaches it."""
    daemon = desk.phone(cpu="cortex-a76")
    power = DevicePower(daemon.phone, rails(daemon.phone), idle_watts=0.9, core_watts=1.1)
    try:
        yield {"adb": (daemon.serial,)}
    finally:
        power.close()
        desk.adb("disconnect", daemon.serial)
        daemon.close()


@pytest.mark.parametrize(("platform", "scope"), [("linux-arm64", "board_sensed"), ("android-arm64", "rails")])
def test_a_record_is_brought_home(
    platform: str, scope: str, onnx_pair: Callable[[str], Path], desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_run, "POLL_SECONDS", 2.0)
    record, results = tmp_path / "record.json", tmp_path / "results"
    with a_pi(tmp_path) if platform == "linux-arm64" else a_phone(desk) as reach:
        folders = {"package": Path(PACKAGES) / platform, "results": results, "device_folder": str(tmp_path / "device")}
        contribution = Contribution(onnx_pair("int4"), record, None, SMALL, LoadOptions(context=256))
        contribution.on_devices(ReachOptions(**reach, **folders), MeterOptions(minutes=5))
    bench("pool", record)
    checked = check_record(record, parsed_record(record, record.read_bytes()))
    assert checked.report.scope == scope
    assert {variant.name for variant in checked.report.variants} == {"plain", "split profit"}
    assert all(variant.n for variant in checked.report.variants)
    assert not any(load.is_busy for load in checked.run_log.others)
    # An emulator is as fast as the machine below it lets it be: on a busy one the rules leave the record out.
    print("valid" if not invalid(checked) else invalid(checked))
