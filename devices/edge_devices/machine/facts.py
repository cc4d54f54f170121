"""Facts about this machine: its processors and which of them a process may use, its accelerators' drivers, what is installed."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import accumulate, groupby
from pathlib import Path

from edge_devices.machine.memory import available_memory_bytes
from edge_devices.machine.system import System

# ggml aborts the process above this.
MAX_THREADS = 512
_SYSTEM = Path("/sys/devices/system/cpu")
# Relative speed for the scheduler (Linux, Documentation/scheduler/sched-capacity.rst); else the highest frequency.
_SPEEDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")
# Equal cores may differ a little in rated speed (favoured cores of desktop processors); clusters differ by more.
_SAME = 0.9


@cache
def processor_groups() -> list[list[int]]:
    """Returns the processors this process may run on, grouped by speed, the fastest first; read once per process."""
    return clusters(processor_numbers())


def processor_numbers() -> Collection[int]:
    """Returns the numbers of the processors this process may run on now."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def clusters(processors: Iterable[int], root: Path = _SYSTEM) -> list[list[int]]:
    """Groups processors by speed, the fastest first; one group where they are alike or their speed is unknown."""
    speeds = {number: _speed(root / f"cpu{number}") for number in processors}
    ranked = sorted(speeds, key=lambda number: (-(speeds[number] or 0), number))
    if not ranked or None in speeds.values():
        return [sorted(speeds)]
    levels: dict[int, int] = {}
    level, top = 0, speeds[ranked[0]] or 0
    for number in ranked:
        speed = speeds[number] or 0
        if speed < _SAME * top:
            level, top = level + 1, speed
        levels[number] = level
    return [list(group) for _, group in groupby(ranked, key=levels.__getitem__)]


def fastest(count: int, groups: list[list[int]]) -> list[int]:
    """Returns the fewest of the fastest groups, as one list, that have room for `count` threads."""
    for size, chosen in zip(accumulate(map(len, groups)), accumulate(groups), strict=True):
        if size >= count:
            return chosen
    return [number for group in groups for number in group]


def keep_to_fastest(threads: int, groups: list[list[int]]) -> None:
    """Where cores differ, restricts this process to the fastest groups with room for `threads` threads."""
    if len(groups) > 1:
        stay_on(fastest(threads, groups))


def stay_on(processors: Iterable[int]) -> None:
    """Restricts all threads of this process, also later ones, to these processors; does nothing where the system has no affinity."""
    if not hasattr(os, "sched_setaffinity"):
        return
    mask = set(processors)
    threads = Path("/proc/self/task")
    for thread in [int(path.name) for path in threads.iterdir()] if threads.is_dir() else [0]:
        with contextlib.suppress(OSError):  # the thread has ended, or the processors are reserved
            os.sched_setaffinity(thread, mask)


def _speed(folder: Path) -> int | None:
    for name in _SPEEDS:
        with contextlib.suppress(OSError, ValueError):
            return int((folder / name).read_text(encoding="ascii"))
    return None


# Kernel modules of GPUs and NPUs; those with a version of their own have it in sysfs, others change with the kernel.
_MODULES = ("nvidia", "amdgpu", "i915", "xe", "nouveau", "panfrost", "panthor", "v3d", "msm", "intel_vpu", "amdxdna")
# Where Vulkan's loader looks for its drivers (Vulkan-Loader, docs/LoaderDriverInterface.md).
_VULKAN_FOLDERS = ("etc/vulkan/icd.d", "usr/share/vulkan/icd.d", "usr/local/share/vulkan/icd.d")
_VULKAN_VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
_WINDOWS_QUERY = "Get-CimInstance Win32_VideoController | ForEach-Object { $_.Name + ' ' + $_.DriverVersion }"


def driver_facts(system: System) -> list[str]:
    """Returns a short text for each driver there is, such as "amdgpu (Linux 6.12.1)", "Vulkan: libvk_swiftshader.so, 5242880 bytes".

    On macOS drivers are part of the system: its version.
    """
    if system.platform == "darwin":
        return [f"macOS {platform.mac_ver()[0]}"]
    if system.platform == "win32":
        return system.run(["powershell", "-NoProfile", "-Command", _WINDOWS_QUERY]).text.splitlines()
    return [*_kernel_modules(system), *_vulkan_drivers(system)]


