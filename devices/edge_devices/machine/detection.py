"""Which device this is: the profile of a common device that matches, completed with facts read from the machine."""

from __future__ import annotations

import platform
import re
import tomllib
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from edge_devices.errors import DeviceError
from edge_devices.files.limited_read import parse_integer
from edge_devices.files.typed_json import from_json
from edge_devices.machine.facts import Machine, driver_facts, installed_version, read_machine
from edge_devices.machine.system import System

BITS_PER_BYTE = 8
WattsOf = Literal["device", "laptop", "processor"]


class ProfileError(DeviceError):
    """A device profile that is unknown or malformed."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """What identifies a device: prefixes of its model, its chip, patterns of its processor's name, names of its cores."""

    models: tuple[str, ...] = ()
    socs: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    cores: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One device. Bandwidths in GB/s: `peak` from transfer rate × bus width, `effective` from others' measurements; None if unknown.

    `largest_gb`: the most memory that the device is sold with, None if unknown.
    `giga_operations`: operations per second of a forward in thousand millions, from others' measurements; None if unknown.
    `idle_watts`, `core_watts`: the device without work, and more for each busy core, as others measured them; None if unknown. `watts_of`:
    "laptop" for watts of machines with a battery alone, "processor" where `idle_watts` are those of each processor of a shared server.
    `threads` None: all big cores.
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
    """Returns the package's profiles by name. Their files name their sources; none was checked on hardware."""
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
    """Reads a profile's TOML; raises ProfileError for an unknown key or an invalid value."""
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


BIG_SHARE = 0.6  # of the fastest cluster's clock: work is split evenly, so slower cores delay the others
MAX_PROCESSORS = 4096
DISTRIBUTIONS = ("edge-mtp", "llama-cpp-python", "onnxruntime")  # whose versions a measurement depends on


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Processors that share one clock, and its highest frequency in MHz."""

    processors: tuple[int, ...]
    max_mhz: float


@dataclass(frozen=True, kw_only=True)
class Device:
    """This machine, its profile, and the `drivers` of GPUs and NPUs. `why`: what the profile was chosen by; `threads`: to decode with."""

    machine: Machine
    model: str
    soc: str
    clusters: tuple[Cluster, ...]
    profile: Profile
    why: str
    threads: int
    drivers: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys: the machine's at the top level, the others beside them."""
        record = asdict(self)
        machine: dict[str, Any] = record.pop("machine")
        return machine | record


def detect_device(system: System) -> Device:
    """Returns the device this runs on."""
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
    """Returns the machine's entry in the record of a measurement: hardware, kernel and versions, nothing about the user."""
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
    """Returns the profile that fits best and why: by model, by chip, by processor's name (the longest match), else a generic one."""
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
    """Returns the clusters of cpufreq, fastest first; none where the kernel lists none."""
    clusters = []
    for policy in system.paths("sys/devices/system/cpu/cpufreq/policy*"):
        numbers = [parse_integer(text) for text in system.text_or(f"{policy}/related_cpus").split()]
        processors = tuple(number for number in numbers if number is not None and number < MAX_PROCESSORS)
        khz = parse_integer(system.text_or(f"{policy}/cpuinfo_max_freq"))
        if processors and khz is not None and len(processors) == len(numbers):
            clusters.append(Cluster(processors=processors, max_mhz=khz / 1000))
    return tuple(sorted(clusters, key=lambda c: (-c.max_mhz, c.processors)))


def big_processors(clusters: tuple[Cluster, ...], usable: int) -> int:
    """Returns how many processors run at least at BIG_SHARE of the fastest clock; all if the clusters are unknown."""
    if not clusters:
        return usable
    big = sum(len(c.processors) for c in clusters if c.max_mhz >= BIG_SHARE * clusters[0].max_mhz)
    return max(1, min(big, usable))
