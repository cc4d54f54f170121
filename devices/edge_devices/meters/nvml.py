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
from edge_devices.meters.base import Finding, Kind, MeterFacts, Scope, SumMeter, absent, present, usable

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

    def _number(self, name: str, kind: type[Any], *arguments: Any) -> Any:
        number = kind()
        self._call(name, *arguments, ctypes.byref(number))
        return number

    def count(self) -> int:
        """Returns how many boards there are."""
        return int(self._number("nvmlDeviceGetCount_v2", ctypes.c_uint).value)

    def device(self, index: int) -> Any:
        """Returns the handle of a board."""
        return self._number("nvmlDeviceGetHandleByIndex_v2", ctypes.c_void_p, ctypes.c_uint(index))

    def counts_energy(self, device: Any) -> bool:
        """Returns whether the board has a counter of its energy."""
        return bool(self._library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(ctypes.c_ulonglong())) != NOT_SUPPORTED)

    def millijoules(self, device: Any) -> int:
        """Returns the energy since the driver was loaded."""
        return int(self._number("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong, device).value)

    def milliwatts(self, device: Any) -> int:
        """Returns the board's power now."""
        return int(self._number("nvmlDeviceGetPowerUsage", ctypes.c_uint, device).value)


def board_meter(system: System, nvml: Nvml, index: int) -> SumMeter:
    """Returns the meter of one graphics board with its memory: joules if it has a counter, else watts. Raises MeterError without either."""
    device = nvml.device(index)
    counts = nvml.counts_energy(device)
    figure = nvml.millijoules if counts else nvml.milliwatts
    figure(device)
    facts = MeterFacts(
        name=f"nvml:{index}",
        kind=Kind.COUNTER if counts else Kind.SAMPLER,
        scope=Scope.GPU,
        source="nvmlDeviceGetTotalEnergyConsumption" if counts else "nvmlDeviceGetPowerUsage",
        refresh_s=0.1,
        resolution=0.001,
        poll_s=0.1,
        lag_s=0.0 if counts else 1.0,
        systematic="about 5 % (the board's sensor)",
        notes=("the graphics board alone, without the processor that feeds it",),
    )
    return SumMeter(system, facts, lambda: [(f"board {index}", figure(device))], scale=1e-3)


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
        return usable(board_meter(system, nvml, index))
    except MeterError as error:
        return present(f"nvml:{index}", str(error))
