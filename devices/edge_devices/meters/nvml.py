"""NVIDIA graphics boards through the driver's own library, libnvidia-ml, where it is installed.

Functions: docs.nvidia.com/deploy/nvml-api, group nvmlDeviceQueries. nvmlDeviceGetTotalEnergyConsumption is in millijoules
since the driver was loaded (Volta and later); nvmlDeviceGetPowerUsage in milliwatts, on most boards an average over the last second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, MeterFacts, Sample, Scope, Unwrapped, absent, present, usable

NAME = "nvml"
LIBRARIES = {"win32": ("nvml.dll",), "linux": ("libnvidia-ml.so.1", "libnvidia-ml.so")}
NOT_SUPPORTED = 3
Loader = Callable[[str], Any]


class Nvml:
    """The NVML calls that the meter uses. Raises MeterError with the library's code if one fails."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("nvmlInit_v2")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise MeterError(f"{name} failed with code {code}; check with nvidia-smi that the NVIDIA driver is running")

    def count(self) -> int:
        """Returns how many boards there are."""
        number = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(number))
        return number.value

    def device(self, index: int) -> ctypes.c_void_p:
        """Returns the handle of a board."""
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def millijoules(self, device: ctypes.c_void_p) -> int | None:
        """Returns the energy since the driver was loaded; None where the board has no counter."""
        number = ctypes.c_ulonglong()
        if self._library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(number)) == NOT_SUPPORTED:
            return None
        self._call("nvmlDeviceGetTotalEnergyConsumption", device, ctypes.byref(number))
        return number.value

    def milliwatts(self, device: ctypes.c_void_p) -> int:
        """Returns the board's power now."""
        number = ctypes.c_uint()
        self._call("nvmlDeviceGetPowerUsage", device, ctypes.byref(number))
        return number.value


class BoardMeter:
    """One graphics board with its memory: joules if it has a counter, else watts."""

    def __init__(self, system: System, nvml: Nvml, index: int) -> None:
        self._system, self._nvml = system, nvml
        self._device = nvml.device(index)
        self._register = Unwrapped(f"NVML's counter of board {index}", None)
        counts = nvml.millijoules(self._device) is not None
        if not counts:
            nvml.milliwatts(self._device)
        function = "nvmlDeviceGetTotalEnergyConsumption" if counts else "nvmlDeviceGetPowerUsage"
        self.facts = MeterFacts(
            name=f"nvml:{index}",
            kind=Kind.COUNTER if counts else Kind.SAMPLER,
            scope=Scope.GPU,
            source=function,
            refresh_s=0.1,
            resolution=0.001,
            poll_s=0.1,
            lag_s=0.0 if counts else 1.0,
            systematic="about 5 % (the board's sensor)",
            notes=("the graphics board alone, without the processor that feeds it",),
        )

    def read(self) -> Sample:
        if self.facts.kind is Kind.SAMPLER:
            milliwatts = self._nvml.milliwatts(self._device)
            return Sample(self._system.clock(), milliwatts / 1000, str(milliwatts))
        millijoules = self._nvml.millijoules(self._device)
        if millijoules is None:
            raise MeterError("the graphics board no longer counts its energy; measure again")
        return Sample(self._system.clock(), self._register.total(millijoules) / 1000, str(millijoules))


def find(system: System, load: Loader = ctypes.CDLL) -> list[Finding]:
    """Returns one finding per board."""
    library = None
    for name in LIBRARIES.get(system.platform, ()):
        try:
            library = load(name)
            break
        except OSError:
            continue
    if library is None:
        return [absent(NAME, "no NVIDIA driver library on this machine")]
    try:
        nvml = Nvml(library)
        return [_finding(system, nvml, i) for i in range(nvml.count())] or [absent(NAME, "the NVIDIA driver lists no board")]
    except (MeterError, AttributeError) as error:
        return [present(NAME, str(error), "start or update the NVIDIA driver")]


def _finding(system: System, nvml: Nvml, index: int) -> Finding:
    try:
        return usable(BoardMeter(system, nvml, index))
    except MeterError as error:
        return present(f"nvml:{index}", str(error))
