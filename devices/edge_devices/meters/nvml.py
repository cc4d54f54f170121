"""NVIDIA graphics boards, read with the driver's library, libnvidia-ml, if it is installed.

Functions: docs.nvidia.com/deploy/nvml-api, group nvmlDeviceQueries. nvmlDeviceGetTotalEnergyConsumption is in millijoules
since the driver was loaded (Volta and later); nvmlDeviceGetPowerUsage in milliwatts, on most boards an average over the last second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from edge_devices.errors import MeterError
from edge_devices.machine.system import System
from edge_devices.meters.base import Finding, Kind, MeterFacts, MeterSource, Preference, Scope, SumMeter, absent, present, usable

NAME = "nvml"
LIBRARIES = {"win32": ("nvml.dll",), "linux": ("libnvidia-ml.so.1", "libnvidia-ml.so")}
ENERGY, POWER = "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"
NOT_SUPPORTED = 3
Loader = Callable[[str], Any]


def _call(library: Any, name: str, *arguments: Any) -> None:
    """Calls a function of NVML. Raises MeterError with the library's code if it fails."""
    code = getattr(library, name)(*arguments)
    if code != 0:
        raise MeterError(f"{name} failed with code {code}; check with nvidia-smi that the NVIDIA driver is running")


def _answer(library: Any, name: str, kind: type[Any], *arguments: Any) -> Any:
    """Returns the value that a function of NVML writes to its last argument, of the ctypes type `kind`. Raises MeterError."""
    answer = kind()
    _call(library, name, *arguments, ctypes.byref(answer))
    return answer


def board_meter(system: System, library: Any, index: int) -> SumMeter:
    """Returns the meter of one graphics board with its memory, in joules if it has a counter, else in watts. Raises MeterError."""
    device = _answer(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_void_p, ctypes.c_uint(index))
    counts = getattr(library, ENERGY)(device, ctypes.byref(ctypes.c_ulonglong())) != NOT_SUPPORTED
    function, kind = (ENERGY, ctypes.c_ulonglong) if counts else (POWER, ctypes.c_uint)

    def read() -> list[tuple[str, float]]:
        return [(f"board {index}", _answer(library, function, kind, device).value)]

    read()
    facts = MeterFacts(
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
    return SumMeter(system, facts, read, scale=1e-3)


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
        _call(library, "nvmlInit_v2")
        count = _answer(library, "nvmlDeviceGetCount_v2", ctypes.c_uint).value
        return [_finding(system, library, i) for i in range(count)] or [absent(NAME, "the NVIDIA driver lists no board")]
    except (MeterError, AttributeError) as error:
        return [present(NAME, str(error), "start or update the NVIDIA driver")]


def _finding(system: System, library: Any, index: int) -> Finding:
    try:
        return usable(board_meter(system, library, index))
    except MeterError as error:
        return present(f"nvml:{index}", str(error))


SOURCES = (MeterSource(name=NAME, find=find, preference=Preference.GRAPHICS),)
