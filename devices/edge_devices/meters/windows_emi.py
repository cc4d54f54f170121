"""Windows' Energy Meter Interface: counters of boards that expose one (RAPL through the processor driver, or a sensing chip).

Structures and control codes: emi.h of the Windows SDK. Energy is in picowatt-hours (3.6e-9 J), time in 100 ns.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, MeterFacts, MeterSource, Preference, Scope, SumMeter, absent, present, usable

# GUID_DEVICE_ENERGY_METER of emi.h, in the byte order of memory.
DEVICE_ENERGY_METER = UUID("45bd8344-7ed6-49cf-a440-c276c933b053").bytes_le
GENERIC_READ, SHARE_READ_WRITE, OPEN_EXISTING = 0x80000000, 3, 3
ONLY_PRESENT = 0  # CM_GET_DEVICE_INTERFACE_LIST_PRESENT of cfgmgr32.h
MAX_METERS = 64


class WindowsPort:
    """One open energy meter."""

    def __init__(self, kernel: Any, handle: Any) -> None:
        self._kernel, self._handle = kernel, handle

    def control(self, code: int, size: int) -> bytes:
        """Sends a control code (DeviceIoControl). Raises MeterError if the device refuses it."""
        answer, size_read = ctypes.create_string_buffer(size), ctypes.c_uint32()
        if not self._kernel.DeviceIoControl(self._handle, code, None, 0, answer, size, ctypes.byref(size_read), None):
            raise MeterError(f"the energy meter refused control code {code:#x}; administrator rights may be needed")
        return answer.raw[: size_read.value]


def open_ports(library: Callable[[str], Any] | None = None) -> list[WindowsPort]:
    """Returns every energy meter that this user may open; none on other systems. `library` loads a library of Windows by name."""
    if library is None:
        if sys.platform != "win32":
            return []
        library = ctypes.WinDLL
    kernel, manager = library("kernel32"), library("cfgmgr32")
    kernel.CreateFileW.restype = ctypes.c_void_p
    size = ctypes.c_ulong()
    if manager.CM_Get_Device_Interface_List_SizeW(ctypes.byref(size), DEVICE_ENERGY_METER, None, ONLY_PRESENT):
        return []
    listed = ctypes.create_unicode_buffer(size.value)  # names that each end with a zero, and a final zero
    if manager.CM_Get_Device_Interface_ListW(DEVICE_ENERGY_METER, None, listed, size, ONLY_PRESENT):
        return []
    paths = [path for path in "".join(listed[:]).split("\0") if path][:MAX_METERS]
    handles = [kernel.CreateFileW(path, GENERIC_READ, SHARE_READ_WRITE, None, OPEN_EXISTING, 0, None) for path in paths]
    return [WindowsPort(kernel, ctypes.c_void_p(handle)) for handle in handles if handle != ctypes.c_void_p(-1).value]


NAME = "windows:emi"
JOULES_PER_PICOWATT_HOUR = 3.6e-9
# CTL_CODE(FILE_DEVICE_UNKNOWN, n, METHOD_BUFFERED, FILE_READ_ACCESS)
GET_VERSION, GET_METADATA_SIZE, GET_METADATA, GET_MEASUREMENT = 0x224000, 0x224004, 0x224008, 0x22400C
LARGEST_METADATA, MAX_CHANNELS = 1 << 16, 256
NAME_BYTES = 32  # EMI_NAME_MAX characters of two bytes


def parse_metadata(version: int, metadata: bytes) -> list[str]:
    """Returns the channels' names in EMI_METADATA_V1 or _V2. Raises MeterError if it is cut off or has another unit."""
    try:
        if version == 1:
            unit, size = struct.unpack_from("<I", metadata)[0], struct.unpack_from("<H", metadata, 4 + 2 * NAME_BYTES + 2)[0]
            return [_name(unit, metadata, 4 + 2 * NAME_BYTES + 4, size)]
        count = struct.unpack_from("<H", metadata, 2 * NAME_BYTES + 2)[0]
        if version != 2 or not 0 < count <= MAX_CHANNELS:
            raise MeterError(f"the energy meter has interface version {version} and {count} channels; versions 1 and 2 are known")
        names, at = [], 2 * NAME_BYTES + 4
        for _ in range(count):
            unit, size = struct.unpack_from("<IH", metadata, at)
            names.append(_name(unit, metadata, at + 6, size))
            at += 6 + size
    except struct.error as error:
        raise MeterError(f"the energy meter's description is cut off after {len(metadata)} bytes") from error
    return names


def _name(unit: int, metadata: bytes, at: int, size: int) -> str:
    if unit != 0:
        raise MeterError(f"the energy meter counts in unit {unit}; only picowatt-hours (0) are known")
    if size > len(metadata) - at:
        raise MeterError(f"the energy meter's description is cut off: a name of {size} bytes at byte {at} of {len(metadata)}")
    return metadata[at : at + size].decode("utf-16-le", "replace").rstrip("\0")


def parse_measurement(measurement: bytes, channels: int) -> list[int]:
    """Returns the picowatt-hours of each channel in EMI_CHANNEL_MEASUREMENT_DATA."""
    if len(measurement) < 16 * channels:
        raise MeterError(f"the energy meter answered {len(measurement)} bytes for {channels} channels")
    return [struct.unpack_from("<Q", measurement, 16 * i)[0] for i in range(channels)]


def channel_meter(system: System, port: WindowsPort, channels: Sequence[str], index: int) -> SumMeter:
    """Returns the meter of one channel, in joules."""
    name = channels[index]
    facts = MeterFacts(
        name=f"{NAME}:{name}",
        kind=Kind.COUNTER,
        scope=Scope.PACKAGE if name.startswith("RAPL_Package") else Scope.RAILS,
        source="IOCTL_EMI_GET_MEASUREMENT",
        refresh_s=0.01,
        resolution=61e-6,
        poll_s=1.0,
        systematic="a few percent",
    )

    def read() -> list[tuple[str, float]]:
        return [(name, parse_measurement(port.control(GET_MEASUREMENT, 16 * len(channels)), len(channels))[index])]

    return SumMeter(system, facts, read, scale=JOULES_PER_PICOWATT_HOUR)


def find(system: System, ports: Callable[[], Sequence[WindowsPort]] = open_ports) -> list[Finding]:
    """Returns one finding per channel; an empty list on other systems than Windows."""
    if system.platform != "win32":
        return []
    findings = []
    for number, port in enumerate(ports()):
        try:
            version = struct.unpack("<H", port.control(GET_VERSION, 2)[:2])[0]
            size = struct.unpack("<I", port.control(GET_METADATA_SIZE, 4)[:4])[0]
            if size > LARGEST_METADATA:
                raise MeterError(f"the energy meter announces a description of {size} bytes")
            channels = parse_metadata(version, port.control(GET_METADATA, size))
            meters = [channel_meter(system, port, channels, i) for i in range(len(channels))]
            for meter in meters:
                meter.read()
        except (MeterError, struct.error) as error:
            findings.append(present(f"{NAME}:{number}", str(error)))
        else:
            findings += [usable(meter) for meter in meters]
    return findings or [absent(NAME, "no device offers the energy meter interface; few Windows laptops do")]


SOURCES = (MeterSource(name=NAME, find=find, preference=Preference.COUNTER),)
