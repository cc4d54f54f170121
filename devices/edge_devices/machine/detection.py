"""Device detection: the profile that matches this machine, completed with facts read from it."""

from __future__ import annotations

import platform
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from edge_devices.files.limited_read import parse_integer
from edge_devices.machine.facts import Machine, installed_version, read_machine
from edge_devices.machine.graphics import driver_facts
from edge_devices.machine.profiles import Profile, profiles
from edge_devices.machine.system import System

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
