"""Profiles of common devices, as priors: facts read on the machine itself take precedence.

The files (`profiles/*.toml`) name their sources. None was checked on hardware.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Literal

from edge_devices.errors import DeviceError
from edge_devices.files.typed_json import from_json

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
    """Returns the package's profiles by name."""
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
