"""Which device this is: facts about the machine and its drivers, and the profile of a common device that matches."""

from __future__ import annotations

import json
import os
import platform
import re
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from edge_devices.errors import DeviceError
from edge_devices.files.limited_read import parse_integer
from edge_devices.files.typed_json import from_json
from edge_devices.machine.device_package import installed_version
from edge_devices.machine.memory import available_memory_bytes
from edge_devices.machine.processors import usable_processors
from edge_devices.machine.system import System


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


# /proc/cpuinfo "CPU part" numbers of Arm's and Qualcomm's cores (Arm TRMs; Linux arch/arm64/include/asm/cputype.h).
ARM_PARTS = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd41"): "Cortex-A78",
    ("0x41", "0xd44"): "Cortex-X1",
}


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


BITS_PER_BYTE = 8
WattsOf = Literal["device", "laptop", "processor"]


class ProfileError(DeviceError):
    """A device profile that is unknown or malformed."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """How to recognize a device: prefixes of its model, names of its chip, patterns of its processor's name, names of its cores."""

    models: tuple[str, ...] = ()
    socs: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    cores: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The profile of one kind of device.

    Values are None if they are unknown. Bandwidths are in GB/s: the peak is transfer rate × bus width, and the effective one is a range
    that others measured. `largest_gb` is the most memory with which the device is sold. `giga_operations` are thousand million operations
    per second of a forward, as others measured. `idle_watts` are those of the device without work, and `core_watts` are added for each busy
    core, as others measured. `watts_of` is "laptop" if the watts hold only for machines with a battery, and "processor" if `idle_watts` are
    those of each processor of a shared server. `threads` None stands for all big cores.
    """

    name: str
    title: str
    sources: tuple[str, ...]
    match: Match = field(default_factory=Match)
    clusters: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    peak_gb_per_s: float | None = None
    effective_gb_per_s: tuple[float, float] | None = None
    largest_gb: int | None = None
    giga_operations: tuple[float, float] | None = None
    idle_watts: tuple[float, float] | None = None
    core_watts: tuple[float, float] | None = None
    watts_of: WattsOf = "device"
    meters: tuple[str, ...] = ()
    energy_note: str = ""
    quantization: str = "q4_0"
    threads: int | None = None
    draft_length: tuple[int, int] = (0, 6)


@cache
def profiles() -> dict[str, Profile]:
    """Returns the package's profiles by name. Their files name their sources. None was checked on hardware."""
    folder = resources.files("edge_devices") / "profiles"
    files = (f for f in folder.iterdir() if f.name.endswith(".toml"))
    return {p.name: p for p in sorted((parse_profile(f.name[:-5], f.read_text(encoding="utf-8")) for f in files), key=lambda p: p.name)}


def profile(name: str) -> Profile:
    """Returns a profile. Raises ProfileError for an unknown name."""
    try:
        return profiles()[name]
    except KeyError:
        raise ProfileError(f"there is no device profile {name!r}; choose from {', '.join(profiles())}") from None


def parse_profile(name: str, text: str) -> Profile:
    """Parses a profile's TOML. Raises ProfileError for an unknown key or an invalid value."""
    try:
        table = tomllib.loads(text)
        parts = [table.pop(part) for part in ("processor", "memory", "energy", "runtime")]
        entries = {"name": name, **table, **{key: value for part in parts for key, value in part.items()}}
        rate, bits = entries.pop("transfers_per_us", None), entries.pop("bus_bits", None)
        entries["peak_gb_per_s"] = rate * bits / BITS_PER_BYTE / 1000 if rate and bits else None
        entries["energy_note"] = entries.pop("note")
        from_json(Match, entries["match"], "match", exact=True)
        profile = from_json(Profile, entries, name, exact=True)
        for low, high in filter(None, (profile.effective_gb_per_s, profile.giga_operations, profile.idle_watts, profile.core_watts)):
            if not 0 < low <= high:
                raise ValueError(f"{low} to {high} is no range")
        for pattern in profile.match.processors:
            re.compile(pattern)
    except (ValueError, KeyError, TypeError, AttributeError, re.error) as error:
        raise ProfileError(f"the device profile {name} is malformed: {error!r}") from error
    if not profile.sources:
        raise ProfileError(f"the device profile {name} has no sources")
    return profile


