"""Binary and tabular formats: Windows' and perfetto's structures, NVIDIA's library, tables of external meters."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_devices.energy.external.table import import_csv
from edge_devices.energy.virtual_meters import clock_offset
from edge_devices.errors import MeasurementError, MeterError
from edge_devices.machine.system import CommandResult, System
from edge_devices.meters import nvml, windows_emi
from edge_devices.meters.android import power_stats
from edge_devices.meters.android.perfetto import parse_rails
from edge_devices.meters.android.power_stats import parse_channels
from edge_devices.meters.base import Kind, MeterState, Sample, Trace
from protobuf_messages import message

FIXTURES = Path(__file__).parent / "fixtures"


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "meter.csv"
    path.write_text(text)
    return path


def steps_trace(tmp_path, loads, offset: float) -> Trace:
    rows = ["time,W"]
    for i in range(4000):
        t = i * 0.02
        on = any(a <= t < b for a, b in loads)
        rows.append(f"{t - offset},{7 if on else 2 + (i % 7) * 0.1}")
    return import_csv(table(tmp_path, "\n".join(rows)))


def test_clocks_align_by_load_steps(tmp_path):
    loads = [(10.0, 13.0), (17.0, 22.0), (24.0, 32.0)]
    assert clock_offset(steps_trace(tmp_path, loads, 123.4), loads, search=(0.0, 300.0)) == pytest.approx(123.4, abs=0.03)


def test_clocks_that_fit_twice_or_not_at_all_are_refused(tmp_path):
    even = [(10.0 + 6 * i, 13.0 + 6 * i) for i in range(8)]
    with pytest.raises(MeasurementError, match="two places"):
        clock_offset(steps_trace(tmp_path, even, 0.0), even[2:5], search=(-60.0, 60.0))
    with pytest.raises(MeasurementError, match="no load step is visible"):
        clock_offset(steps_trace(tmp_path, [], 0.0), even[:2], search=(-5.0, 5.0))
    with pytest.raises(MeasurementError, match="1 load steps"):
        clock_offset(steps_trace(tmp_path, even, 0.0), even[:1], search=(-5.0, 5.0))


def rails_trace() -> bytes:
    descriptors = [(1, message((1, i), (2, name), (4, 10))) for i, name in enumerate([b"S2M_VDD_CPUCL2", b"S1M_VDD_MIF"])]
    early = [(2, message((1, i), (2, 1000), (3, 100 + i))) for i in range(2)]
    late = [(2, message((1, i), (2, 1250), (3, 30203502 + i))) for i in range(2)]
    return message(
        (1, message((8, 7), (40, message(*descriptors, *early)))), (1, message((38, b"\x08\x01"))), (1, message((40, message(*late))))
    )


def test_perfetto_rails():
    assert parse_rails(rails_trace()) == {"S2M_VDD_CPUCL2": 30203502, "S1M_VDD_MIF": 30203503}
    assert parse_channels("  ChannelId: 3, ChannelName: S2M_VDD_CPUCL2, ChannelSubsystem: CPU(BIG)") == {3: "S2M_VDD_CPUCL2"}


def test_a_phones_trace_is_read_without_the_rest(tmp_path):
    other = message((1, message((45, message((3, b"google/oriole:14"))))))
    channels = b"ChannelId: 3, ChannelName: S2M_VDD_CPUCL2, ChannelSubsystem: CPU(BIG)\n"

    def run(arguments, answer=b"", seconds=10.0):
        if arguments[0] == "perfetto":
            assert b"collect_power_rails: true" in answer
            return CommandResult(code=0, output=other + rails_trace())
        return CommandResult(code=0, output=channels) if "powerstats" in arguments else CommandResult(code=127, output=b"")

    (tmp_path / "system").mkdir()
    (tmp_path / "system/build.prop").write_text("")
    phone = System(root=tmp_path, run=run, clock=lambda: 1.0)
    (found,) = power_stats.find(phone)
    assert found.meter.read().value == pytest.approx(60.407005)


@given(st.integers(0, len(rails_trace()) - 1))
def test_a_cut_trace_is_refused_or_read_in_part(size):
    try:
        assert parse_rails(rails_trace()[:size]).keys() <= {"S2M_VDD_CPUCL2", "S1M_VDD_MIF"}
    except MeterError as error:
        assert "record it again" in str(error)  # noqa: PT017


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(trace):
    try:
        parse_rails(trace)
    except MeterError:
        return


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


def test_a_trace_refuses_what_is_no_time_line():
    trace = Trace(facts=import_csv(FIXTURES / "fnirsi.txt").facts)
    trace.add(Sample(1.0, 2.0))
    for bad in (Sample(0.5, 2.0), Sample(2.0, float("nan"))):
        with pytest.raises(MeasurementError, match="record it again"):
            trace.add(bad)
    with pytest.raises(MeasurementError, match="begins only after"):
        trace.index_at(0.5)
