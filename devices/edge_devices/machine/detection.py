"""Which device this is: a profile that fits, filled with what the machine itself says."""

from __future__ import annotations

import platform
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from edge_devices.machine.facts import Machine, read_machine
from edge_devices.machine.profiles import Profile, profiles
from edge_devices.machine.system import System

BIG_SHARE = 0.6  # of the fastest cluster's clock: slower cores hold the others up when work is split evenly
MOST_PROCESSORS = 4096


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Processors that share one clock, and its highest frequency in MHz."""

    processors: tuple[int, ...]
    max_mhz: float


@dataclass(frozen=True, kw_only=True)
class Device:
    """This machine and the profile that fits it. `why`: by what it was chosen; `threads`: how many to run decoding with."""

    machine: Machine
    model: str
    soc: str
    clusters: tuple[Cluster, ...]
    profile: Profile
    why: str
    threads: int

    def to_json(self) -> dict[str, Any]:
        """The machine's values at the top, as ever, and the rest beside them."""
        record = asdict(self)
        machine: dict[str, Any] = record.pop("machine")
        return machine | record


def detect_device(system: System) -> Device:
    """Reads the machine and picks a profile, or builds one."""
    machine = read_machine(system.root)
    model = system.text_or("proc/device-tree/model").rstrip("\0") or system.text_or("sys/class/dmi/id/product_name")
    soc = system.run(["getprop", "ro.soc.model"]).text.strip() if system.is_android else ""
    clusters = read_clusters(system)
    found, why = pick_profile(machine, model, soc)
    big = big_processors(clusters, machine.usable_processors)
    threads = min(found.threads or big, machine.usable_processors)
    return Device(
        machine=machine, model=model, soc=soc, clusters=clusters, profile=replace(found, threads=threads), why=why, threads=threads
    )


def environment(system: System) -> dict[str, Any]:
    """Returns what a measurement's record says of the machine it was made on: hardware and kernel, nothing about its user."""
    device = detect_device(system)
    return {
        "platform": platform.platform(),
        "model": device.model,
        "soc": device.soc,
        "processor": device.machine.processor,
        "processors": device.machine.usable_processors,
        "clusters": [asdict(c) for c in device.clusters],
        "profile": device.profile.name,
    }


def pick_profile(machine: Machine, model: str, soc: str) -> tuple[Profile, str]:
    """Returns the profile that fits best and why: by model, by chip, by processor's name (the longest match), else a generic one."""
    known = list(profiles().values())
    for found in known:
        if model and model.startswith(found.match.models):
            return found, f"the model is {model}"
    for found in known:
        if soc and soc in found.match.socs:
            return found, f"the chip is {soc}"
    matches = [
        (len(hit[0]), found.name) for found in known for pattern in found.match.processors if (hit := re.search(pattern, machine.processor))
    ]
    if matches:
        return profiles()[max(matches)[1]], f"the processor is {machine.processor}"
    for found in known:
        if set(machine.cores) & set(found.match.cores):
            return found, f"the cores are {machine.cores[0]}"
    return generic_profile(machine), "no profile fits: built from what the machine says"


def generic_profile(machine: Machine) -> Profile:
    """Returns a profile for hardware nobody described: the instructions it has decide between the formats."""
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
    """Returns the clusters of cpufreq, fastest first; none where the kernel does not say."""
    found = []
    for policy in system.paths("sys/devices/system/cpu/cpufreq/policy*"):
        processors = system.text_or(f"{policy}/related_cpus").split()
        khz = system.text_or(f"{policy}/cpuinfo_max_freq")
        if processors and all(map(_is_number, (khz, *processors))) and all(int(p) < MOST_PROCESSORS for p in processors):
            found.append(Cluster(processors=tuple(map(int, processors)), max_mhz=int(khz) / 1000))
    return tuple(sorted(found, key=lambda c: (-c.max_mhz, c.processors)))


def big_processors(clusters: tuple[Cluster, ...], usable: int) -> int:
    """Returns how many processors keep pace with the fastest ones; all where nothing is known of clusters."""
    if not clusters:
        return usable
    big = sum(len(c.processors) for c in clusters if c.max_mhz >= BIG_SHARE * clusters[0].max_mhz)
    return max(1, min(big, usable))


def _is_number(text: str) -> bool:
    """Whether these are decimal digits, and not more of them than any real file holds."""
    return text.isdecimal() and len(text) <= 18
