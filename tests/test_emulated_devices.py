"""From a bundle to a report on an emulated phone and Pi with device packages: outputs and drafts equal those of this machine.

Times under emulation mean nothing. Our folder has the same path on the devices as here: qemu checks files with a system call (faccessat2)
that proot 5.1 does not translate. The packages hold onnxruntime only; EDGE_MTP_PACKAGES names a folder with complete ones.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench_records import ONE_OF_EACH
from device_runs import bench
from edge_bench.devices import remote_run as remote
from edge_bench.measure.records import Records, Run, read_records
from edge_bench.measure.variants import LLAMA_CPP, OURS
from fake_phone import PI, FakePhone
from kept import shipped_bundle
from phones import Desk
from ssh_host import NEEDS, SshHost
from stub_package import made_package

if shutil.which("qemu-aarch64-static") is None:
    pytest.skip("needs qemu-aarch64-static (apt install qemu-user-static)", allow_module_level=True)

pytestmark = pytest.mark.slow(50)
PAIR = Path(__file__).parent.parent / "exporter/edge_export/reference_pair"
# Of this prompt's first tokens none is a near tie, which operators of onnxruntime's own decide otherwise on ARM: 1.1 nats at least.
WHAT = (*ONE_OF_EACH, "--domains", "repetitive", "--max-tokens", "6", "--backend", "onnx", "--context", "256")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """From a platform to its package."""
    root, value = tmp_path_factory.mktemp("packages"), os.environ.get("EDGE_MTP_PACKAGES")

    @cache
    def package_for(platform: str) -> Path:
        if value and (Path(value) / platform).is_dir():
            return Path(value) / platform
        return made_package(platform, root / platform)

    return package_for


@pytest.fixture(scope="module")
def here(onnx_pair: Callable[[str], Path], probe_memory: None, tmp_path_factory: pytest.TempPathFactory) -> Records:
    path = tmp_path_factory.mktemp("here") / "runs.jsonl"
    result = bench("run", onnx_pair("int4"), *WHAT, "--runs", path)
    assert result.exit_code == 0, result.output
    return read_records(path)


@pytest.fixture(scope="module")
def pair_of_both() -> Path:
    """The shipped pair as graphs for ours and GGUF files for the tools, in one bundle."""
    from edge_export.onnx.request import OnnxRequest

    return shipped_bundle(onnx=OnnxRequest(target="int4", drafter="int4"))


def drafts(records: Records) -> list[tuple[str, str | None, int, int]]:
    def row_of(run: Run) -> tuple[str, str | None, int, int]:
        return run.variant.label, run.output, run.drafted, run.accepted

    ours = [run for run in records.runs if run.variant.side == OURS]
    assert ours
    return [row_of(run) for run in ours]


def test_a_phone_from_package_to_report(
    desk: Desk, package: Callable[[str], Path], here: Records, pair_of_both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package has llama.cpp's tools, they are measured beside ours in the same run."""
    monkeypatch.setattr(remote, "POLL_SECONDS", 1.0)
    folder = package("android-arm64")
    against = ("--against", "llama.cpp=package") if (folder / "tools").is_dir() else ()
    phone = desk.phone(cpu="cortex-a76")
    begin = time.monotonic()
    where = "--adb", phone.serial, "--package", folder, "--results", tmp_path / "results", "--run", "one"
    files = "--html", tmp_path / "page.html", "--device-folder", tmp_path / "device"
    result = bench("devices", pair_of_both, *WHAT, *where, *files, *against)
    print(result.stderr, f"phone, deployed and measured under emulation: {time.monotonic() - begin:.0f} s")
    assert result.exit_code == 0, result.output
    there = read_records(next((tmp_path / "results").rglob("runs.jsonl")))
    assert drafts(there) == drafts(here)
    assert there.header.machine["architecture"] == "aarch64"
    assert "Cortex-A76" in there.header.machine["cores"]
    assert "edge-bench" in (tmp_path / "page.html").read_text()
    if against:
        theirs = [run for run in there.runs if run.variant.side == LLAMA_CPP]
        assert all(run.tokens >= 6 and run.seconds > 0 for run in theirs)
        assert any(run.drafted >= run.accepted > 0 for run in theirs)
        assert "over llama.cpp" in result.stdout
    desk.adb("disconnect", phone.serial)
    phone.close()


@pytest.mark.skipif(bool(NEEDS), reason=NEEDS or "sshd is here")
def test_a_pi_from_package_to_report(
    package: Callable[[str], Path], here: Records, onnx_pair: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "POLL_SECONDS", 1.0)
    monkeypatch.setattr(remote, "WATCH_SECONDS", 1.0)
    pi = FakePhone(tmp_path / "pi", cpu="cortex-a76", pi=PI)
    support = Path(__file__).parent / "support"
    host = SshHost(tmp_path / "ssh", command=f"{sys.executable} {support / 'pi_shell.py'} {tmp_path / 'pi'} cortex-a76")
    start = remote.start_job

    def sagging(*arguments: Any) -> None:
        # A supply that sags while it computes: the board says that it throttles now, and later that it did.
        pi.vary("/system/says/vcgencmd get_throttled", ["throttled=0x0\n", "throttled=0x50005\n", "throttled=0x50000\n"], 8.0)
        start(*arguments)

    monkeypatch.setattr(remote, "start_job", sagging)
    begin = time.monotonic()
    try:
        reach = "--ssh", "pi", "--ssh-config", host.config, "--device-folder", tmp_path / "device"
        where = "--package", package("linux-arm64"), "--results", tmp_path / "results", "--run", "one"
        result = bench("devices", onnx_pair("int4"), *WHAT, *reach, *where)
    finally:
        host.stop()
        pi.close()
    print(result.stderr, f"Pi, deployed and measured under emulation: {time.monotonic() - begin:.0f} s")
    assert result.exit_code == 0, result.output
    there = read_records(tmp_path / "results/one/ssh-pi/runs.jsonl")
    assert drafts(there) == drafts(here)
    assert "the board throttled (get_throttled 0x50005)" in result.stdout
