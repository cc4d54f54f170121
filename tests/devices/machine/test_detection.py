"""Which profile a machine gets, what the profiles hold, and which drivers it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_devices.machine.detection import (
    Machine,
    ProfileError,
    big_processors,
    board_name,
    detect_device,
    driver_facts,
    parse_profile,
    pick_profile,
    profile,
    profiles,
    read_clusters,
)
from edge_devices.machine.memory import BLOCK, read_bandwidth
from edge_devices.machine.system import CommandResult, System
from edge_devices.remote.snapshot import RecordedSystem, Recording

POLICY = "sys/devices/system/cpu/cpufreq/policy"


def machine(processor: str = "", cores: tuple[str, ...] = (), architecture: str = "x86_64") -> Machine:
    return Machine(
        system="Linux",
        architecture=architecture,
        processor=processor,
        cores=cores,
        usable_processors=8,
        features=("avx2",),
        memory_available=None,
    )


@pytest.mark.parametrize(
    ("processor", "model", "soc", "name"),
    [
        ("Cortex-A76", "Raspberry Pi 5 Model B Rev 1.0", "", "raspberry-pi-5"),
        ("Cortex-A72", "Raspberry Pi 4 Model B Rev 1.4", "", "raspberry-pi-4"),
        ("Cortex-A78AE", "NVIDIA Jetson Orin Nano Developer Kit", "", "jetson-orin-nano"),
        ("", "", "SM8650", "snapdragon-8-gen-3"),
        ("Oryon", "", "SM8750", "snapdragon-8-elite"),
        ("", "", "Tensor G4", "tensor-g4"),
        ("", "", "Tensor G5", "tensor-g5"),
        ("", "", "MT6991", "dimensity-9400"),
        ("Intel(R) Core(TM) Ultra 7 155H", "20XX", "", "core-ultra"),
        ("Intel(R) Core(TM) i7-1185G7", "", "", "x86-laptop"),
        ("AMD Ryzen AI 9 HX 370 w/ Radeon 890M", "", "", "ryzen-ai"),
        ("AMD Ryzen 7 5800U", "", "", "x86-laptop"),
        ("Intel(R) Xeon(R) Processor", "", "", "x86-server"),
        ("AMD EPYC 9R14", "", "", "x86-server"),
        ("Apple M3", "", "", "apple-m"),
        ("Snapdragon(R) X Elite - X1E80100", "", "", "snapdragon-x"),
        ("SiFive U74", "", "", "generic"),
    ],
)
def test_picking(processor, model, soc, name):
    assert pick_profile(machine(processor), model, soc)[0].name == name


def test_oryon_cores_without_a_name():
    assert pick_profile(machine("Oryon", ("Oryon", "Oryon"), "aarch64"), "", "")[0].name == "snapdragon-x"
    generic, why = pick_profile(machine("Cortex-A55", ("Cortex-A55",), "aarch64"), "", "")
    assert generic.name == "generic-arm"
    assert generic.quantization == "q4_0"
    assert "no profile fits" in why


def test_every_profile_is_sound():
    for result in profiles().values():
        assert result.sources
        assert result.meters
        assert result.draft_length[0] <= result.draft_length[1] <= 12
        if result.peak_gb_per_s and result.effective_gb_per_s:
            assert result.effective_gb_per_s[1] < result.peak_gb_per_s
    assert profile("raspberry-pi-5").peak_gb_per_s == pytest.approx(17.07, abs=0.01)
    assert len(profiles()) == 14
    with pytest.raises(ProfileError, match="no device profile 'toaster'"):
        profile("toaster")


@pytest.mark.parametrize("text", ["", "title = 3", "not toml", "[match]\n[processor]\n[memory]\n[energy]\n[runtime]\n"])
def test_malformed_profiles_are_refused(text):
    with pytest.raises(ProfileError, match="profile x is malformed"):
        parse_profile("x", text)


def test_unknown_keys_are_refused():
    folder = Path(__file__).parents[3] / "devices" / "edge_devices" / "profiles"
    text = (folder / "raspberry-pi-5.toml").read_text()
    with pytest.raises(ProfileError, match="unknown keys"):
        parse_profile("x", text + "\nturbo = true\n")
    with pytest.raises(ProfileError, match="malformed"):
        parse_profile("x", text.replace("models =", "planets ="))


def phone() -> RecordedSystem:
    files = {"system/build.prop": ""}
    for first, count, khz in [(0, 2, 2265600), (2, 5, 3148800), (7, 1, 3302400)]:
        files[f"{POLICY}{first}/related_cpus"] = " ".join(str(first + i) for i in range(count))
        files[f"{POLICY}{first}/cpuinfo_max_freq"] = str(khz)
    return RecordedSystem(Recording(files=files, commands={"getprop ro.soc.model": (0, "SM8650\n")}))


def test_a_phone():
    device = detect_device(phone())
    assert device.profile.name == "snapdragon-8-gen-3"
    assert device.why == "the chip is SM8650"
    assert [c.max_mhz for c in device.clusters] == [3302.4, 3148.8, 2265.6]
    assert device.threads == min(6, device.machine.usable_processors)


def test_little_cores_are_not_counted():
    clusters = read_clusters(phone())
    assert big_processors(clusters, 8) == 8  # 2.27 GHz keeps pace with 3.3 GHz
    slow = (*clusters[:2], type(clusters[2])(processors=(0, 1), max_mhz=1800.0))
    assert big_processors(slow, 8) == 6
    assert big_processors((), 3) == 3


def test_damaged_clusters_are_left_out():
    files = {
        f"{POLICY}0/related_cpus": "0 1 x",
        f"{POLICY}0/cpuinfo_max_freq": "1000",
        f"{POLICY}4/related_cpus": "4",
        f"{POLICY}4/cpuinfo_max_freq": "",
    }
    assert read_clusters(RecordedSystem(Recording(files=files))) == ()


def test_bandwidth_is_plausible_and_spares_a_full_machine():
    speed = read_bandwidth(1)
    assert speed is not None
    assert 1e8 < speed < 1e13
    assert read_bandwidth(2, memory_available=BLOCK * 15) is None


def test_detecting_reads_no_real_getprop_off_android(tmp_path):
    called = []

    def run(arguments, *_):
        called.append(arguments)
        return CommandResult(code=0, output=b"x")

    assert detect_device(System(root=tmp_path, run=run)).soc == ""
    assert called == []


# The drivers of GPUs and NPUs.


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
