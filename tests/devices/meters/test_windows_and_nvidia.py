"""Windows' structures and NVIDIA's library."""

from __future__ import annotations

import ctypes
import struct

import pytest

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters import nvml, windows_emi
from edge_devices.meters.base import Kind, MeterState


def channel(name: str, unit: int = 0) -> bytes:
    text = (name + "\0").encode("utf-16-le")
    return struct.pack("<IH", unit, len(text)) + text


def metadata(*names: str) -> bytes:
    return b"\0" * 64 + struct.pack("<HH", 1, len(names)) + b"".join(channel(n) for n in names)


class FakePort:
    def __init__(self, answers: dict[int, bytes]) -> None:
        self.answers = answers

    def control(self, code: int, size: int) -> bytes:
        return self.answers[code][:size]


def port(energy: int = 10**12) -> FakePort:
    names = metadata("RAPL_Package0_PKG", "RAPL_Package0_DRAM")
    measurement = struct.pack("<QQQQ", energy, 5, 2 * energy, 5)
    return FakePort(
        {
            windows_emi.GET_VERSION: b"\2\0",
            windows_emi.GET_METADATA_SIZE: struct.pack("<I", len(names)),
            windows_emi.GET_METADATA: names,
            windows_emi.GET_MEASUREMENT: measurement,
        }
    )


def test_windows_energy_meter():
    result = windows_emi.find(System(platform="win32", clock=lambda: 1.0), lambda: [port()])
    assert [f.name for f in result] == ["windows:emi:RAPL_Package0_PKG", "windows:emi:RAPL_Package0_DRAM"]
    assert result[0].meter.read().value == pytest.approx(3600.0)
    assert result[1].meter.read().value == pytest.approx(7200.0)


def test_windows_energy_meter_version_1():
    name = "PKG\0".encode("utf-16-le")
    assert windows_emi.parse_metadata(1, struct.pack("<I", 0) + b"\0" * 64 + struct.pack("<HH", 1, len(name)) + name) == ["PKG"]


@pytest.mark.parametrize("size", range(0, 140, 7))
def test_windows_metadata_cut_off(size):
    with pytest.raises(MeterError):
        windows_emi.parse_metadata(2, metadata("RAPL_Package0_PKG", "RAPL_Package0_DRAM")[:size])


def test_windows_other_units_and_sizes_are_refused():
    with pytest.raises(MeterError, match="unit 3"):
        windows_emi.parse_metadata(2, b"\0" * 64 + struct.pack("<HH", 1, 1) + channel("x", unit=3))
    huge = port()
    huge.answers[windows_emi.GET_METADATA_SIZE] = struct.pack("<I", 1 << 30)
    (result,) = windows_emi.find(System(platform="win32"), lambda: [huge])
    assert result.state is MeterState.PRESENT
    assert windows_emi.find(System(platform="win32"), list)[0].state is MeterState.ABSENT
    assert windows_emi.find(System(platform="linux"), list) == []


def test_every_energy_meter_that_windows_lists_is_opened():
    asked: list[int] = []

    class Library:
        def __init__(self, name: str) -> None:
            self.CreateFileW = lambda path, *_: {"first": 7, "denied": (1 << 64) - 1}[path]  # a handle, or INVALID_HANDLE_VALUE
            self.DeviceIoControl = lambda handle, *_: asked.append(handle.value) or 1

        def CM_Get_Device_Interface_List_SizeW(self, size, *_):
            size._obj.value = len("first\0denied\0\0")
            return 0

        def CM_Get_Device_Interface_ListW(self, guid, _device, listed, size, _flags):
            assert guid.hex() == "4483bd45d67ecf49a440c276c933b053"
            listed[: size.value] = "first\0denied\0\0"
            return 0

    assert windows_emi.open_ports() == []
    (port,) = windows_emi.open_ports(Library)
    assert port.control(windows_emi.GET_VERSION, 2) == b""
    assert asked == [7]


class FakeNvml:
    """The library's functions with pointers filled as the driver does."""

    def __init__(self, energy: int | None, code: int = 0) -> None:
        self.energy, self.code = energy, code

    def nvmlInit_v2(self):
        return self.code

    def nvmlDeviceGetCount_v2(self, number):
        number._obj.value = 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 1 + index.value
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device, number):
        assert isinstance(number._obj, ctypes.c_ulonglong)
        if self.energy is None:
            return nvml.NOT_SUPPORTED
        number._obj.value = self.energy
        return 0

    def nvmlDeviceGetPowerUsage(self, device, number):
        number._obj.value = 12345
        return 0


def test_nvidia_boards():
    (counts,) = nvml.find(System(platform="linux"), lambda _: FakeNvml(123456))
    assert counts.meter.read().value == pytest.approx(123.456)
    (samples,) = nvml.find(System(platform="linux"), lambda _: FakeNvml(None))
    assert samples.meter.facts.kind is Kind.SAMPLER
    assert samples.meter.read().value == pytest.approx(12.345)
    (broken,) = nvml.find(System(platform="linux"), lambda _: FakeNvml(1, code=9))
    assert broken.state is MeterState.PRESENT
    assert "code 9" in broken.reason

    def no_library(name):
        raise OSError(name)

    assert nvml.find(System(platform="linux"), no_library)[0].state is MeterState.ABSENT
