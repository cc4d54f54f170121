"""From a bundle to a report on an emulated phone with its device package: outputs and drafts equal those of this machine.

Times under emulation mean nothing. Our folder has the same path on the device as here: qemu checks files with a system call (faccessat2)
that proot 5.1 does not translate. The package holds onnxruntime only; EDGE_MTP_PACKAGES names a folder with a complete one.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench_records import ONE_OF_EACH
from device_runs import bench
from edge_bench.devices import remote_run as remote
from edge_bench.measure.records import LLAMA_CPP, OURS, Records, Run, read_records
from kept import shipped_bundle
from phones import Desk
from stub_package import made_package

if shutil.which("qemu-aarch64-static") is None:
    pytest.skip("needs qemu-aarch64-static (apt install qemu-user-static)", allow_module_level=True)

pytestmark = pytest.mark.slow(90)
# Of this prompt's first tokens none is a near tie, which operators of onnxruntime's own decide otherwise on ARM: 1.1 nats at least.
WHAT = (*ONE_OF_EACH, "--drafters", "split", "--domains", "repetitive", "--max-tokens", "6", "--backend", "onnx", "--context", "256")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    value = os.environ.get("EDGE_MTP_PACKAGES")
    if value and (ready := Path(value) / "android-arm64").is_dir():
        return ready
    return made_package("android-arm64", tmp_path / "package")


@pytest.fixture
def what(tmp_path: Path) -> tuple[str | Path, ...]:
    """WHAT, with costs of steps of one to three rows: those of all thirteen take longer under emulation than the rest of a session."""
    path = tmp_path / "short.yaml"
    path.write_text("speculative_decoding: {tuning: {longest_draft: 2}}\n")
    return (*WHAT, "--config", path)


@pytest.fixture
def here(onnx_pair: Callable[[str], Path], probe_memory: None, what: tuple[str | Path, ...], tmp_path: Path) -> Records:
    path = tmp_path / "here.jsonl"
    result = bench("run", onnx_pair("int4"), *what, "--runs", path)
    assert result.exit_code == 0, result.output
    return read_records(path)


@pytest.fixture
def pair_of_both() -> Path:
    """The shipped pair as graphs for ours and GGUF files for the tools, in one bundle."""
    from edge_export.onnx.request import OnnxRequest

    return shipped_bundle(onnx=OnnxRequest(target="int4", drafter="int4"))


def drafts(records: Records) -> list[tuple[str, str | None, int, int]]:
    """Returns each variant's output and drafts, in one order: variants take turns, and another program beside ours changes them."""

    def row_of(run: Run) -> tuple[str, str | None, int, int]:
        return run.variant.label, run.output, run.drafted, run.accepted

    ours = [run for run in records.runs if run.variant.side == OURS]
    assert ours
    return sorted(map(row_of, ours), key=str)


def test_a_phone_from_package_to_report(
    desk: Desk,
    package: Path,
    here: Records,
    pair_of_both: Path,
    what: tuple[str | Path, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the package has llama.cpp's tools, they are measured beside ours in the same run."""
    monkeypatch.setattr(remote, "POLL_SECONDS", 1.0)
    against = ("--against", "llama.cpp=package") if (package / "tools").is_dir() else ()
    phone = desk.phone(cpu="cortex-a76")
    begin = time.monotonic()
    where = "--adb", phone.serial, "--package", package, "--results", tmp_path / "results", "--run", "one"
    files = "--html", tmp_path / "page.html", "--device-folder", tmp_path / "device"
    result = bench("devices", pair_of_both, *what, *where, *files, *against)
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