def board_name(system: System, address: str) -> str:
    """Returns the name of the GPU at a PCI address such as "0000:01:00.0", as NVIDIA's driver says it, else its numbers; empty if unknown.

    Numbers: sysfs-bus-pci (docs.kernel.org/admin-guide/abi), vendor and device in hexadecimal.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", address):
        return ""
    model = re.search(r"^Model:\s*(\S.*)$", system.text_or(f"proc/driver/nvidia/gpus/{address.lower()}/information"), re.MULTILINE)
    if model is not None:
        return model.group(1).strip()
    numbers = [system.text_or(f"sys/bus/pci/devices/{address.lower()}/{name}").removeprefix("0x") for name in ("vendor", "device")]
    return f"PCI {':'.join(numbers)}" if all(numbers) else ""


def _kernel_modules(system: System) -> Iterator[str]:
    kernel = system.text_or("proc/sys/kernel/osrelease")
    for module in _MODULES:
        if (system.root / "sys/module" / module).is_dir():
            yield f"{module} {system.text_or(f'sys/module/{module}/version') or f'(Linux {kernel})'}"


def _vulkan_drivers(system: System) -> Iterator[str]:
    named = next((os.environ[name] for name in _VULKAN_VARIABLES if os.environ.get(name)), None)
    if named is not None:
        files = [Path(part) for part in named.split(os.pathsep)]
    else:
        files = sorted(path for folder in _VULKAN_FOLDERS for path in (system.root / folder).glob("*.json"))
    for file in files:
        try:
            library = str(json.loads(file.read_text(encoding="utf-8"))["ICD"]["library_path"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield f"Vulkan: {Path(library).name}{_size(file, library)}"


def _size(manifest: Path, library: str) -> str:
    """The size of a driver's library, which another version of it hardly has; nothing where the system's loader would search for it."""
    path = manifest.parent / library if re.search(r"[/\\]", library) else None
    return f", {path.stat().st_size} bytes" if path is not None and path.is_file() else ""


# /proc/cpuinfo "CPU part" numbers of Arm's and Qualcomm's cores (Arm TRMs; Linux arch/arm64/include/asm/cputype.h).
ARM_PARTS = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd41"): "Cortex-A78",
    ("0x41", "0xd44"): "Cortex-X1",
}

_CPU_FIELDS = {"model name", "flags", "Features", "CPU implementer", "CPU variant", "CPU part", "CPU revision"}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine. `features` are the kernel's flags; memory is in bytes, None where the kernel does not say."""

    system: str
    architecture: str
    processor: str
    cores: tuple[str, ...]
    usable_processors: int
    features: tuple[str, ...]
    memory_available: int | None


def read_machine(root: Path = Path("/")) -> Machine:
    """Reads /proc below `root`; missing values stay empty."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    blocks = [_fields(block) for block in text.split("\n\n") if block.strip()]
    first = blocks[0] if blocks else {}
    cores = tuple(_core_name(b) for b in blocks if "processor" in b)
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        processor=first.get("model name") or next((c for c in cores if c), "") or platform.processor(),
        cores=cores,
        usable_processors=usable_processors(),
        features=tuple(sorted((first.get("flags") or first.get("Features") or "").split())),
        memory_available=available_memory_bytes(root),
    )


def usable_processors() -> int:
    """Returns how many processors this process may run on."""
    return len(processor_numbers())


def cpu_identity() -> list[str]:
    """Returns the lines of /proc/cpuinfo that tell one CPU's instruction sets from another's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [platform.processor()]
    pairs = (line.partition(":") for line in lines)
    return sorted({f"{name.strip()}:{value.strip()}" for name, _, value in pairs if name.strip() in _CPU_FIELDS})


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _core_name(block: dict[str, str]) -> str:
    if "model name" in block:
        return block["model name"]
    implementer, part = block.get("CPU implementer", ""), block.get("CPU part", "")
    if implementer == "0x51":
        return "Oryon" if part == "0x001" else f"Qualcomm {part}"
    return ARM_PARTS.get((implementer, part), f"{implementer} {part}".strip())


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
