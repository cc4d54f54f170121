"""Opening the energy meters of a Windows machine: setupapi lists them, kernel32 asks them."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from edge_devices.errors import MeterError

DEVICE_ENERGY_METER = (0x45BD8344, 0x7ED6, 0x49CF, bytes.fromhex("A440C276C933B053"))
PRESENT_INTERFACES = 0x12  # DIGCF_PRESENT | DIGCF_DEVICEINTERFACE
GENERIC_READ, SHARE_READ_WRITE, OPEN_EXISTING = 0x80000000, 3, 3
MOST_METERS = 64
LONGEST_PATH = 1024


class Guid(ctypes.Structure):
    """GUID of guiddef.h."""

    _fields_ = (("a", ctypes.c_uint32), ("b", ctypes.c_uint16), ("c", ctypes.c_uint16), ("d", ctypes.c_ubyte * 8))


class InterfaceData(ctypes.Structure):
    """SP_DEVICE_INTERFACE_DATA of setupapi.h."""

    _fields_ = (("size", ctypes.c_uint32), ("guid", Guid), ("flags", ctypes.c_uint32), ("reserved", ctypes.c_void_p))


class InterfaceDetail(ctypes.Structure):
    """SP_DEVICE_INTERFACE_DETAIL_DATA_W of setupapi.h, with room for a path."""

    _fields_ = (("size", ctypes.c_uint32), ("path", ctypes.c_wchar * LONGEST_PATH))


class WindowsPort:
    """One open energy meter."""

    def __init__(self, kernel: Any, handle: Any) -> None:
        self._kernel, self._handle = kernel, handle

    def control(self, code: int, size: int) -> bytes:
        """Asks the device (DeviceIoControl); raises MeterError when it refuses."""
        answer, taken = ctypes.create_string_buffer(size), ctypes.c_uint32()
        if not self._kernel.DeviceIoControl(self._handle, code, None, 0, answer, size, ctypes.byref(taken), None):
            raise MeterError(f"the energy meter refused control code {code:#x}; administrator rights may be needed.")
        return answer.raw[: taken.value]


def open_ports() -> list[WindowsPort]:
    """Returns every energy meter this user may open; none on a machine without Windows."""
    if sys.platform != "win32":
        return []
    kernel, setup = ctypes.WinDLL("kernel32"), ctypes.WinDLL("setupapi")
    setup.SetupDiGetClassDevsW.restype = ctypes.c_void_p
    kernel.CreateFileW.restype = ctypes.c_void_p
    a, b, c, d = DEVICE_ENERGY_METER
    guid = Guid(a, b, c, (ctypes.c_ubyte * 8)(*d))
    listed = ctypes.c_void_p(setup.SetupDiGetClassDevsW(ctypes.byref(guid), None, None, PRESENT_INTERFACES))
    invalid = ctypes.c_void_p(-1).value
    ports = []
    for index in range(MOST_METERS):
        data = InterfaceData(size=ctypes.sizeof(InterfaceData))
        if not setup.SetupDiEnumDeviceInterfaces(listed, None, ctypes.byref(guid), index, ctypes.byref(data)):
            break
        # The field counts the fixed part alone: 8 bytes in a 64-bit process, 6 in a 32-bit one.
        detail = InterfaceDetail(size=8 if ctypes.sizeof(ctypes.c_void_p) == 8 else 6)
        if not setup.SetupDiGetDeviceInterfaceDetailW(listed, ctypes.byref(data), ctypes.byref(detail), ctypes.sizeof(detail), None, None):
            continue
        handle = kernel.CreateFileW(detail.path, GENERIC_READ, SHARE_READ_WRITE, None, OPEN_EXISTING, 0, None)
        if handle != invalid:
            ports.append(WindowsPort(kernel, ctypes.c_void_p(handle)))
    setup.SetupDiDestroyDeviceInfoList(listed)
    return ports