BIG_SHARE = 0.6  # least share of the fastest cluster's clock: work is split evenly, so slower cores would delay the others
MAX_PROCESSORS = 4096
DISTRIBUTIONS = ("edge-mtp", "llama-cpp-python", "onnxruntime")  # packages whose versions affect a measurement


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Processors that share one clock, and its highest frequency in MHz."""

    processors: tuple[int, ...]
    max_mhz: float


@dataclass(frozen=True, kw_only=True)
class Device:
    """This machine, its profile, and the drivers of GPUs and NPUs. `why` says why the profile was chosen. `threads` is for decoding."""

    machine: Machine
    model: str
    soc: str
    clusters: tuple[Cluster, ...]
    profile: Profile
    why: str
    threads: int
    drivers: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns plain values under stable keys. The machine's values are at the top level beside the others."""
        record = asdict(self)
        machine: dict[str, Any] = record.pop("machine")
        return machine | record


def detect_device(system: System) -> Device:
    """Returns the device on which this runs."""
    machine = read_machine(system.root)
    model = system.text_or("proc/device-tree/model").rstrip("\0") or system.text_or("sys/class/dmi/id/product_name")
    soc = system.run(["getprop", "ro.soc.model"]).text.strip() if system.is_android else ""
    clusters = read_clusters(system)
    profile, why = pick_profile(machine, model, soc)
    big = big_processors(clusters, machine.usable_processors)
    threads = min(profile.threads or big, machine.usable_processors)
    return Device(
        machine=machine,
        model=model,
        soc=soc,
        clusters=clusters,
        profile=replace(profile, threads=threads),
        why=why,
        threads=threads,
        drivers=tuple(driver_facts(system)),
    )


def environment(system: System) -> dict[str, Any]:
    """Returns the machine's entry in the record of a measurement: hardware, kernel and versions, but nothing about the user."""
    device = detect_device(system)
    return {
        "platform": platform.platform(),
        "model": device.model,
        "soc": device.soc,
        "processor": device.machine.processor,
        "processors": device.machine.usable_processors,
        "clusters": [asdict(c) for c in device.clusters],
        "profile": device.profile.name,
        "drivers": list(device.drivers),
        "versions": {"python": platform.python_version()}
        | {name: version for name in DISTRIBUTIONS if (version := installed_version(name))},
    }


def pick_profile(machine: Machine, model: str, soc: str) -> tuple[Profile, str]:
    """Returns the best profile and the reason: by model, else by chip, processor's name (longest match) or cores, else a generic one."""
    known = list(profiles().values())
    for profile in known:
        if model and model.startswith(profile.match.models):
            return profile, f"the model is {model}"
    for profile in known:
        if soc and soc in profile.match.socs:
            return profile, f"the chip is {soc}"
    matches = [
        (len(hit[0]), profile.name)
        for profile in known
        for pattern in profile.match.processors
        if (hit := re.search(pattern, machine.processor))
    ]
    if matches:
        return profiles()[max(matches)[1]], f"the processor is {machine.processor}"
    for profile in known:
        if set(machine.cores) & set(profile.match.cores):
            return profile, f"the cores are {machine.cores[0]}"
    return generic_profile(machine), "no profile fits, so it was built from facts of the machine"


def generic_profile(machine: Machine) -> Profile:
    """Returns a profile for unknown hardware; the architecture decides the quantization."""
    arm = machine.architecture in ("aarch64", "arm64", "armv8l")
    return Profile(
        name="generic-arm" if arm else "generic",
        title=f"{machine.system} {machine.architecture}",
        sources=("this machine",),
        clusters=tuple(sorted({c for c in machine.cores if c})),
        features=machine.features,
        quantization="q4_0" if arm else "q4_k_m",
    )


def read_clusters(system: System) -> tuple[Cluster, ...]:
    """Returns the clusters of cpufreq, fastest first; none if the kernel lists none."""
    clusters = []
    for policy in system.paths("sys/devices/system/cpu/cpufreq/policy*"):
        numbers = [parse_integer(text) for text in system.text_or(f"{policy}/related_cpus").split()]
        processors = tuple(number for number in numbers if number is not None and number < MAX_PROCESSORS)
        khz = parse_integer(system.text_or(f"{policy}/cpuinfo_max_freq"))
        if processors and khz is not None and len(processors) == len(numbers):
            clusters.append(Cluster(processors=processors, max_mhz=khz / 1000))
    return tuple(sorted(clusters, key=lambda c: (-c.max_mhz, c.processors)))


def big_processors(clusters: tuple[Cluster, ...], usable: int) -> int:
    """Returns how many processors reach at least BIG_SHARE of the fastest clock; all if the clusters are unknown."""
    if not clusters:
        return usable
    big = sum(len(c.processors) for c in clusters if c.max_mhz >= BIG_SHARE * clusters[0].max_mhz)
    return max(1, min(big, usable))
