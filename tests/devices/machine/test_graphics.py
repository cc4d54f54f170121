"""The drivers of GPUs and NPUs, read from files of a machine."""

import json
from pathlib import Path

import pytest

from edge_devices.machine.facts import board_name, driver_facts
from edge_devices.machine.system import CommandResult, System


@pytest.fixture(autouse=True)
def no_named_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.delenv(name, raising=False)


def written(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_kernel_modules_have_their_version_or_the_kernels(tmp_path: Path) -> None:
    written(tmp_path, "sys/module/nvidia/version", "580.95\n")
    written(tmp_path, "sys/module/xe/refcnt", "1")
    written(tmp_path, "proc/sys/kernel/osrelease", "6.12.1\n")
    assert driver_facts(System(root=tmp_path, platform="linux")) == ["nvidia 580.95", "xe (Linux 6.12.1)"]


def test_another_build_of_a_vulkan_driver_is_another_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = written(tmp_path, "usr/share/vulkan/icd.d/software.json", json.dumps({"ICD": {"library_path": "./libdriver.so"}}))
    library = written(tmp_path, "usr/share/vulkan/icd.d/libdriver.so", "1")
    for damaged in ("{", "[]", '{"ICD": 1}'):
        written(tmp_path, f"etc/vulkan/icd.d/{len(damaged)}.json", damaged)
    system = System(root=tmp_path, platform="linux")
    before = driver_facts(system)
    assert before == ["Vulkan: libdriver.so, 1 bytes"]
    library.write_text("12")
    assert driver_facts(system) != before
    monkeypatch.setenv("VK_ICD_FILENAMES", str(manifest))
    assert driver_facts(System(root=tmp_path / "empty", platform="linux")) == ["Vulkan: libdriver.so, 2 bytes"]


def test_windows_says_its_drivers_itself(tmp_path: Path) -> None:
    system = System(root=tmp_path, platform="win32", run=lambda _: CommandResult(code=0, output=b"Radeon 32.0.1\r\nNPU 1.2\r\n"))
    assert driver_facts(system) == ["Radeon 32.0.1", "NPU 1.2"]


def test_a_board_is_called_as_its_driver_does_else_by_its_numbers(tmp_path: Path) -> None:
    written(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA H200\nIRQ:   \t\t 99\n")
    written(tmp_path, "sys/bus/pci/devices/0000:02:00.0/vendor", "0x1002\n")
    written(tmp_path, "sys/bus/pci/devices/0000:02:00.0/device", "0x744c\n")
    system = System(root=tmp_path, platform="linux")
    names = [board_name(system, address) for address in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "../../../etc", "")]
    assert names == ["NVIDIA H200", "PCI 1002:744c", "", "", ""]
