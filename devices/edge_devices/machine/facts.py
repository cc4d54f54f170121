"""Facts about this machine: processor, features and memory from the kernel's files, and what is installed."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from edge_devices.machine.cpu_affinity import processor_numbers
from edge_devices.machine.memory import available_memory_bytes

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
