"""Profiles of common devices, as priors: facts read on the machine itself take precedence.

The files (`profiles/*.toml`) name their sources. None was checked on hardware.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal, cast, get_args

from edge_devices.errors import DeviceError

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

    `giga_operations`: operations per second of a forward in thousand millions, from others' measurements; None if unknown.
    `idle_watts`, `core_watts`: the device without work, and more for each busy core, as others measured them; None if unknown. `watts_of`:
    "laptop" for watts of machines with a battery alone, "processor" where `idle_watts` are those of each processor of a shared server.
    `threads` None: all big cores. `execution_providers`: the first is the default.
    """

    name: str
    title: str
    sources: tuple[str, ...]
    match: Match = field(default_factory=Match)
    clusters: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    peak_gb_per_s: float | None = None
    effective_gb_per_s: tuple[float, float] | None = None
    giga_operations: tuple[float, float] | None = None
    idle_watts: tuple[float, float] | None = None
    core_watts: tuple[float, float] | None = None
    watts_of: WattsOf = "device"
    meters: tuple[str, ...] = ()
    energy_note: str = ""
    execution_providers: tuple[str, ...] = ("cpu",)
    quantization: str = "q4_0"
    threads: int | None = None
    draft_length: tuple[int, int] = (0, 6)

    def to_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return asdict(self)


@cache
def profiles() -> dict[str, Profile]:
    """Returns the package's profiles by name."""
    folder = resources.files("edge_devices") / "profiles"
    found = (f for f in folder.iterdir() if f.name.endswith(".toml"))
    return {p.name: p for p in sorted((parse_profile(f.name[:-5], f.read_text(encoding="utf-8")) for f in found), key=lambda p: p.name)}


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
        match, processor, memory, energy, runtime = (table.pop(k) for k in ("match", "processor", "memory", "energy", "runtime"))
        rate, bits = memory.pop("transfers_per_us", None), memory.pop("bus_bits", None)
        effective, operations = memory.pop("effective_gb_per_s", None), processor.pop("giga_operations", None)
        found = Profile(
            name=name,
            title=str(table.pop("title")),
            sources=_texts(table.pop("sources")),
            match=Match(**{k: _texts(v) for k, v in match.items()}),
            clusters=_texts(processor.pop("clusters")),
            features=_texts(processor.pop("features")),
            peak_gb_per_s=rate * bits / BITS_PER_BYTE / 1000 if rate and bits else None,
            effective_gb_per_s=_pair(effective),
            giga_operations=_pair(operations),
            idle_watts=_pair(energy.pop("idle_watts", None)),
            core_watts=_pair(energy.pop("core_watts", None)),
            watts_of=_watts_of(energy.pop("watts_of", "device")),
            meters=_texts(energy.pop("meters")),
            energy_note=str(energy.pop("note")),
            execution_providers=_texts(runtime.pop("execution_providers")),
            quantization=str(runtime.pop("quantization")),
            threads=runtime.pop("threads", None),
            draft_length=tuple(runtime.pop("draft_length")),
        )
        left = [*table, *processor, *memory, *energy, *runtime]
        for pattern in found.match.processors:
            re.compile(pattern)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, re.error) as error:
        raise ProfileError(f"the device profile {name} is malformed: {error!r}") from error
    if left or not found.sources:
        raise ProfileError(f"the device profile {name} has unknown keys {left} or no sources")
    return found


def _pair(values: Any) -> tuple[float, float] | None:
    if values is None:
        return None
    low, high = map(float, values)
    if not 0 < low <= high:
        raise ValueError(f"{values!r} is no range")
    return low, high


def _watts_of(value: Any) -> WattsOf:
    found = next((one for one in get_args(WattsOf) if one == value), None)
    if found is None:
        raise ValueError(f"watts_of {value!r} is none of {', '.join(get_args(WattsOf))}")
    return cast(WattsOf, found)


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise TypeError(f"{values!r} is not a list of strings")
    return tuple(values)
